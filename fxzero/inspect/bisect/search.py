"""Which pass changes what a step computes: the graph behind each is run, and held against eager."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import fake_tensors
from fxzero.compiler.compilation import CAPTURED
from fxzero.cost.resources import available_bytes
from fxzero.errors import CaptureError, ConfigError, FxZeroError, PassError, VerificationError
from fxzero.graph import StepGraph
from fxzero.inspect.bisect.lockstep import Lockstep
from fxzero.inspect.bisect.recorded import (
    BACKWARD,
    FORWARD,
    JOINT,
    STEP,
    Case,
    Recording,
    Snapshot,
    record,
)
from fxzero.inspect.bisect.reference import DrawsError, eager
from fxzero.inspect.bisect.results import (
    LOSS,
    Named,
    difference,
    kind_of,
    largest_by_kind,
    missing,
    named,
    updated,
)
from fxzero.inspect.targets import model_and_batch
from fxzero.inspect.targets.pretrained import weights_left_out
from fxzero.passes.decision import DecidingPass
from fxzero.settings import plain

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Most that may differ, as a share of the tensor's largest element: what other orders of sums come
to stays well below."""


def rounding_share(tolerance: float) -> float:
    """Of the largest element of all tensors of a kind, the share by which the smallest one is
    measured: sums round by some 32 eps of what they add up, which may cancel."""
    dtype = next(dtype for dtype, most in TOLERANCE.items() if most >= tolerance)
    return min(32 * torch.finfo(dtype).eps / tolerance, 1.0)


@dataclass(frozen=True)
class Check:
    """One graph that was run."""

    graph: int
    part: str
    behind: str
    """The pass; ``capture`` or ``cut`` before the first one."""
    worst: str
    """The tensor that is furthest from what it should be; empty if none was compared."""
    difference: float
    """Of the tensor's largest element."""
    rank: int
    num_tensors: int = 0
    """How many were compared, on each rank."""
    error: str = ""
    """Why it did not run."""

    def fails(self, tolerance: float) -> bool:
        """Whether it is another result."""
        return bool(self.error) or not self.difference <= tolerance


@dataclass(frozen=True)
class Finding:
    """What was found."""

    checks: tuple[Check, ...]
    tolerance: float
    culprit: Check | None
    """The first graph that computes something else."""
    decisions: tuple[str, ...] = ()
    """Items of the pass's decision without any one of which the result is right."""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write."""
        found: dict[str, Any] = plain(self)
        return found


def bisect(case: Case, observe: Callable[[Check], None] | None = None) -> Finding:
    """Run the graph behind each pass, and name the first whose result differs.

    Args:
        observe: called with each check as soon as it is known.

    Raises:
        CaptureError: the model cannot be run, draws random numbers, or nothing of it is compiled.
        ConfigError: something shall be held on the host.
    """
    if case.config.offloads:
        raise ConfigError(
            f"{case.config.offloads}: ranks that run in one process would share the host's memory. "
            "Leave it out: what other passes do is the same."
        )
    _check_memory(case)
    tolerance = TOLERANCE[case.dtype]
    note = ""
    try:
        reference = eager(case)
    except DrawsError:
        case = dataclasses.replace(case, evaluates=True)
        reference = eager(case)
        note = "The model is in eval mode: in training it draws random numbers beyond nn.Dropout."
    try:
        ranks = [record(case, rank) for rank in range(case.world_size)]
    except (PassError, VerificationError) as error:
        return _refused(error, tolerance)
    if case.dtype == torch.float64 and _rounds(ranks[0]):
        tolerance = TOLERANCE[torch.float32]
        note = f"{note} The model computes in less than float64 somewhere.".strip()
    if len(ranks[0]) > 1:
        note = (
            f"{note} The step is {len(ranks[0])} graphs: each is held against itself as it was "
            "captured, and not against eager; and behind the first on made-up inputs."
        ).strip()
    checks: list[Check] = []
    for number, recordings in enumerate(zip(*ranks, strict=True)):
        alone = reference if len(ranks[0]) == 1 else None
        for check, part, index in _checks(number, recordings, alone, tolerance):
            checks.append(check)
            if observe is not None:
                observe(check)
            if check.fails(tolerance):
                decisions = _decisions(check, part, index, recordings, alone, tolerance)
                return Finding(tuple(checks), tolerance, check, tuple(decisions), note)
    if not checks:
        raise CaptureError(
            "nothing of the model was compiled, so no pass has seen it: its forward runs in Python "
            "alone (torch.compiler.disable, or a module that Dynamo leaves alone, as nn.LSTM). "
            "With --step the whole step is one graph, or its error says what cannot be in one."
        )
    return Finding(tuple(checks), tolerance, None, note=note)


def _check_memory(case: Case) -> None:
    """Refuse a model whose parameters and gradients alone are more than there is memory for.

    Raises:
        ConfigError: they are.
    """
    try:
        with fake_tensors(), weights_left_out():
            model, _ = model_and_batch(case.build(), case.sizes)
    except Exception:  # a factory that reads values: it will say what is wrong, if anything is
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    # Every rank's own, and the eager model's.
    needed = 2 * count * case.dtype.itemsize * (case.world_size + 1)
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"bisect runs the model with real values, {case.world_size} ranks in this process: "
            f"{count:,} parameters and their gradients are {needed / 2**30:.1f} GiB in "
            f"{str(case.dtype).removeprefix('torch.')}, and {available / 2**30:.1f} GiB are free. "
            "Take a smaller model: of equal layers two do; or --dtype bfloat16, --world-size 1."
        )


def _rounds(recordings: Sequence[Recording]) -> bool:
    """Whether something is computed in a smaller dtype than float64."""
    return any(
        isinstance(value := node.meta.get("val"), Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
        for recording in recordings
        for one in (recording.snapshots.get(JOINT) or recording.snapshots.get(STEP) or [])[:1]
        for node in one.graph.graph.nodes
        if node.op == "call_function"
    )


def _refused(error: FxZeroError, tolerance: float) -> Finding:
    """What a pass or the verifier found before anything ran."""
    text = str(error)
    behind = re.search(r"after pass '(\w+)'", text)
    check = Check(0, JOINT, behind[1] if behind else "", "", math.nan, 0, error=text)
    return Finding((check,), tolerance, check)


def _checks(
    number: int, recordings: Sequence[Recording], reference: Named | None, tolerance: float
) -> Iterator[tuple[Check, str, int]]:
    """Each graph's check, with the part and the place among its snapshots."""
    expected = dict(reference or {})
    whole = STEP in recordings[0].snapshots
    first = STEP if whole else JOINT
    for index in range(len(recordings[0].snapshots[first])):
        snapshots = [recording.snapshots[first][index] for recording in recordings]
        if any(_is_of_one_micro_batch(snapshot, recordings[0], first) for snapshot in snapshots):
            continue
        inputs = [_inputs(r, s.graph) for r, s in zip(recordings, snapshots, strict=True)]
        updates = _updates(recordings[0], first, index)
        check = _check(number, first, snapshots, inputs, expected, tolerance, updates=updates)
        yield check, first, index
    if whole:
        return
    yield from _of_sides(number, recordings, expected, tolerance)


def _updates(recording: Recording, part: str, index: int) -> bool:
    """Whether a graph ends in the update."""
    names = [one.behind for one in recording.snapshots[part]]
    return part == STEP and "update" in names[: index + 1]


def _is_of_one_micro_batch(snapshot: Snapshot, recording: Recording, part: str) -> bool:
    """Whether a graph is of one micro-batch, and was called with all of them."""
    names = [one.behind for one in recording.snapshots[part]]
    if part != STEP or "accumulate" not in names:
        return False
    accumulate = next(
        one for one in recording.compilation.pipelines.scheduling if one.name == "accumulate"
    )
    several = getattr(accumulate, "micro_batches", 1) > 1
    return several and names.index(snapshot.behind) < names.index("accumulate")


def _of_sides(
    number: int, recordings: Sequence[Recording], expected: Named, tolerance: float
) -> Iterator[tuple[Check, str, int]]:
    """Forward behind each lowering pass with backward as it was cut, then the same of backward."""
    forwards = [recording.snapshots.get(FORWARD, []) for recording in recordings]
    backwards = [recording.snapshots.get(BACKWARD, []) for recording in recordings]
    if not forwards[0] or not backwards[0]:
        return
    for part, index in [
        *((FORWARD, i) for i in range(len(forwards[0]))),
        *((BACKWARD, i) for i in range(1, len(backwards[0]))),
    ]:
        front = [side[index if part == FORWARD else -1] for side in forwards]
        back = [side[index if part == BACKWARD else 0] for side in backwards]
        here = front if part == FORWARD else back
        try:
            found = _both(recordings, front, back)
        except Exception as error:  # whatever a broken graph raises is the finding
            yield _failed(number, part, here[0].behind, error), part, index
            continue
        check = _compared(number, part, here[0].behind, found, expected, tolerance)
        yield check, part, index


def _both(
    recordings: Sequence[Recording], front: Sequence[Snapshot], back: Sequence[Snapshot]
) -> Named:
    """The results of a forward and the backward behind it."""
    results = Lockstep([one.graph for one in front]).run([r.inputs[FORWARD] for r in recordings])
    count = recordings[0].snapshots[JOINT][0].graph.num_forward_outputs
    inputs = []
    for recording, values in zip(recordings, results, strict=True):
        saved = list(values[count:])
        tangents = recording.inputs[BACKWARD][len(saved) :]
        inputs.append([*saved, *tangents])
    gradients = Lockstep([one.graph for one in back]).run(inputs)
    graphs = [recording.snapshots[JOINT][-1].graph for recording in recordings]
    joined = [(*f[:count], *b) for f, b in zip(results, gradients, strict=True)]
    return named(graphs, joined)


def _inputs(recording: Recording, graph: StepGraph) -> list[Any]:
    """What a joint graph is called with, by the names of its inputs."""
    known: dict[str, Any] = {}
    for part, values in recording.inputs.items():
        last = recording.snapshots[part][-1].graph
        names = [node.name for node in last.graph.find_nodes(op="placeholder")]
        # What backward saved is not what it is called with there: nothing has run.
        known = dict(zip(names, values, strict=True)) | known
    return [known.get(node.name) for node in graph.graph.find_nodes(op="placeholder")]


def _check(
    number: int,
    part: str,
    snapshots: Sequence[Snapshot],
    inputs: Sequence[Sequence[Any]],
    expected: Named,
    tolerance: float,
    *,
    updates: bool,
) -> Check:
    """Run a graph on every rank, and hold what it computes against what is expected.

    Args:
        updates: whether it ends in the update of the parameters.
    """
    behind = snapshots[0].behind
    graphs = [snapshot.graph for snapshot in snapshots]
    copies = [[v.clone() if isinstance(v, Tensor) else v for v in values] for values in inputs]
    try:
        results = Lockstep(graphs, owns_inputs=True).run(copies)
    except Exception as error:  # whatever a broken graph raises is the finding
        return _failed(number, part, behind, error)
    found = named(graphs, results, updates=updates)
    if behind == CAPTURED and LOSS not in found:
        # A loop makes its loss itself, of several numbers or none: outputs are held to each other.
        expected.pop(LOSS, None)
    if updates:
        # What nobody has said of an input is not looked at: only what is written to changes.
        left = updated(graphs, copies)
        found |= {name: values for name, values in left.items() if name in expected}
    return _compared(number, part, behind, found, expected, tolerance, updates=updates)


def _failed(number: int, part: str, behind: str, error: Exception) -> Check:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Check(number, part, behind, "", math.nan, 0, error=text)


def _compared(
    number: int,
    part: str,
    behind: str,
    found: Named,
    expected: Named,
    tolerance: float,
    *,
    updates: bool = False,
) -> Check:
    """The tensor that is furthest from what is expected, or one that is not there; what nobody
    expects yet is expected from now on."""
    gone = missing(found, expected, updates)
    if gone:
        return Check(number, part, behind, gone, math.inf, 0, len(found))
    worst, most, where, count = "", 0.0, 0, 0
    largest, rounding = largest_by_kind(expected), rounding_share(tolerance)
    for name, values in found.items():
        if name not in expected:
            expected[name] = [value.clone() for value in values]
            continue
        count += 1
        least = largest[kind_of(name)] * rounding
        for rank, (value, right) in enumerate(zip(values, expected[name], strict=True)):
            share = difference(value, right, least)
            if not share <= most or not worst:
                worst, most, where = name, share, rank
                if math.isnan(share):
                    return Check(number, part, behind, worst, share, where, count)
    return Check(number, part, behind, worst, most, where, count)


def _decisions(
    check: Check,
    part: str,
    index: int,
    recordings: Sequence[Recording],
    reference: Named | None,
    tolerance: float,
) -> Iterator[str]:
    """The items of a pass's decision that are to blame: without one of them the graph is right."""
    compilation = recordings[0].compilation
    passes = (*compilation.pipelines.scheduling, *compilation.pipelines.lowering)
    step = next((one for one in passes if one.name == check.behind), None)
    made = compilation.context.decisions.made.get(check.behind)
    if not isinstance(step, DecidingPass) or made is None or part not in (JOINT, STEP) or not index:
        return
    for field in dataclasses.fields(made):
        items = getattr(made, field.name)
        if not isinstance(items, tuple):
            continue
        for place, item in enumerate(items[:MOST_ITEMS]):
            rest = dataclasses.replace(made, **{field.name: items[:place] + items[place + 1 :]})
            again = _again(step, rest, check, part, index, recordings, reference, tolerance)
            if not again.fails(tolerance):
                yield f"{field.name}: {_short(item)}"


MOST_ITEMS = 200
"""Of a decision, that are tried one by one."""


def _again(
    step: DecidingPass[Any],
    decision: Any,
    check: Check,
    part: str,
    index: int,
    recordings: Sequence[Recording],
    reference: Named | None,
    tolerance: float,
) -> Check:
    """The same pass with another decision."""
    snapshots = []
    for recording in recordings:
        before = recording.snapshots[part][index - 1]
        graph = before.graph.clone()
        try:
            step.apply(graph, decision, recording.compilation.context)
        except (ConfigError, FxZeroError, AssertionError, KeyError, ValueError) as error:
            return _failed(check.graph, part, check.behind, error)
        snapshots.append(Snapshot(check.behind, graph, recording.compilation))
    inputs = [_inputs(r, s.graph) for r, s in zip(recordings, snapshots, strict=True)]
    updates = _updates(recordings[0], part, index)
    expected = dict(reference or {})
    return _check(check.graph, part, snapshots, inputs, expected, tolerance, updates=updates)


def _short(item: Any) -> str:
    text = str(plain(item))
    return text if len(text) <= 200 else f"{text[:200]}…"
