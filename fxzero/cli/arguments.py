"""What several commands take: options, and checks of them before anything takes time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes, step_passes
from fxzero.errors import ConfigError, nearest
from fxzero.inspect.mesh import MeshShape

DEFAULT_WORLD_SIZE = 8
_SHORT = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
"""Of a pipeline's mesh: pipeline ranks x ranks of each stage."""
MOST_RANKS = 1 << 20


class Dtype(StrEnum):
    """Dtypes by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def dtype_of(named: Dtype | None) -> torch.dtype | None:
    """torch's."""
    return getattr(torch, named.value) if named else None


TARGET_HELP = (
    "The model. A function without arguments that makes it, package.module:factory or "
    "file.py:factory, which returns a module or (module, inputs); a preset (gpt-1t, llama3-8b, …); "
    "or a configuration of transformers (hf:llama, hf:config.json, hf:org/name)."
)
DUMP_HELP = (
    " Or a folder that a run has dumped to, with options={'dump': FOLDER} or FXZERO_DUMP: then the "
    "run has decided what the options below say, and they are not taken."
)
ZeroOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=3,
        help="ZeRO stage. 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also "
        "parameters.",
    ),
]
WorldSizeOption = Annotated[
    int,
    typer.Option(min=1, max=MOST_RANKS, help="Ranks to compile for; none of them is started."),
]
RankOption = Annotated[
    int, typer.Option(min=0, help="The rank whose graph to show, from 0 to world size - 1.")
]
StepOption = Annotated[
    bool, typer.Option("--step", help="Compile the whole step: compile_step with AdamW.")
]
MicroBatchesOption = Annotated[
    int,
    typer.Option(min=1, max=1024, help="With --step: equal parts that each batch is split in."),
]
ClipOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="With --step: the norm that gradients are clipped to, as in your compile_step; 0 "
        "does not clip.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="Machine to decide and simulate for: a name in conf/cluster (dgx_h100, laptop, "
        "…), or a YAML file with the same keys. Default: guessed from this one."
    ),
]
OffloadOption = Annotated[
    bool,
    typer.Option("--offload", help="Keep shards in the host's memory: shard(offload=True)."),
]
InferenceOption = Annotated[
    bool, typer.Option("--inference", help="Compile a forward alone, without gradients.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print it as JSON: docs/ says what is in it.")
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "--batch",
        min=1,
        help="Rows of each rank's batch. Default: 2 for each micro-batch.",
    ),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of each row. Default: as many as the model was made for."),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        help="What to call the model with: 'ids=int64[B,S]<50257, x=float32[B,3,224,224]', "
        "with B for --batch-size and S for --seq-len. Default: its example_inputs(batch_size), the "
        "factory's own, or by the names of its forward's arguments."
    ),
]
ParamDtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Dtype to gather and compute in. Default: bfloat16 of presets, what a configuration "
        "of transformers says, else that of the parameters."
    ),
]
ReduceDtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Dtype that gradients travel in. Default: the one computed in."),
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        help="With --mesh, of a pipeline: gpipe, 1f1b, interleaved, breadth_first, zb_h1, zbv, "
        "auto (the one that ends first), or a CSV file of your own with a row a rank and actions "
        "such as 2F0, 2B0, 2I0, 2W0."
    ),
]
OptionsOption = Annotated[
    str,
    typer.Option(
        help="""Settings of the compiler as JSON: '{"prefetch": {"distance": 2}}'. """
        "`fxzero options` lists them."
    ),
]
TracebackOption = Annotated[
    bool,
    typer.Option("--traceback", "--debug", help="Show an error's traceback, and what torch logs."),
]


def mesh_of(text: str | None, world_size: int) -> MeshShape | None:
    """The mesh of ``pipeline=4,shard=2``, of which ``4x2`` is a short form, or
    ``replicate=2,shard=4``.

    Raises:
        ConfigError: it is no such text, or the world has another size.
    """
    if text is None:
        return None
    short = _SHORT.fullmatch(text)
    if short is None and "=" not in text:
        raise ConfigError(
            f"--mesh {text}: write pipeline ranks x ranks of each stage, as in 4x2, or name the "
            "axes, as in pipeline=4,shard=2"
        )
    mesh = MeshShape.parse(f"pipeline={short[1]},shard={short[2]}" if short else text)
    if world_size not in (DEFAULT_WORLD_SIZE, len(mesh)):
        raise ConfigError(f"--mesh {text} has {len(mesh)} ranks, --world-size {world_size}")
    return mesh


def meshes_of(texts: Sequence[str], world_size: int) -> list[MeshShape]:
    """The meshes of all ranks that are named by their axes.

    Raises:
        ConfigError: one is no such text, is there twice, or has another number of ranks.
    """
    found: list[MeshShape] = []
    for text in texts:
        if (short := _SHORT.fullmatch(text)) is not None:
            first, second = short[1], short[2]
            raise ConfigError(
                f"--mesh {text} could be a pipeline or replicas. Name the axes: "
                f"pipeline={first},shard={second} or replicate={first},shard={second}"
            )
        mesh = MeshShape.parse(text)
        mesh.check(world_size)
        if mesh in found:
            raise ConfigError(f"--mesh {text} stands there twice")
        found.append(mesh)
    return found


def check_file(option: str, path: Path | None) -> None:
    """See, before anything is compiled, that a file can be written.

    Raises:
        ConfigError: it is a folder, or in none.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {str(path.parent)!r}. Name a file in a folder "
            "that exists."
        )
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file in it.")


def check_companions(wants: dict[str, tuple[bool, str, bool]]) -> None:
    """See that each option that is used has what it means something with.

    Args:
        wants: by option, whether it is used, what it needs beside it, and whether that is so.

    Raises:
        ConfigError: one has no meaning here.
    """
    for option, (used, needed, given) in wants.items():
        if used and not given:
            raise ConfigError(f"{option} has a meaning only with {needed}")


def settings_of(
    text: str, cluster: str | None, keep_text: bool, option: str = "--options"
) -> Config:
    """The compiler's settings, of ``--options`` and ``--cluster``.

    Args:
        option: what the text was given by.

    Raises:
        ConfigError: they are no settings, or contradict each other.
    """
    values = read_json(text, option)
    named = option.replace("options", "cluster")
    if cluster is not None:
        cost = values.get("cost", {})
        own = cost.get("cluster", cluster) if isinstance(cost, dict) else cluster
        if own != cluster:
            raise ConfigError(f"{named} {cluster} and {option}' cost.cluster={own!r} differ")
        if isinstance(cost, dict):
            values["cost"] = {**cost, "cluster": cluster}
    if keep_text:
        values["keep_text"] = True
    try:
        return Config.from_options(values)
    except ConfigError as error:
        is_the_clusters = cluster is not None and str(error).startswith("cost.cluster=")
        raise ConfigError(f"{named if is_the_clusters else option}: {error}") from None


def read_json(text: str, option: str) -> dict[str, Any]:
    """A JSON object whose keys stand there once."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{option}={text!r} sets {', '.join(twice)} twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{option}={text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}={text!r} must be a JSON object")
    return value


def check_pass(name: str, config: Config, step: bool) -> None:
    """See that a pass of that name will run.

    Raises:
        ConfigError: none does.
    """
    pipelines = step_passes(config) if step else loop_passes(config)
    known = {p.name for p in (*pipelines.scheduling, *pipelines.lowering)}
    if name not in known:
        raise ConfigError(f"--diff: no pass {name!r} runs here: {nearest(name, known)}")
