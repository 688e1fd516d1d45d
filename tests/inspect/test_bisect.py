"""Each pass that is broken on purpose is named; a healthy compiler has none to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxzero import CaptureError, ConfigError
from fxzero.compiler.config import Config
from fxzero.graph import Role, StepGraph
from fxzero.inspect.bisect import Case, Finding, bisect, slow
from fxzero.inspect.targets import Sizes
from fxzero.passes import (
    Bucket,
    Prefetch,
    Recompute,
    ShardGrads,
    ShardParams,
    Update,
)
from fxzero.passes.base import Pass
from tests.tiers import exhaustive

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}, "gather_ahead": {"enabled": False}}
aten = torch.ops.aten


class Net(nn.Module):
    """Two layers of one shape, so that parameters may be mistaken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        """Tokens: (B, 5)."""
        return (torch.randint(11, (batch_size, 5)),)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 5) → scalar."""
        x = self.drop(self.first(self.embed(tokens)))
        x = self.second(nn.functional.gelu(x) * torch.sigmoid(x))
        return (x * x).mean()


def case(**changes: Any) -> Case:
    """The net, at stage 3, on two ranks."""
    options = {**EAGER, **changes.pop("options", {})}
    settings: dict[str, Any] = {"config": Config.from_options(options), **changes}
    build, sizes = settings.pop("build", Net), settings.pop("sizes", Sizes(4, None, None))
    return Case(build, sizes, **settings)


@pytest.mark.parametrize("zero", [0, 3, *exhaustive(1, 2)])
def test_nothing_is_found_in_the_loop(zero: int) -> None:
    """Every graph was run, and compared in every tensor: the loss, and five gradients."""
    found = bisect(case(zero=zero))
    assert found.culprit is None
    passes = {check.behind for check in found.checks}
    assert {"capture", "recompute", "shard_grads", "bucket", "prefetch", "cut"} <= passes
    assert all(check.num_tensors == 6 and check.difference < 1e-12 for check in found.checks)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_nothing_is_found_in_a_step(clip: float | None) -> None:
    """With the update the parameters behind it are compared, too."""
    found = bisect(case(step=True, micro_batches=2, clip_grad_norm=clip))
    assert found.culprit is None
    by_pass = {check.behind: check for check in found.checks}
    assert "stamp" not in by_pass, "a graph of one micro-batch is not called with two"
    assert by_pass["accumulate"].num_tensors == 6
    assert by_pass["update"].num_tensors == 1 + 5 * 4, "parameters, moments and steps"
    # AdamW divides by roots of squares: what is 1e-16 in a gradient may be more behind it.
    assert all(check.difference < 1e-9 for check in found.checks)


def calls(graph: StepGraph, target: Any) -> list[fx.Node]:
    """The nodes that call something, in pieces too."""
    return [node for node in graph.graph.nodes if node.target is target]


def sums(graph: StepGraph) -> None:
    """Gradients are added up, not averaged."""
    for node in calls(graph, torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default):
        node.args = (node.args[0], "sum", *node.args[2:])


def swaps(graph: StepGraph) -> None:
    """Two parameters of one shape change places in a bucket."""
    parts = [node for node in graph.nodes(role=Role.PART) if "gather" in str(node.args[0])]
    by_shape: dict[tuple[int, ...], fx.Node] = {}
    for part in parts:
        other = by_shape.setdefault(tuple(part.meta["val"].shape), part)
        if other is not part and other.args[0] is part.args[0]:
            other.args, part.args = part.args, other.args
            return
    raise AssertionError("no two parts of one shape")


def repeats_something_else(graph: StepGraph) -> None:
    """What backward repeats is not what forward did."""
    for node in graph.graph.nodes:
        stamp = node.meta.get("fxzero")
        if stamp is not None and stamp.again and node.target is aten.sigmoid.default:
            node.target = aten.tanh.default
            return
    raise AssertionError("nothing is repeated")


def reads_the_wrong_shard(graph: StepGraph) -> None:
    """A parameter is gathered from another one's shards."""
    launches = list(graph.nodes(role=Role.LAUNCH))
    gathers = [node for node in launches if "all_gather" in str(node.target)]
    by_shape: dict[tuple[int, ...], fx.Node] = {}
    for node in gathers:
        (sent,) = node.args[0]
        other = by_shape.setdefault(tuple(sent.meta["val"].shape), node)
        if other is not node and other.args[0] != node.args[0]:
            node.args = (other.args[0], *node.args[1:])
            return
    raise AssertionError("no two shards of one shape")


def frees_too_early(graph: StepGraph) -> None:
    """A release comes before the last reader."""
    release = calls(graph, torch.ops.fxzero.release.default)[0]
    readers = [n for n in graph.graph.nodes if n in {u for a in release.args[0] for u in a.users}]
    first = next(node for node in readers if node is not release)
    first.prepend(release)


def updates_the_other_way(graph: StepGraph) -> None:
    """A parameter moves the other way: AdamW's first step knows the sign alone."""
    update = next(iter(graph.nodes(role=Role.UPDATE)))
    grads = list(update.args[1])
    with graph.graph.inserting_before(update), graph.made_for(update):
        grads[0] = graph.call(aten.neg.default, (grads[0],), stamp=grads[0].meta["fxzero"])
    update.args = (update.args[0], grads, *update.args[2:])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a pass do something else besides, and the verifier not look."""

    def breaks(kind: type[Pass], what: Callable[[StepGraph], None]) -> None:
        run = kind.run

        def runs(self: Any, graph: StepGraph, ctx: Any) -> Any:
            notes = run(self, graph, ctx)
            what(graph)
            return notes

        monkeypatch.setattr(kind, "run", runs)
        monkeypatch.setattr("fxzero.compiler.run.verify", lambda *_, **__: None)

    return breaks


BROKEN = [
    (ShardParams, reads_the_wrong_shard, {}),
    (ShardGrads, sums, {}),
    (Bucket, swaps, {}),
    (Prefetch, frees_too_early, {}),
    (Recompute, repeats_something_else, {}),
    (Update, updates_the_other_way, {"step": True}),
]


@pytest.mark.parametrize(
    ("kind", "what", "changes"), BROKEN, ids=[kind.name for kind, _, _ in BROKEN]
)
def test_a_broken_pass_is_named(
    broken: Callable[..., None],
    kind: type[Pass],
    what: Callable[[StepGraph], None],
    changes: dict[str, Any],
) -> None:
    """With the tensor that differs, and by how much."""
    broken(kind, what)
    found = bisect(case(**changes))
    assert found.culprit is not None
    assert found.culprit.behind == kind.name
    assert found.culprit.error or found.culprit.worst
    assert not found.culprit.difference <= 1e-3
    assert all(not check.fails(found.tolerance) for check in found.checks[:-1])


def test_the_decision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where without one item of it the result is right, that item is to blame."""
    apply = Recompute.apply

    def applies(self: Any, graph: StepGraph, decision: Any, ctx: Any) -> Any:
        notes = apply(self, graph, decision, ctx)
        for node in graph.graph.nodes:
            stamp = node.meta.get("fxzero")
            if stamp is not None and stamp.again and node.target is aten.sigmoid.default:
                node.target = aten.tanh.default
        return notes

    monkeypatch.setattr(Recompute, "apply", applies)
    found = bisect(case())
    assert found.culprit is not None
    assert found.culprit.behind == "recompute"
    assert found.decisions
    assert all("sigmoid" in item for item in found.decisions)


def test_what_the_verifier_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass that breaks a rule is found before anything runs."""
    run = Prefetch.run

    def runs(self: Any, graph: StepGraph, ctx: Any) -> Any:
        notes = run(self, graph, ctx)
        frees_too_early(graph)
        return notes

    monkeypatch.setattr(Prefetch, "run", runs)
    found = bisect(case())
    assert found.culprit is not None
    assert found.culprit.behind == "prefetch"
    assert "release" in found.culprit.error


class Draws(nn.Module):
    """Noise that no module's dropout makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → scalar."""
        x = self.layer(x)
        return (x * torch.rand_like(x) if self.training else x).pow(2).sum()


def test_a_model_that_draws_is_put_in_eval_mode() -> None:
    """Two orders of drawing are two results; it is said."""
    found = bisect(Case(Draws, Sizes(4, None, "x=float64[B,4]"), config=Config.from_options(EAGER)))
    assert found.culprit is None
    assert "eval mode" in found.note


class Normed(nn.Module):
    """Buffers that forward writes to, and outputs before the loss, one of them infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, 6) → outputs, and a loss in float32."""
        y = self.norm(self.layer(x))
        masked = y.masked_fill(y > 0, -torch.inf)
        return {"logits": y, "masked": masked, "loss": y.float().pow(3).mean()}


@pytest.mark.parametrize("step", [False, True])
def test_habits_of_healthy_models(step: bool) -> None:
    """Buffers, several outputs, infinities and a cast are no findings."""
    inputs = "x=float64[B,6]"
    found = bisect(
        Case(Normed, Sizes(8, None, inputs), step=step, config=Config.from_options(EAGER))
    )
    assert found.culprit is None, found.culprit
    assert "less than float64" in found.note


class Outputs(nn.Module):
    """What a loop makes a loss of."""

    def __init__(self, several: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.several = several

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(B, 6) → (B, 6), or two numbers."""
        y = self.layer(x).relu()
        return (y.pow(2).mean(), y.abs().mean()) if self.several else y


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_that_the_loop_makes(broken: Callable[..., None], several: bool) -> None:
    """No number among the outputs, or two: they are held to the capture, gradients to eager."""
    one = Case(
        lambda: Outputs(several),
        Sizes(4, None, "x=float64[B,6]"),
        config=Config.from_options(EAGER),
    )
    found = bisect(one)
    assert found.culprit is None, found.culprit
    assert found.checks[-1].num_tensors == 2 + (2 if several else 1)
    broken(Bucket, turns_an_output)
    found = bisect(one)
    assert found.culprit is not None
    assert (found.culprit.behind, found.culprit.worst) == ("bucket", "output 0")


def turns_an_output(graph: StepGraph) -> None:
    """What forward returns first has the other sign."""
    first = graph.output_values[0]
    assert isinstance(first, fx.Node)
    with graph.graph.inserting_after(first), graph.made_for(first):
        turned = graph.call(aten.neg.default, (first,), stamp=first.meta["fxzero"])
    graph.set_output_values([turned, *graph.output_values[1:]])


def test_what_is_held_on_the_host_is_refused() -> None:
    """The ranks of one process share its memory."""
    with pytest.raises(ConfigError, match="would share the host's memory"):
        bisect(case(step=True, options={"memory": "all_host"}))


def erases_the_update(graph: StepGraph) -> None:
    """Nothing is updated."""
    for node in list(graph.nodes(role=Role.UPDATE)):
        graph.graph.erase_node(node)


def swaps_moments(graph: StepGraph) -> None:
    """Each moment goes to the other's place."""
    for node in graph.nodes(role=Role.UPDATE):
        first, second, *rest = node.args[2]
        node.args = (*node.args[:2], [second, first, *rest], *node.args[3:])


def loses_a_gradient(graph: StepGraph) -> None:
    """One is None, as of a parameter that nobody uses."""
    position = next(iter(graph.gradients))
    values = list(graph.output_values)
    values[position] = None
    graph.set_output_values(values)


@pytest.mark.parametrize(
    ("kind", "what", "step"),
    [
        (Update, erases_the_update, True),
        (Update, swaps_moments, True),
        (ShardGrads, loses_a_gradient, False),
    ],
    ids=["no update", "moments", "no gradient"],
)
def test_what_is_missing_is_a_difference(
    broken: Callable[..., None], kind: type[Pass], what: Callable[[StepGraph], None], step: bool
) -> None:
    """Nothing that a step must compute may be left out, nor go unnoticed."""
    broken(kind, what)
    found = bisect(case(step=step))
    assert found.culprit is not None
    assert found.culprit.behind == kind.name
    assert found.culprit.worst


def test_times_without_each_pass() -> None:
    """All settings are restored for the last run, and each was another one."""
    rows: tuple[Any, ...] = slow(case(dtype=torch.float32, world_size=1), steps=2)
    names = [row.without for row in rows]
    assert names[0] == names[-1] == ""
    assert {"recompute", "bucket", "prefetch"} <= set(names)
    assert len(set(names[1:-1])) == len(names) - 2
    assert all(len(row.steps_ms) == 2 and row.step_ms > 0 for row in rows)


def test_findings_are_plain_data() -> None:
    """What the command prints as JSON."""
    found = bisect(case())
    assert isinstance(found, Finding)
    assert set(found.to_json()) == {"checks", "tolerance", "culprit", "decisions", "note"}


class Zeros(nn.Module):
    """A bias in front of a norm, whose gradient is zero but for rounding; layers that nothing
    calls; whole numbers; a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to a loss."""
        h = self.norm(self.first(x))[:, self.order].relu()
        return self.last(h).logsumexp(-1).mean() + self.empty.sum()


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_pass_is_blamed_for_rounding(dtype: torch.dtype, step: bool) -> None:
    """Nor for what no gradient reaches."""
    compiled = {"lower_regions": {"backend": "inductor"}}  # whose sums are others than eager ones
    build = lambda: (Zeros(), torch.randn(8, 6))  # noqa: E731
    made = case(build=build, dtype=dtype, step=step, sizes=Sizes(), options=compiled)
    found = bisect(made)
    assert found.culprit is None, found.culprit
    assert len(found.checks) > 5


class Complex(nn.Module):
    """Its output is real, and depends on both parts of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.constant = nn.Parameter(torch.ones(6, 6, dtype=torch.complex64))
        self.real = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) → scalar."""
        both = x.to(self.mixed.dtype) @ self.mixed @ self.constant
        return self.real(both.real + both.imag.abs()).square().mean()


@pytest.mark.parametrize("step", [False, True])
def test_complex_parameters_stay_complex(step: bool, broken: Callable[..., None]) -> None:
    """And are updated by AdamW's own step, on each rank's part."""
    build = lambda: (Complex(), torch.randn(8, 6))  # noqa: E731
    made = case(build=build, step=step, sizes=Sizes())
    model, _ = made.model_and_batch(0)
    assert {p.dtype for p in model.parameters()} == {torch.complex128, torch.float64}
    assert model.constant.imag.abs().min() > 0
    found = bisect(made)
    assert found.culprit is None, found.culprit
    behind = {check.behind: check.num_tensors for check in found.checks}
    assert behind["update" if step else "shard_grads"] == 5
    if step:
        broken(Update, updates_the_wrong_one)
        assert bisect(made).culprit.behind == "update"  # type: ignore[union-attr]


def updates_the_wrong_one(graph: StepGraph) -> None:
    """Takes the gradients of two parameters of one shape for each other's."""
    (update,) = graph.nodes(role=Role.UPDATE)
    params, grads, *rest = update.args
    assert isinstance(grads, list)
    first, second, *others = grads
    assert first.meta["val"].shape == second.meta["val"].shape
    update.args = (params, [second, first, *others], *rest)


class Casts(nn.Module):
    """By name, and not to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) → scalar."""
        return self.layer(x.to(torch.float32)).sum()


def test_a_cast_by_name() -> None:
    build = lambda: (Casts(), torch.randn(8, 6))  # noqa: E731
    with pytest.raises(CaptureError, match=r"casts to another dtype by name.*--dtype float32"):
        bisect(case(build=build, sizes=Sizes()))
    assert bisect(case(build=build, sizes=Sizes(), dtype=torch.float32)).culprit is None


def test_where_nothing_is_compiled_nothing_was_checked() -> None:
    def build() -> tuple[nn.Module, Tensor]:
        model = nn.Linear(4, 4)
        model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
        return model, torch.randn(2, 4)

    with pytest.raises(CaptureError, match="no pass has seen it"):
        bisect(case(build=build, sizes=Sizes()))


def test_a_model_for_which_there_is_no_memory() -> None:
    """Before any of it is made."""
    with pytest.raises(ConfigError, match=r"parameters and their gradients are [\d.]+ GiB"):
        bisect(
            case(
                build=lambda: (nn.Linear(1 << 20, 1 << 20), torch.randn(1, 1 << 20)), sizes=Sizes()
            )
        )
