"""`fxzero.shard`: parameters become shards, and a forward that reads one gets it in full.

`state_dict`, `parameters()`, optimizers and everybody outside of a forward see the shards; a
forward, as its author wrote it, sees full parameters: see `markers` and `identity` beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fxzero._compat import (
    collect_only_new_objects_in_dynamo,
    dtensor_at_home,
    is_fake,
    keep_layout,
    let_anomaly_mode_read_dtensors,
    return_free_memory,
    trim_heap,
    write_no_asserts_without_symbols,
)
from fxzero.errors import FxZeroWarning, ShardingError
from fxzero.pipeline.schedules import places_of_stages
from fxzero.ranks import watch
from fxzero.ranks.agree import make_channel
from fxzero.ranks.groups import group_beside, resolve_mesh
from fxzero.ranks.rendezvous import compare_models, describe
from fxzero.sharding import materialize
from fxzero.sharding import pipeline as pipeline_rooms
from fxzero.sharding.before_step import watch_optimizers
from fxzero.sharding.buffers import BufferSync
from fxzero.sharding.evenness import warn_of_uneven_shards
from fxzero.sharding.gradients import reduce_what_arrives
from fxzero.sharding.host import HOST, at_home, refuse_without_host_group
from fxzero.sharding.identity import (
    ShardedParameter,
    hand_over,
    optimizers_of,
    refuse_alive,
    refuse_shared_memory,
    refuse_used_optimizers,
    stand_in,
)
from fxzero.sharding.layout import AxisRole, Layout
from fxzero.sharding.markers import KEYS, STATE, cast_inputs, mark, read_by_name
from fxzero.sharding.params import (
    KEY,
    GradSync,
    ModelState,
    ParamSpec,
    Traffic,
    grad_sync,
    is_known,
    next_model_number,
    register,
    remember,
)
from fxzero.sharding.pipeline import (
    Holders,
    Layouts,
    StagesByModule,
    check_axes,
    has_pipeline,
    holders_by_name,
    make_pipeline,
)
from fxzero.sharding.shard_state import guard

_SPECS = "_fxzero_specs"

MIXED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Torch normalises low-precision inputs with these modules' own, fp32 parameters, beside
statistics that stay fp32 buffers; it takes no mixture of the two."""


when_sharded: Callable[[], None] | None = None
"""Called when a model was sharded, which somebody means to compile: put in here by the package,
as what compiles stands above."""


def shard(
    model: nn.Module,
    zero: int = 0,
    *,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored: Collection[nn.Parameter] = (),
    broadcast_buffers: bool = True,
    gather_group: bool = False,
    offload: bool = False,
    stages: StagesByModule | None = None,
    example_inputs: Any = None,
    schedule: str = "1f1b",
    memory_budget: str | int | None = None,
) -> nn.Module:
    """Shard a model's parameters for ZeRO training, in place.

    Args:
        model: any module on CPU, CUDA or the meta device. Values are taken from rank 0.
            Meta modules are initialised one by one by their own ``reset_parameters()``
            (then by the model's ``_init_weights(module)``, if it has one) and sharded at
            once, so that no rank ever holds the whole model.
        zero: the ZeRO stage. 0 replicates parameters and all-reduces gradients; 1 to 3
            keep a ``DTensor`` ``Shard(0)`` of every parameter and differ in how long full
            parameters and gradients live. 0-d parameters stay replicated.
        mesh: one axis to shard over (default: all ranks), or two: replicate, shard. With an axis
            named ``pipeline`` before them, or alone, the model is cut into stages along it, and
            each rank keeps the parameters of its own. `fxzero.compile_step` trains such a model.
        param_dtype: compute in this dtype: shards are cast before they are gathered and
            floating-point inputs of the model on entry. Master shards keep their dtype, and
            so do buffers and the parameters of BatchNorm.
        reduce_dtype: dtype in which gradients are reduced; default: the compute dtype.
        ignored: parameters to leave alone. Their gradients are not reduced.
        broadcast_buffers: buffers that a forward changes, such as BatchNorm's statistics,
            become rank 0's after it, as in ``DistributedDataParallel``. False lets every rank
            keep its own.
        gather_group: gather parameters in a process group of their own, over the same ranks. On
            NCCL it has a stream of its own, so that a gather need not wait behind the reduces
            that were launched before it, and buffers of its own. At stage 0 nothing is gathered.
        offload: keep this rank's shards in the host's memory, as FSDP2's ``CPUOffloadPolicy``
            does: each rank copies its own to the device, before the gather, where a forward or a
            backward uses them, and gradients arrive on the host, where any optimizer updates.
            Buffers, and what is `ignored`, are on the device: that of the mesh, else the model's
            (CUDA for a model on the CPU in an NCCL process group, or on meta in one process).
            Do not move the model afterwards. In `compile_step` it is ``memory="all_host"``, or
            ``"states_host"`` if that is asked for.
        stages: of a pipeline, by the path of a module its stage, numbered from 0 in the order of
            the forward. What lies inside of a module is of its stage unless it is named itself. A
            module whose parameters several stages read has all of theirs: ``{"wte": (0, 3), …}``.
        example_inputs: of a pipeline, instead of `stages`: the model's arguments, for a
            micro-batch, by which stages are found that take equally long. A tuple, or a mapping of
            keyword arguments.
        schedule: of a pipeline, what says how many stages a rank has, and which: one of
            ``gpipe``, ``1f1b``, ``zb_h1`` (one each), ``interleaved``, ``breadth_first``, ``zbv``
            (two), a CSV file, or ``auto``: of those with one stage each the one that ends first. It
            is the one that `compile_step` runs, unless it is told another
            one with the same stages on each rank.
        memory_budget: of a pipeline with `example_inputs`, what a rank may hold, as in
            `compile_step`'s options: stages are then cut such that parameters, gradients, AdamW's
            state and what micro-steps in flight save have room, or, where that is too much, a part
            of what is saved, the rest of which a step within a budget repeats. The step is told
            its budget itself.

    Returns:
        The same module. In a single process nothing is split and nothing communicates.

    Raises:
        ShardingError: the model is sharded already, a parameter is not a leaf or is a
            DTensor, the mesh does not match the world, a meta module cannot be
            initialised, or `offload` lacks a process group for the host's tensors. The model is
            then untouched.
    """
    let_anomaly_mode_read_dtensors()
    collect_only_new_objects_in_dynamo()
    write_no_asserts_without_symbols()
    ignored_ids = {id(parameter) for parameter in ignored}
    _check(model, zero, param_dtype, reduce_dtype, ignored_ids, mesh, gather_group, offload)
    _check_pipeline(
        mesh,
        stages,
        example_inputs,
        offload,
        gather_group,
        ignored,
        broadcast_buffers,
        schedule,
        memory_budget,
    )
    device_type = _device_type(model, mesh, offload)
    mesh = resolve_mesh(mesh, device_type, from_host=offload)
    holders: Holders = {}
    pipeline = None
    if mesh is not None and has_pipeline(mesh):
        holders = _holders(model, mesh, stages, example_inputs, schedule, zero, memory_budget)
    if mesh is not None:
        if offload:
            refuse_without_host_group(mesh)
        settings = {
            "zero": zero,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "mesh": mesh,
            "ignored": len(ignored_ids),
            "gather_group": gather_group,
            "offload": offload,
            "schedule": schedule,
            **{f"stages of {name}": held for name, held in holders.items()},
        }
        _compare_ranks(model, mesh, settings)
        if holders:
            pipeline = make_pipeline(mesh, schedule, holders)
    originals = dict(model.named_parameters())
    optimizers = optimizers_of(originals.values()) if mesh is not None else []
    moves = offload and any(p.device.type not in ("cpu", "meta") for p in originals.values())
    splits = zero > 0 or pipeline is not None
    if mesh is not None and (splits or moves):
        refuse_used_optimizers(originals, optimizers)
        refuse_alive(originals)
    state = ModelState(zero=zero, number=next_model_number(), pipeline=pipeline)
    apart = gather_group and mesh is not None and zero > 0 and mesh.size(mesh.ndim - 1) > 1
    device = torch.device(device_type if mesh is None else mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    make_spec = _spec_maker(
        state, mesh, param_dtype, reduce_dtype, apart, device if offload else None, holders
    )
    setattr(model, STATE, state)
    specs: dict[str, ParamSpec] = {}
    replaced_by = _shard_modules(model, mesh, device, make_spec, specs, ignored_ids, offload)
    setattr(model, _SPECS, specs)  # keeps the specs alive as long as the model
    hand_over(replaced_by, optimizers)
    if mesh is not None:
        groups = [mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
        in_stages = pipeline is not None
        syncs = broadcast_buffers and mesh.size() > 1
        buffers = BufferSync(model, groups, in_stages=in_stages) if syncs else None
        state.buffers = buffers or None
    if mesh is not None or offload:
        read_by_name(model, state)
    if param_dtype is not None:
        cast_inputs(model, param_dtype)
    if mesh is not None:
        if splits:
            guard(model, mesh)
        return_free_memory()
    warn_of_uneven_shards(specs.values())
    if when_sharded is not None:
        when_sharded()
    return model


def shard_alone(model: nn.Module) -> None:
    """Lay a model out as in a single process at stage 0, whatever process group there is."""
    state = ModelState(zero=0, number=next_model_number())
    make_spec = _spec_maker(state, None, None, None, False, None, {})
    setattr(model, STATE, state)
    specs: dict[str, ParamSpec] = {}
    _shard_modules(model, None, torch.device("cpu"), make_spec, specs, set(), False)
    setattr(model, _SPECS, specs)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Skip gradient reduction for the forwards run inside, and for their backwards.

    Stages 0 and 1: full gradients are kept on each rank and joined to the next
    synchronised backward, which reduces once (a warning says so if that came earlier, or did
    not use all of their parameters). Until then ``.grad`` holds zeros; ``zero_grad()``, to None
    or in place, also forgets what was kept. Use ``loss.backward()``, not
    ``torch.autograd.grad``. Stages 2 and 3 never keep full gradients: they reduce every
    micro-batch, the context changes nothing and warns.

    Raises:
        ShardingError: the model was not sharded by `fxzero.shard`.
    """
    state = model_state(model)
    if state is None:
        raise ShardingError(
            "fxzero.no_sync was given a model that fxzero.shard has not seen. "
            "Call fxzero.shard(model, zero=0) first: stage 0 is plain data parallelism."
        )
    if state.zero >= 2:
        warnings.warn(
            f"fxzero.no_sync has no effect at zero={state.zero}: full gradients never outlive "
            "their bucket there, so every micro-batch is reduced. Use zero=1 to reduce once.",
            FxZeroWarning,
            stacklevel=3,
        )
        yield
        return
    with grad_sync(state, GradSync.ACCUMULATE):
        yield


def report(model: nn.Module) -> Traffic:
    """What the compiled graphs of a sharded model have communicated since `shard`.

    With `offload`, and where a whole step holds something on the host, also what this rank has
    copied to the device and from it. Cumulative: take the difference of two reports for one step.

    Raises:
        ShardingError: the model was not sharded by `fxzero.shard`.
    """
    state = model_state(model)
    if state is None:
        raise ShardingError("fxzero.report was given a model that fxzero.shard has not seen")
    return dataclasses.replace(state.traffic)


def model_state(model: nn.Module) -> ModelState | None:
    """The state that `shard` left on a model, looked for below wrappers too."""
    for module in model.modules():
        state = module.__dict__.get(STATE)
        if isinstance(state, ModelState):
            return state
    return None


def sharded_module(model: nn.Module) -> nn.Module | None:
    """The module that `shard` was called on, looked for below wrappers too."""
    return next((m for m in model.modules() if _SPECS in vars(m)), None)


def param_specs(model: nn.Module) -> dict[str, ParamSpec]:
    """The specs of a sharded model's parameters, by fully qualified name."""
    module = sharded_module(model)
    return dict(vars(module)[_SPECS]) if module is not None else {}


def replace_specs(module: nn.Module, specs: dict[str, ParamSpec]) -> None:
    """Lay a sharded module's parameters out anew; keys stay, so its markers find the new ones."""
    for spec in specs.values():
        parameter = spec.parameter() if spec.parameter is not None else None
        if parameter is not None:
            remember(parameter, spec)
    setattr(module, _SPECS, {name: register(spec) for name, spec in specs.items()})


def _check_pipeline(
    mesh: DeviceMesh | None,
    stages: StagesByModule | None,
    example_inputs: Any,
    offload: bool,
    gather_group: bool,
    ignored: Collection[nn.Parameter],
    broadcast_buffers: bool,
    schedule: str,
    memory_budget: str | int | None,
) -> None:
    """Refuse a pipeline that cannot be, and settings of one where there is none."""
    if mesh is None or not has_pipeline(mesh):
        asked = {
            "stages": stages is not None,
            "example_inputs": example_inputs is not None,
            "schedule": schedule != "1f1b",
            "memory_budget": memory_budget is not None,
        }
        given = [name for name, is_asked in asked.items() if is_asked]
        if given:
            raise ShardingError(
                f"{given[0]}= is for a mesh with an axis 'pipeline', and the mesh has "
                f"{'no names' if mesh is None else mesh.mesh_dim_names}. Make one with "
                "init_device_mesh(device, (2, 4), mesh_dim_names=('pipeline', 'shard'))."
            )
        return
    check_axes(mesh)
    if (stages is None) == (example_inputs is None):
        raise ShardingError(
            "a mesh with an axis 'pipeline' needs stages: pass example_inputs=, by which they are "
            "found, or stages={'h.0': 0, …}, and not both."
        )
    if stages is not None and memory_budget is not None:
        raise ShardingError(
            "memory_budget= is for stages that are found from example_inputs=; stages= says them. "
            "Leave out one. A step's own budget is one of compile_step's options."
        )
    others = {
        "offload=True": offload,
        "gather_group=True": gather_group,
        "ignored=": bool(ignored),
        "broadcast_buffers=False": not broadcast_buffers,  # each stage changes its own
    }
    for name, is_asked in others.items():
        if is_asked:
            raise ShardingError(f"{name} and a mesh with an axis 'pipeline': leave out one.")


def _holders(
    model: nn.Module,
    mesh: DeviceMesh,
    stages: StagesByModule | None,
    example_inputs: Any,
    schedule: str,
    zero: int,
    memory_budget: str | int | None,
) -> Holders:
    """The stages that hold each parameter."""
    places = places_of_stages(schedule, mesh.size(0))
    if stages is not None:
        return holders_by_name(model, stages, places, schedule)
    assert pipeline_rooms.find_holders is not None, "`fxzero` says what finds them"
    names = mesh.mesh_dim_names or ()
    wanted = pipeline_rooms.StagesWanted(
        schedule,
        mesh.size(0),
        zero,
        mesh.size(names.index("shard")) if "shard" in names else 1,
        None if memory_budget is None else str(memory_budget),
        mesh.size() // mesh.size(0),
    )
    return pipeline_rooms.find_holders(model, example_inputs, wanted)


def _compare_ranks(model: nn.Module, mesh: DeviceMesh, settings: Mapping[str, object]) -> None:
    """See that all ranks shard alike before anything communicates: they would hang, or abort."""
    for axis in range(mesh.ndim):
        make_channel(mesh.get_group(axis).group_name)
    watch.start()
    watch_optimizers()
    told = {name: str(value) for name, value in settings.items()}
    compare_models({**told, **describe(dict(model.named_parameters()))})


def _check(
    model: nn.Module,
    zero: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    ignored_ids: set[int],
    mesh: DeviceMesh | None,
    gather_group: bool,
    offload: bool,
) -> None:
    """Refuse what cannot be sharded, before anything is touched."""
    if not isinstance(model, nn.Module):
        raise ShardingError(f"fxzero.shard takes an nn.Module, not {type(model).__name__}")
    if type(zero) is not int or zero not in (0, 1, 2, 3):
        raise ShardingError(f"zero={zero!r} is no ZeRO stage. Pass 0, 1, 2 or 3.")
    if type(gather_group) is not bool:
        raise ShardingError(f"gather_group={gather_group!r} is neither True nor False")
    if type(offload) is not bool:
        raise ShardingError(
            f"offload={offload!r} is neither True nor False. Where a whole step holds what it has "
            "is said by compile_step(options={'memory': …})."
        )
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(f"{name}={dtype!r} is no floating-point torch.dtype")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardingError(
                f"{path or 'the model'} is a ScriptModule: its parameters are TorchScript's own, "
                "which hands out copies. Shard the module that torch.jit.script was given."
            )
        if STATE in module.__dict__ or KEYS in module.__dict__:
            raise ShardingError(
                f"{path or 'the model'!s} was sharded before. Call fxzero.shard once, on the "
                "outermost module, before wrapping it in torch.compile."
            )
    splits = zero > 0 or has_pipeline(mesh)  # parameters then are DTensors
    known = set()
    for name, parameter in model.named_parameters():
        known.add(id(parameter))
        if is_known(parameter):
            raise ShardingError(
                f"parameter {name} went through fxzero.shard before. Call it once, on the "
                "outermost module."
            )
        if id(parameter) in ignored_ids:
            continue
        if isinstance(parameter, DTensor):
            raise ShardingError(
                f"parameter {name} is a DTensor ({parameter.placements}) already. Shard with one "
                "tool: drop the other one, or name the parameter in ignored=."
            )
        if is_lazy(parameter):
            raise ShardingError(
                f"parameter {name} has no shape yet: its module is lazy. Run one forward before "
                "fxzero.shard, on a batch like those to come."
            )
        if splits and type(parameter) is not nn.Parameter and not is_fake(parameter):
            raise ShardingError(
                f"parameter {name} is a {type(parameter).__name__}, and its shard would be an "
                "ordinary parameter: isinstance and its own methods would be lost. Make it an "
                "nn.Parameter (attributes stay), shard with zero=0, or name it in ignored=."
            )
        if not parameter.is_leaf:
            raise ShardingError(
                f"parameter {name} is not a leaf: it was computed by {parameter.grad_fn}, so an "
                "optimizer cannot update it. Make it an nn.Parameter of its own."
            )
    if splits:
        refuse_shared_memory(
            {n: p for n, p in model.named_parameters() if id(p) not in ignored_ids},
            {n: b for n, b in model.named_buffers() if b.layout is torch.strided},
        )
    if not ignored_ids <= known:
        raise ShardingError("ignored= names a tensor that is no parameter of this model")
    materialize.refuse_without_initialiser(model)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ShardingError(f"mesh={mesh!r} is no DeviceMesh. Make one with init_device_mesh().")


def _device_type(model: nn.Module, mesh: DeviceMesh | None, offload: bool) -> str:
    """Where the model computes: the mesh's device, else the model's, else CUDA if there is one.

    Args:
        offload: a model on the CPU may be there because its parameters shall stay there.
    """
    if mesh is not None:
        return mesh.device_type
    kinds = {tensor.device.type for tensor in model.parameters()} - {"meta"}
    stays = offload and kinds == {"cpu"} and torch.distributed.is_initialized()
    if len(kinds) == 1 and not stays:
        return kinds.pop()
    if torch.distributed.is_initialized():
        return "cuda" if "nccl" in torch.distributed.get_backend() else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _spec_maker(
    state: ModelState,
    mesh: DeviceMesh | None,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    gathers_apart: bool,
    device: torch.device | None,
    holders: Holders,
) -> Callable[[str, nn.Parameter], ParamSpec]:
    """A function that decides how a parameter is laid out.

    Args:
        device: where it is computed with, if its shard is in the host's memory.
        holders: of a pipeline, the stages that hold each parameter.
    """
    replicated, split = Layout(), Layout()
    layouts = Layouts(state.pipeline, state.zero) if state.pipeline is not None else None
    if mesh is not None and layouts is None:
        outer = [AxisRole.REPLICATE] * (mesh.ndim - 1)
        replicated = Layout.on(mesh, [*outer, AxisRole.REPLICATE])
        apart = {AxisRole.SHARD: group_beside(mesh, mesh.ndim - 1)} if gathers_apart else None
        if apart is not None:
            make_channel(apart[AxisRole.SHARD].name)
        split = Layout.on(mesh, [*outer, AxisRole.SHARD], apart)

    def make(name: str, parameter: nn.Parameter) -> ParamSpec:
        layout = split if state.zero > 0 and parameter.dim() > 0 else replicated
        if layouts is not None:
            layout = layouts.of(holders[name], is_scalar=not parameter.dim())
        compute_dtype = parameter.dtype
        if param_dtype is not None and parameter.is_floating_point():
            compute_dtype = param_dtype
        return register(
            ParamSpec(
                name=name,
                key=f"{state.number}/{name}",
                state=state,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype or compute_dtype,
                layout=layout,
                stages=holders.get(name, ()),
                device=device,
            )
        )

    return make


_TRIM_BYTES = 32 << 20
"""Of full parameters, after which the process gives back what was freed of them."""


def _shard_modules(
    model: nn.Module,
    mesh: DeviceMesh | None,
    device: torch.device,
    make_spec: Callable[[str, nn.Parameter], ParamSpec],
    specs: dict[str, ParamSpec],
    ignored_ids: set[int],
    offload: bool,
) -> dict[int, nn.Parameter]:
    """Materialise, split and mark module after module; tied parameters stay tied.

    Args:
        device: where the model computes.

    Returns:
        The parameters that have replaced others, by the identity of those.
    """
    done: dict[int, tuple[nn.Parameter, ParamSpec]] = {}
    passed_bytes = 0
    owned_by: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}  # an id needs a living object
    for path, module in list(model.named_modules()):
        originals = {n: p for n, p in module._parameters.items() if p is not None}
        for name, original in originals.items():
            owned_by.setdefault(id(original), (original, module, name))
        tied = {n: done[id(p)][0] for n, p in originals.items() if id(p) in done}
        materialize.module(model, path, module, device, tied, HOST if offload else device)
        keys: dict[str, str] = {}
        for name, original in originals.items():
            if id(original) in ignored_ids:
                remember(original)
                made = module._parameters[name]
                if made is not None and made is not original:  # it was on the meta device
                    made.data = made.data.to(device)
                continue
            if id(original) not in done:
                full = module._parameters[name]
                assert full is not None
                spec = make_spec(f"{path}.{name}" if path else name, full)
                if isinstance(module, MIXED):
                    spec = dataclasses.replace(spec, compute_dtype=full.dtype)
                passed_bytes += full.nbytes
                parameter = _split(full, spec, mesh, device)
                spec = register(dataclasses.replace(spec, parameter=weakref.ref(parameter)))
                specs[spec.name] = spec
                remember(parameter, spec)
                done[id(original)] = (parameter, spec)
            parameter, spec = done[id(original)]
            module._parameters[name] = parameter
            is_reduced = mesh is not None or offload
            if is_reduced and spec.replica_groups and not isinstance(parameter, DTensor):
                reduce_what_arrives(parameter, spec)
            if is_reduced or spec.compute_dtype != spec.dtype:
                setattr(parameter, KEY, spec.key)  # eager code reads by it, in the compute dtype
                keys[name] = spec.key
        mark(module, keys, getattr(model, STATE))
        if mesh is not None and device.type == "cpu" and passed_bytes > _TRIM_BYTES:
            passed_bytes = 0
            trim_heap()  # full parameters lie between parts that stay, and would stay with them
    _broadcast_buffers(model, mesh)
    replaced_by = {}
    for identity, (parameter, _) in done.items():
        original, owner, name = owned_by[identity]
        if parameter is not original:
            replaced_by[identity] = parameter
            stand_in(original, owner, name)
    return replaced_by


def _split(
    full: nn.Parameter, spec: ParamSpec, mesh: DeviceMesh | None, device: torch.device
) -> nn.Parameter:
    """This rank's part of a parameter, with rank 0's values. The full one can then go."""
    if mesh is None:
        if spec.device is not None:
            full.data = at_home(full.data, spec.device)
        return full
    values = full.detach().to(device).contiguous()
    if not is_fake(values):
        torch.distributed.broadcast(values, src=0)
    if spec.state.zero == 0 and not spec.stages:
        if full.device == (device if spec.device is None else HOST):
            full.detach().copy_(values)
            if spec.device is not None:
                full.data = at_home(full.data, spec.device)
            return full
        if spec.device is not None:
            values = at_home(values, spec.device)
        moved = nn.Parameter(values, requires_grad=full.requires_grad)
        vars(moved).update(vars(full))
        return moved
    if not spec.is_here:
        values = values.new_empty(spec.local_shape)
    elif spec.shard_group is not None:
        values = values[spec.local_rows].clone()
    elif values.data_ptr() == full.data_ptr():
        values = values.clone()  # others may keep the full tensor's memory, and write to it
    stride = _contiguous_stride(spec.shape)
    lies_on = spec.layout.mesh
    assert lies_on is not None
    if spec.device is not None:
        distributed = dtensor_at_home(
            at_home(values, spec.device), lies_on, spec.layout.placements, spec.shape, stride
        )
    else:
        distributed = DTensor.from_local(
            values,
            lies_on,
            spec.layout.placements,
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=stride,
        )
    parameter = nn.Parameter(distributed, requires_grad=full.requires_grad)
    parameter.__class__ = ShardedParameter  # type: ignore[assignment]
    keep_layout(parameter)  # type: ignore[arg-type]
    vars(parameter).update(vars(full))  # what people note on parameters: _no_weight_decay, say
    return parameter


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _broadcast_buffers(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Give every rank rank 0's buffers; afterwards torch keeps them as it always does."""
    if mesh is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.device.type != mesh.device_type:
                buffer = module._buffers[name] = buffer.to(mesh.device_type)
            values = buffer.detach().contiguous()
            torch.distributed.broadcast(values, src=0)
            if not buffer.is_contiguous():
                buffer.copy_(values)
