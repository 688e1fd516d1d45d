"""A dump: what is known of a run's graphs, written by the run and read by the commands.

    DIR/rank0/dump.json                   what it is of
    DIR/rank0/graph0/analysis.json        nodes, costs, schedule, decisions: `Analysis`
    DIR/rank0/graph0/passes/03_recompute.txt    the graph behind each pass
    DIR/rank0/graph0/plan.json            the decisions, for options={"plan": …}
    DIR/rank0/graph0/schedule.py          the scheduled graph, runnable
    DIR/rank0/graph0/measured.json        what was measured of its runs
    DIR/rank0/graph0/step.trace.json.gz   a run that was watched, for ui.perfetto.dev

Reading takes nothing but JSON and text from it: no code of a dump is executed, and no name in it
becomes a path.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxzero.compiler.compilation import Compilation
from fxzero.compiler.dump_folder import HEAD, PROFILE
from fxzero.errors import ConfigError
from fxzero.graph import StepGraph
from fxzero.inspect.analysis import Analysis
from fxzero.inspect.capture import Capture
from fxzero.inspect.code import program_of
from fxzero.inspect.detail import Measured, PassText, SpanRow
from fxzero.inspect.model_states import ModelStates
from fxzero.settings import build, plain
from fxzero.sharding.params import unread_beside

FORMAT = 1
"""Of a dump: one of another format is refused."""

log = logging.getLogger("fxzero")


@dataclass(frozen=True)
class _Runs:
    """The content of measured.json."""

    parts: tuple[Measured, ...]


def write_graph(compilation: Compilation) -> None:
    """Write what is known of a compilation; a second time what was measured since.

    A disk that is full does not end a training run: it is logged.
    """
    folder, number = compilation.dump, compilation.number
    assert folder is not None
    assert number is not None
    path = folder.graph(number)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(times.nodes or times.calls_us for times in compilation.measured.values()):
            _write_json(path / "measured.json", plain(_Runs(_measured(compilation))))
            return
        _write_decided(path, number, compilation)
        parts = folder.heads.setdefault(number, {"graph": number})
        parts["parts"] = list(compilation.measured)
        parts["bytes"] = {name: file.stat().st_size for name, file in _decided_files(path)}
        head = {
            "format": FORMAT,
            "torch": torch.__version__,
            "rank": _rank(),
            "world_size": _world_size(),
            "run": _run(),
            "graphs": list(folder.heads.values()),
        }
        _write_json(folder.path / HEAD, head)
    except OSError as error:
        log.warning("the dump in %s cannot be written: %s", path, error)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _run() -> str:
    """What ranks of one run have in common, and hardly two runs; empty of a process alone."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in names).strip()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _write_decided(path: Path, number: int, compilation: Compilation) -> None:
    graph = compilation.joint
    if graph is None:
        return
    captured = _captured(compilation, graph)
    found = Analysis.of(captured, memory=True, detail=True, first=number)
    (detail,) = found.details
    passes = path / "passes"
    passes.mkdir(exist_ok=True)
    for i, text in enumerate(detail.texts):
        (passes / f"{i:02d}_{text.name}.txt").write_text(text.text + "\n")
    named = tuple(replace(text, text="") for text in detail.texts)
    _write_json(
        path / "analysis.json",
        replace(found, details=(replace(detail, texts=named),)).to_json(),
    )
    captured.plan(compilation.config).write(path / "plan.json")
    layout = compilation.context.optimizer
    groups = layout.optimizer.param_groups if layout is not None else ()
    program = program_of(compilation.scheduled or graph, _world_size(), _rank(), groups)
    (path / "schedule.py").write_text(program)


def _decided_files(path: Path) -> Iterator[tuple[str, Path]]:
    """The files of a graph's folder that are written once and may be cut short without a trace to
    who reads others, with a name for each."""
    for name in ("plan.json", "schedule.py"):
        yield name, path / name
    for file in sorted((path / "passes").glob("[0-9][0-9]*_*.txt")):
        yield f"passes/{file.name.partition('_')[0]}", file


def _captured(compilation: Compilation, graph: StepGraph) -> Capture:
    """A compilation of a run as `Analysis` reads it."""
    specs = compilation.specs
    if compilation.context.optimizer is not None:  # a whole step: no other graph reads the rest
        graph.unread = unread_beside(graph.specs)
    trained = set(graph.gradients.values()) or set(specs)
    return Capture(
        (compilation,),
        sum(spec.num_elements for spec in specs.values()),
        _world_size(),
        max((spec.zero for spec in specs.values()), default=0),
        trained=frozenset(specs[key].name for key in trained if key in specs),
        rank=_rank(),
    )


def _measured(compilation: Compilation) -> tuple[Measured, ...]:
    return tuple(
        Measured(
            part=part,
            calls_us=tuple(round(us, 3) for us in times.calls_us),
            spans=tuple(
                SpanRow(t.node, t.node, t.layer, t.lane, t.start_us, t.us) for t in times.nodes
            ),
            peak_bytes=times.peak_bytes,
            device=times.device,
        )
        for part, times in compilation.measured.items()
    )


def _write_json(path: Path, data: Any) -> None:
    """Write a file in one step: whoever reads meanwhile finds the old one, or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(data, indent=1) + "\n")
    draft.replace(path)


def is_dump(name: str) -> bool:
    """Whether a target is a folder, and so no factory."""
    return bool(name) and Path(name).is_dir()


def read(name: str) -> dict[int, Analysis]:
    """A dump's analyses, by rank.

    Args:
        name: the folder, or one rank's in it.

    Raises:
        ConfigError: it is no dump, one of another version, or cut short.
    """
    path = Path(name)
    folders = [path] if (path / HEAD).is_file() else sorted(path.glob("rank*"))
    found, runs = {}, {}
    for folder in folders:
        head = _read_json(folder / HEAD)
        if head.get("format") != FORMAT:
            raise ConfigError(
                f"{folder / HEAD} has format {head.get('format')!r}, and this version reads "
                f"{FORMAT}. Dump again with this version."
            )
        graphs, rank = head.get("graphs"), head.get("rank")
        if not isinstance(graphs, list) or not isinstance(rank, int) or not graphs:
            raise ConfigError(f"{folder / HEAD} names no graphs and ranks. Dump again.")
        runs[rank] = head.get("run")
        found[rank] = _joined([_read_graph(folder, part) for part in graphs])
    if not found:
        raise ConfigError(
            f"{name} is a folder, and no dump: it has no rank0/{HEAD}. A run writes one with "
            "options={'dump': FOLDER}, or FXZERO_DUMP=FOLDER."
        )
    sizes = {analysis.world_size for analysis in found.values()}
    if len(sizes) > 1:
        raise ConfigError(
            f"{name} holds ranks of several runs, of {sorted(sizes)} ranks. Empty it, and dump "
            "again."
        )
    others = [rank for rank, run in runs.items() if run != next(iter(runs.values()))]
    if others:
        raise ConfigError(
            f"{name} holds ranks of several runs: {others[0]} is of another one than "
            f"{next(iter(runs))}. Empty it, and dump again."
        )
    return dict(sorted(found.items()))


def programs(name: str, rank: int) -> list[str]:
    """The schedules of a rank's graphs as Python, as text: nothing of it is run.

    Raises:
        ConfigError: one cannot be read.
    """
    path = Path(name)
    folder = path if (path / HEAD).is_file() else path / f"rank{rank}"
    try:
        return [file.read_text() for file in sorted(folder.glob("graph*/schedule.py"))]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a schedule.py in {folder} cannot be read: {error}") from None


def profiles(name: str) -> list[tuple[str, Path]]:
    """The profiles of all ranks, with titles.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    folders = [path] if (path / HEAD).is_file() else sorted(path.glob("rank*"))
    found = [
        (f"{folder.name} {file.parent.name} {file.name.partition('.')[0]}", file)
        for folder in folders
        for file in sorted(folder.glob(f"graph*/*{PROFILE}"))
    ]
    if not found:
        raise ConfigError(
            f"{name} has no profile: a run writes one in its third step, if nothing else profiles "
            "it. Dump three steps or more."
        )
    return found


def _read_graph(folder: Path, part: Any) -> Analysis:
    number = part.get("graph") if isinstance(part, Mapping) else None
    if not isinstance(number, int):
        raise ConfigError(f"{folder / HEAD} names a graph without a number. Dump again.")
    path = folder / f"graph{number}"
    where = str(path / "analysis.json")
    try:
        found = Analysis.from_json(_read_json(path / "analysis.json"), where)
        runs = _Runs(())
        if (path / "measured.json").is_file():
            where = str(path / "measured.json")
            runs = build(_Runs, _read_json(path / "measured.json"), where)
    except ConfigError as error:
        if "cut short" in str(error):
            raise
        raise ConfigError(f"{error}. It was written by another version: dump again.") from None
    details = tuple(
        replace(
            detail,
            texts=tuple(PassText(text.name, _text(path, i)) for i, text in enumerate(detail.texts)),
            measured=runs.parts,
        )
        for detail in found.details
    )
    _check_whole(path, part.get("bytes"))
    return replace(found, details=details)


def _check_whole(path: Path, sizes: Any) -> None:
    """See that the files of a graph have the bytes that were written, whoever reads them.

    Raises:
        ConfigError: one is missing, or shorter.
    """
    if not isinstance(sizes, Mapping):  # a dump of before sizes were written
        return
    held = {name: file.stat().st_size for name, file in _decided_files(path) if file.is_file()}
    for name, size in sizes.items():
        if name not in held:
            raise ConfigError(f"{path / str(name)} is missing: the dump was cut short. Dump again.")
        if isinstance(size, int) and held[name] < size:
            raise ConfigError(
                f"{path / name} has {held[name]} bytes, and {size} were written: the dump was cut "
                "short. Dump again."
            )


def _text(path: Path, number: int) -> str:
    """The graph behind a pass; its file is found by number, as names come from the dump."""
    files = sorted((path / "passes").glob(f"{number:02d}_*.txt"))
    if len(files) != 1:
        raise ConfigError(
            f"{path / 'passes'} has {len(files)} files {number:02d}_*.txt instead of one: the dump "
            "was cut short, or changed. Dump again."
        )
    try:
        return files[0].read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{files[0]} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: the dump was cut short. Dump again.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no JSON, and may have been cut short: {error}. Dump again."
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data


def _joined(parts: list[Analysis]) -> Analysis:
    """The graphs of one rank as one analysis."""
    first = parts[0]
    return replace(
        first,
        zero=max(part.zero for part in parts),
        num_parameters=sum(part.num_parameters for part in parts),
        passes=tuple(row for part in parts for row in part.passes),
        transfers=tuple(row for part in parts for row in part.transfers),
        schedules=tuple(row for part in parts for row in part.schedules),
        states=sum((part.states for part in parts), ModelStates()),
        flops=sum(part.flops for part in parts),
        memory=tuple(row for part in parts for row in part.memory),
        details=tuple(row for part in parts for row in part.details),
    )
