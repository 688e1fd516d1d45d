"""What a model would be as a pipeline: its stages, what travels between them, and the schedule.

The joint graph of one micro-step is captured as always, for the ranks of one stage, and cut
(`fxzero.schedule.stages`); a table of the schedule is replayed with what the stages take and with
what ZeRO moves inside of them (`fxzero.inspect.zero_inside`). Nothing is started, and no rank is
there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from fxzero.compiler.compilation import Compilation, observers
from fxzero.compiler.config import Config
from fxzero.compiler.memory_budget import NO_BUDGET
from fxzero.cost import CostModel
from fxzero.cost.settings import device_of
from fxzero.errors import ConfigError
from fxzero.graph import Phase, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import Capture, capture
from fxzero.inspect.model_states import ModelStates
from fxzero.inspect.zero_inside import ZeroInside
from fxzero.passes import Recompute
from fxzero.passes.base import Context, Notes, Pass
from fxzero.pipeline.replay import PipelineReplay, replay_table, weights_last
from fxzero.pipeline.schedules import AUTO, table_of
from fxzero.pipeline.tables import TABLES, Action, Table, Work, in_flight
from fxzero.schedule.engine import COMPUTE
from fxzero.schedule.simulate import tasks_of
from fxzero.schedule.stages import Limit, Stages, stages_of
from fxzero.schedule.storage import Kind


@dataclass(frozen=True)
class PipelineReport:
    """A model as a pipeline."""

    schedule: str
    num_ranks: int
    """Along the pipeline; each is as many as share one stage."""
    num_micro_batches: int
    costs: str
    found: Stages
    rank_of: tuple[int, ...]
    """By stage."""
    in_flight: tuple[int, ...]
    """By rank, the most micro-steps that it has begun and not ended."""
    idle_shares: tuple[float, ...]
    """By rank."""
    peak_bytes: tuple[int, ...]
    """By rank: model states, what its micro-steps in flight save, full parameters and gradients
    on their way, and what operators hold beside while they run."""
    bytes_by_kind: tuple[dict[str, int], ...]
    """By rank, what that is made of."""
    states: tuple[ModelStates, ...]
    """By rank, the model states of its stages."""
    sent_bytes: tuple[float, ...]
    """By rank, what it sends in a step: to the ranks that share its stages, and to its neighbours
    along the pipeline. Not what is sent of tied parameters, of the loss and of the norm."""
    message_bytes: tuple[int, ...]
    """Of it, to neighbours."""
    update_us: tuple[float, ...]
    """By rank, what the update takes of its parameters."""
    exposed_us: float
    """By how much a step is longer than if nothing that travels took time."""
    step_us: float
    """Forwards and backwards, with gathers and reduces beside them; not the update."""
    picture: str
    replayed: PipelineReplay = field(repr=False)
    """When what runs."""

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write."""
        data = asdict(replace(self, replayed=None))  # type: ignore[arg-type]
        del data["replayed"], data["found"]["holders"]
        return {**data, "imbalance": self.found.imbalance}


@dataclass(frozen=True)
class _Look(Pass):
    """Keep a copy of the graph."""

    name: ClassVar[str] = "look"
    seen: Callable[[StepGraph, CostModel], None] = lambda graph, costs: None

    def __post_init__(self) -> None:
        """A function is no setting."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the class."""
        self.seen(graph.clone(), ctx.costs)
        return Notes()


@contextlib.contextmanager
def collecting_micro_steps() -> Iterator[list[tuple[StepGraph, CostModel]]]:
    """Collect the graphs of one micro-step that are compiled meanwhile, before they are sharded."""
    found: list[tuple[StepGraph, CostModel]] = []

    def observe(compilation: Compilation) -> None:
        compilation.every_layer = True
        passes = list(compilation.pipelines.scheduling)
        place = next(i for i, one in enumerate(passes) if isinstance(one, Recompute))
        passes.insert(place + 1, _Look(seen=lambda graph, costs: found.append((graph, costs))))
        compilation.take(replace(compilation.pipelines, scheduling=tuple(passes)))

    observers.append(observe)
    try:
        yield found
    finally:
        observers.remove(observe)


@dataclass(frozen=True)
class MicroStep:
    """The graph of one micro-step, before it is sharded."""

    capture: Capture
    """Of the whole step."""
    graph: StepGraph
    costs: CostModel
    budget_bytes: int | None = None
    """What a rank may hold."""

    @property
    def fuses(self) -> bool:
        """Whether runs of compute will be compiled regions."""
        (compilation,) = self.capture.compilations
        return compilation.config.fuses


def micro_step_of(
    build: Callable[[], Any],
    *,
    micro_batches: int,
    options: Mapping[str, Any] | Config | None = None,
    **settings: Any,
) -> MicroStep:
    """Capture a step, and keep the graph of one of its micro-steps.

    Args:
        options: the backend's. Their `memory_budget` is each rank's of the pipeline, which has a
            part of the step alone: stages are cut so that model states and what is saved are within
            it, and the step is not fitted into it. Temporaries and what is on its way come on top.
        settings: further ones of `capture`; ``world_size`` is how many ranks share each stage.

    Raises:
        ConfigError: the forward is several graphs.
    """
    config = Config.from_options({} if options is None else options)
    whole = replace(config, memory_budget=NO_BUDGET)
    with collecting_micro_steps() as seen:
        captured = capture(build, step=True, micro_batches=micro_batches, options=whole, **settings)
    if len(seen) != 1:
        raise ConfigError(
            f"the step is {len(seen)} graphs, and a pipeline is cut out of one. "
            "fxzero inspect without --mesh shows what breaks it."
        )
    ((graph, costs),) = seen
    budget_bytes = None
    if config.budget is not None:
        budget_bytes = config.budget.bytes_of(lambda: config.cost.device_bytes(device_of(graph)))
    return MicroStep(captured, graph, costs, budget_bytes)


def under(
    schedule: str, micro_step: MicroStep, num_ranks: int, num_micro_batches: int
) -> PipelineReport:
    """Cut a micro-step into the stages of a schedule, given by its name or file; ``auto`` takes the
    one under which a step ends first.

    Raises:
        ConfigError: there is no such schedule, or it has more stages than places to cut at.
    """
    names = [*TABLES] if schedule == AUTO else [schedule]
    found: list[PipelineReport] = []
    refused: list[ConfigError] = []
    for name in names:
        try:
            found.append(as_pipeline(micro_step, table_of(name, num_ranks, num_micro_batches)))
        except ConfigError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=lambda report: report.step_us)


def as_pipeline(micro_step: MicroStep, table: Table) -> PipelineReport:
    """Cut a micro-step into the stages of a schedule.

    Raises:
        ConfigError: more stages than places to cut at.
    """
    costs = micro_step.costs
    inside = ZeroInside.of(micro_step.capture, costs)
    limit = None
    if micro_step.budget_bytes is not None:
        limit = Limit.of(table, micro_step.budget_bytes, inside.states)
    found = stages_of(
        micro_step.graph,
        costs,
        table.num_stages,
        table.num_micro_steps,
        limit=limit,
        ranks_per_stage=micro_step.capture.world_size,
        fuses=micro_step.fuses,
    )
    compute_us = inside.casting(_compute_us(found), found.stages, table)
    beside_us = inside.beside(compute_us, found.stages, table)
    early_us = weights_last(compute_us)
    replayed = replay_table(table, beside_us, _transfer_us(found), early_us)
    alone = replay_table(table, compute_us, early_us=early_us)
    by_kind = _held_by_rank(table, found, inside)
    shares = [stage.num_parameters / inside.num_parameters for stage in found.stages]
    states = [ModelStates()] * table.num_ranks
    update_us, whole_us = [0.0] * table.num_ranks, _update_us(micro_step)
    for stage, own in enumerate(inside.states_of_stages(found)):
        states[table.rank_of[stage]] += own
        update_us[table.rank_of[stage]] += shares[stage] * whole_us
    messages = _message_bytes(table, found)
    return PipelineReport(
        schedule=table.name,
        num_ranks=table.num_ranks,
        num_micro_batches=table.num_micro_steps,
        costs=costs.name,
        found=found,
        rank_of=tuple(table.rank_of[stage] for stage in range(table.num_stages)),
        in_flight=replayed.in_flight,
        idle_shares=replayed.idle_shares,
        peak_bytes=tuple(sum(kinds.values()) for kinds in by_kind),
        bytes_by_kind=tuple(dict(kinds) for kinds in by_kind),
        states=tuple(states),
        sent_bytes=tuple(map(sum, zip(_sent_inside(table, inside, shares), messages, strict=True))),
        message_bytes=messages,
        update_us=tuple(update_us),
        exposed_us=replayed.makespan_us - alone.makespan_us,
        step_us=replayed.makespan_us,
        picture=replayed.picture(),
        replayed=replayed,
    )


def _compute_us(found: Stages) -> Callable[[Action], float]:
    def action_us(action: Action) -> float:
        stage = found.stages[action.stage]
        match action.work:
            case Work.FORWARD:
                return stage.forward_us
            case Work.BACKWARD:
                return stage.input_us + stage.weight_us
            case Work.INPUT_GRADIENTS:
                return stage.input_us
            case Work.WEIGHT_GRADIENTS:
                return stage.weight_us

    return action_us


def _transfer_us(found: Stages) -> Callable[[Action, Action], float]:
    def transfer_us(before: Action, action: Action) -> float:
        crossing = found.crossings[min(before.stage, action.stage)]
        sent = crossing.num_bytes if action.work is Work.FORWARD else crossing.gradient_bytes
        both = crossing.num_bytes + crossing.gradient_bytes
        return crossing.us * sent / both if both else 0.0

    return transfer_us


def _update_us(micro_step: MicroStep) -> float:
    """What the update of all parameters takes that a rank of a stage holds, as the step's graph has
    it: compute alone."""
    (compilation,) = micro_step.capture.compilations
    assert compilation.joint is not None
    program = tasks_of(compilation.joint, micro_step.costs, fuses=micro_step.fuses)
    return sum(
        task.us
        for task, nodes in zip(program.graph.tasks, program.groups, strict=True)
        if task.resource == COMPUTE and stamp_of(nodes[0]).phase is Phase.OPTIMIZER
    )


def _held_by_rank(table: Table, found: Stages, inside: ZeroInside) -> list[Counter[str]]:
    """By rank, what it holds at most for its stages, by what it is for."""
    held: list[Counter[str]] = [Counter() for _ in table.ranks]
    temporary: list[list[int]] = [[] for _ in table.ranks]
    every = zip(found.stages, inside.states_of_stages(found), in_flight(table), strict=True)
    for number, (stage, states, flights) in enumerate(every):
        held[table.rank_of[number]] += Counter(
            {
                Kind.PARAMETERS.value: states.parameter_bytes,
                Kind.OPTIMIZER_STATE.value: states.optimizer_bytes,
                Kind.GRADIENTS.value: states.gradient_bytes + inside.reduced_bytes(stage),
                Kind.GATHERED.value: inside.gathered_bytes(stage),
                Kind.ACTIVATIONS.value: flights * stage.saved_bytes,
            }
        )
        # What was sent is there until it has left, and what comes next is asked for early.
        borders = found.crossings[max(number - 1, 0) : number + 1]
        messages = sum(crossing.num_bytes + crossing.gradient_bytes for crossing in borders)
        temporary[table.rank_of[number]].append(stage.temporary_bytes + messages)
    for counted, of_stages in zip(held, temporary, strict=True):  # a rank runs one stage at a time
        counted[Kind.WORKSPACE.value] = max(of_stages)
    return held


def _sent_inside(table: Table, inside: ZeroInside, shares: Sequence[float]) -> list[float]:
    """By rank, what it sends in a step to those that share its stages."""
    moved_by = inside.moved_by(table)
    return [
        sum(shares[a.stage] * sum(moved.sent_bytes for moved in moved_by(a)) for a in row)
        for row in table.ranks
    ]


def _message_bytes(table: Table, found: Stages) -> tuple[int, ...]:
    """By rank, what it sends in a step to its neighbours along the pipeline."""
    sent = [0] * table.num_ranks
    for row in table.ranks:
        for action in row:
            for need in table.needs(action):
                source, target = table.rank_of[need.stage], table.rank_of[action.stage]
                if source != target:
                    crossing = found.crossings[min(need.stage, action.stage)]
                    is_forward = action.work is Work.FORWARD
                    sent[source] += crossing.num_bytes if is_forward else crossing.gradient_bytes
    return tuple(sent)
