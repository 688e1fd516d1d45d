"""``zero_optimization``, ``aio`` and activation checkpoints on the host, as settings of fxzero's.

DeepSpeed counts elements where fxzero counts bytes: a size is multiplied by what an element takes
in the dtype that is gathered. What lives on the host or on disk:

    offload_optimizer   offload_param   memory
    cpu                 –               states_host
    cpu                 cpu             all_host
    –                   cpu             all_host: state is updated where parameters live
    nvme in one of them                 infinity, in disk.paths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxzero.disk.scratch import BLOCK
from fxzero.integrations.deepspeed.lines import Found
from fxzero.integrations.deepspeed.precisions import Dtypes

ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"


@dataclass(frozen=True)
class Placed:
    """What `shard` is told, and the compiler."""

    zero: int
    offload: bool
    options: dict[str, Any]


def map_zero(found: Found, dtypes: Dtypes) -> Placed:
    """Map the stage, buckets, and what lives where."""
    zero = found.get(f"{ZERO}.stage", 0)
    found.mapped(f"{ZERO}.stage", f"shard(zero={zero})")
    options: dict[str, Any] = {}
    if dtypes.stop_unless_finite:
        options["stop_unless_finite"] = True
    _buckets(found, zero, dtypes.element_bytes, options)
    _prefetch(found, zero, dtypes.element_bytes, options)
    offload = _offload(found, zero, dtypes.element_bytes, options)
    _aio(found, options)
    if found.get("activation_checkpointing.cpu_checkpointing", False):
        options["offload_activations"] = {"share": 1.0}
        found.mapped(
            "activation_checkpointing.cpu_checkpointing", "options offload_activations.share=1"
        )
    else:
        found.needless("activation_checkpointing.cpu_checkpointing", "nothing is moved")
    return Placed(zero, offload, options)


def _buckets(found: Found, zero: int, element: int, options: dict[str, Any]) -> None:
    bucket: dict[str, int] = {}
    sizes = [f"{ZERO}.reduce_bucket_size", f"{ZERO}.allgather_bucket_size"]
    given = [path for path in sizes if found.get(path, 0) > 0]
    if "allgather_size" in found.values:
        if found.written.get(f"{ZERO}.stage") == ZERO and zero:
            given.append("allgather_size")
        else:
            found.needless("allgather_size", "it goes with zero_optimization: true")
    if given:
        bucket["cap_bytes"] = min(found.get(path) for path in given) * element
    for path in (*sizes, "allgather_size"):
        if path in given:
            found.mapped(path, _cap(found.get(path) * element, bucket["cap_bytes"], element))
        else:
            found.needless(path, "0 elements bound nothing")
    path = f"{ZERO}.param_persistence_threshold"
    if zero != 3:
        found.needless(path, "parameters are sharded at stage 3 alone")
    elif found.get(path, 0) > 0:
        asked = found.get(path) * element
        bucket["min_bytes"] = min(asked, bucket.get("cap_bytes", asked))
        found.mapped(
            path,
            f"options bucket.min_bytes={bucket['min_bytes']}: small parameters travel with others",
        )
    else:
        found.needless(path, "0 keeps nothing")
    if bucket:
        options["bucket"] = bucket


def _cap(mine: int, cap: int, element: int) -> str:
    said = f"options bucket.cap_bytes={cap}"
    each = f"{element} bytes an element"
    return f"{said}, {each}" if mine == cap else f"{said}, the smaller size of two, {each}"


def _prefetch(found: Found, zero: int, element: int, options: dict[str, Any]) -> None:
    prefetch: dict[str, Any] = {}
    path = f"{ZERO}.overlap_comm"
    if found.get(path) is False:
        prefetch |= {"distance": 0, "reduce_distance": 0}
        found.mapped(path, "options prefetch.distance=0, prefetch.reduce_distance=0: no overlap")
    else:
        found.needless(path, "transfers overlap with compute anyway, by cost")
    for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"):
        path = f"{ZERO}.{name}"
        if zero != 3:
            found.needless(path, "parameters are gathered and freed at stage 3 alone")
        elif path in found.values:
            _stage3(found, path, name, element, prefetch)
    if "distance" in prefetch and "budget_bytes" in prefetch:
        prefetch.pop("budget_bytes")
        found.needless(f"{ZERO}.max_live_parameters", "nothing is gathered ahead of its use")
    if "distance" in prefetch and "keep" in prefetch:
        prefetch.pop("keep")
        found.needless(f"{ZERO}.max_reuse_distance", "without prefetch nothing is kept anyway")
    if prefetch:
        options["prefetch"] = prefetch


def _stage3(found: Found, path: str, name: str, element: int, prefetch: dict[str, Any]) -> None:
    value = found.get(path)
    if name == "max_live_parameters":
        if not value:
            prefetch["distance"] = 0
            found.mapped(path, "options prefetch.distance=0: a gather starts right before its use")
            return
        prefetch["budget_bytes"] = value * element
        found.mapped(
            path,
            f"options prefetch.budget_bytes={value * element}, {element} bytes an element; "
            "unreduced gradients count too",
        )
    elif value:
        found.needless(path, "how far ahead, and what is kept, is decided by cost in that budget")
    elif name == "prefetch_bucket_size":
        prefetch["distance"] = 0
        found.mapped(path, "options prefetch.distance=0: a gather starts right before its use")
    else:
        prefetch["keep"] = False
        found.mapped(path, "options prefetch.keep=false: nothing stays until backward")


def _offload(found: Found, zero: int, element: int, options: dict[str, Any]) -> bool:
    _old_names(found)
    state, params = (found.get(f"{section}.device", "none") for section in (OPTIMIZER, PARAM))
    ratio = found.get(f"{OPTIMIZER}.ratio", 1.0)
    if state == "cpu" and ratio == 0 and zero == 3:
        state = "none"
    for section, device in ((OPTIMIZER, state), (PARAM, params)):
        if device == "none":
            for name in ("device", "nvme_path", "max_in_cpu", "ratio"):
                found.needless(f"{section}.{name}", "nothing is moved off the device")
    if state != "none" and zero == 0:
        found.refuse(f"{OPTIMIZER}.device", "stage 0 offloads nothing. Say stage 1, 2 or 3.")
    if params != "none" and zero != 3:
        found.refuse(f"{PARAM}.device", f"parameters are offloaded at stage 3, not at {zero}.")
    if state != "none" and ratio < 1:
        _part(found, zero, (state, params), ratio, options)
    elif state != "none":
        found.mapped(f"{OPTIMIZER}.ratio", "all of it")
    if "nvme" in (state, params):
        _on_disk(found, state, params, element, options)
        return True
    for section, name in ((OPTIMIZER, "nvme_path"), (PARAM, "nvme_path"), (PARAM, "max_in_cpu")):
        found.needless(f"{section}.{name}", "nothing is on disk")
    if params == "cpu":
        options["memory"] = "all_host"
        found.mapped(
            f"{PARAM}.device",
            "shard(offload=True), options memory=all_host"
            + ("" if state == "cpu" else ": state too, which is updated where parameters live"),
        )
        found.mapped(f"{OPTIMIZER}.device", "shard(offload=True), options memory=all_host")
    elif state == "cpu" and "offload_states" in options:
        found.mapped(f"{OPTIMIZER}.device", "options offload_states: a part of the state")
        return False
    elif state == "cpu":
        options["memory"] = "states_host"
        found.mapped(f"{OPTIMIZER}.device", "shard(offload=True), options memory=states_host")
    return "cpu" in (state, params)


def _old_names(found: Found) -> None:
    for old, section in (("cpu_offload", OPTIMIZER), ("cpu_offload_param", PARAM)):
        path = f"{ZERO}.{old}"
        if path not in found.values:
            continue
        new = f"{section}.device"
        if found.below(section):
            found.refuse(path, f"{section} is there too, its new name. Leave one.")
        elif found.get(path):
            found.values[new] = "cpu"
            found.written[new] = path
        else:
            found.needless(path, "nothing is moved off the device")


def _part(
    found: Found, zero: int, places: tuple[str, str], ratio: float, options: dict[str, Any]
) -> None:
    path = f"{OPTIMIZER}.ratio"
    if zero != 3:
        found.refuse(path, "DeepSpeed offloads a part of the state at stage 3 alone. Say 1.")
    elif places != ("cpu", "none"):
        found.refuse(path, "a part goes to the host alone, and without offload_param. Say 1.")
    else:
        options["offload_states"] = {"share": ratio, "update": "device"}
        found.mapped(
            path,
            f"options offload_states.share={ratio:g}, offload_states.update=device: parameters "
            "stay there, and so do updates",
        )


def _on_disk(found: Found, state: str, params: str, element: int, options: dict[str, Any]) -> None:
    folders: list[str] = []
    for section, device in ((OPTIMIZER, state), (PARAM, params)):
        path = f"{section}.nvme_path"
        if device != "nvme":
            found.needless(path, "its device is not nvme")
        elif not found.get(path):
            found.refuse(path, "say a folder on the disk: device is nvme.")
        else:
            folders += [found.get(path)] * (found.get(path) not in folders)
            found.mapped(path, f"options disk.paths={folders}")
    options["memory"] = "infinity"
    if folders:
        options["disk"] = {"paths": folders}
    both = "options memory=infinity: parameters and their state share buckets, on the host or disk"
    for section, device in ((OPTIMIZER, state), (PARAM, params)):
        if device != "none":
            found.mapped(f"{section}.device", f"shard(offload=True), {both}")
    path = f"{PARAM}.max_in_cpu"
    if params != "nvme":
        found.needless(path, "its device is not nvme")
    elif found.has(path):
        budget = found.get(path) * element
        options["host_budget"] = budget if budget else "least"
        found.mapped(path, f"options host_budget={options['host_budget']}, for state too")


def _aio(found: Found, options: dict[str, Any]) -> None:
    on_disk = options.get("memory") == "infinity"
    disk = options.setdefault("disk", {}) if on_disk else {}
    for name in ("block_size", "queue_depth"):
        path = f"aio.{name}"
        if not found.has(path):
            continue
        if not on_disk:
            found.needless(path, "nothing is on disk")
        elif name == "queue_depth":
            disk["depth"] = found.get(path)
            found.mapped(path, f"options disk.depth={disk['depth']}")
        else:
            asked = found.get(path)
            disk["chunk_bytes"] = -(-asked // BLOCK) * BLOCK
            found.mapped(path, f"options disk.chunk_bytes={disk['chunk_bytes']}")
