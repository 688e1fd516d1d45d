"""Plans: written, replayed to the letter, changed by hand, refused."""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fxzero
from fxzero import ConfigError
from fxzero.cli.app import app
from fxzero.compiler.config import Config
from fxzero.graph import Role, StepGraph
from fxzero.inspect import Capture, capture
from fxzero.sharding.shard import model_state
from tests.parity.harness import Pools
from tests.stepping import compiled_step
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import chain, scheduled

DEPTH, WIDTH = 4, 64
SMALL = {"bucket": {"min_bytes": 0}}
"""A bucket a layer."""

Data = dict[str, Any]


def captured(
    options: Data | None = None,
    *,
    zero: int = 3,
    step: bool = False,
    depth: int = DEPTH,
    micro_batches: int = 2,
) -> Capture:
    """Eight ranks that exist only in name."""
    build = chain(depth, WIDTH, 8)
    return capture(
        lambda: build() if not step else with_loss(build),
        zero=zero,
        world_size=8,
        step=step,
        micro_batches=micro_batches if step else 1,
        options=options or SMALL,
    )


def with_loss(build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> Any:
    """A batch that wants no gradient."""
    model, inputs = build()
    return model, tuple(value.detach() for value in inputs)


def text(found: Capture) -> str:
    """The scheduled graphs."""
    graphs = [c.joint.text() for c in found.compilations if c.joint is not None]
    return "\n".join(graphs).replace(f"{_number(found)}/", "N/")


def _number(found: Capture) -> int:
    """The model's number in this process, which its graph's text holds."""
    (number, *_) = {s.state.number for c in found.compilations for s in c.specs.values()}
    return number


def written(path: Path, found: Capture, options: Data | None = None) -> Data:
    """Write a capture's plan, and read it as JSON."""
    found.plan(Config.from_options(options or SMALL)).write(path)
    data: Data = json.loads(path.read_text())
    return data


@functools.cache
def plan_of(micro_batches: int = 0) -> str:
    """What is decided by the settings of `captured`; of a step of so many micro-batches, if any."""
    settings: Data = {"step": True, "micro_batches": micro_batches} if micro_batches else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        written(path, captured(**settings))
        return path.read_text()


def copied(path: Path, micro_batches: int = 0) -> Data:
    """Write `plan_of`, and read it as JSON."""
    path.write_text(plan_of(micro_batches))
    data: Data = json.loads(path.read_text())
    return data


def only_graph(data: Data) -> Data:
    """The decisions of the one graph, by pass."""
    (graph,) = data["graphs"].values()
    return graph  # type: ignore[no-any-return]


def replayed(path: Path, data: Data | None = None, **settings: Any) -> Capture:
    """Compile by a plan; `data` is written to the file before."""
    if data is not None:
        path.write_text(json.dumps(data))
    return captured({**SMALL, "plan": str(path)}, **settings)


@pytest.mark.parametrize(
    ("zero", "step"), in_two_tiers([*product([0, 1, 2, 3], [False, True])], always=[(3, True)])
)
def test_a_plan_replays_to_the_letter(tmp_path: Path, zero: int, step: bool) -> None:
    """Node by node, whatever the settings by which it would be decided now."""
    path = tmp_path / "plan.json"
    first = captured(zero=zero, step=step)
    written(path, first)
    other = {"bucket": {"cap_bytes": 1}, "prefetch": {"distance": 0}, "recompute": {"max_nodes": 0}}
    # At stage 0 every layer has its own bucket and nothing to gather: all settings agree.
    assert zero == 0 or text(captured(other, zero=zero, step=step)) != text(first)
    with pytest.warns(fxzero.FxZeroWarning, match="has no effect: the plan decides"):
        again = captured({**other, "plan": str(path)}, zero=zero, step=step)
    assert text(again) == text(first)


MANY = 8
"""More micro-batches than a graph needs to hold."""
LONG = {"step": True, "micro_batches": MANY}


@pytest.mark.parametrize(("distance", "held"), [(1, 5), (50, 8)])
def test_a_plan_of_many_micro_batches(tmp_path: Path, distance: int, held: int) -> None:
    """Of five micro-steps, or of all where the schedule does not repeat."""
    path = tmp_path / "plan.json"
    options = {**SMALL, "prefetch": {"distance": distance, "reduce_distance": distance}}
    first = captured(options, **LONG)
    data = written(path, first, options)
    assert only_graph(data)["accumulate"] == {"micro_steps": held}
    again = replayed(path, **LONG)
    assert launches(again) == launches(first)
    # A graph that was made twice numbers its nodes otherwise.
    mine, theirs = (re.sub(r"_[0-9]+", "", text(found)) for found in (again, first))
    assert mine == theirs


def test_a_plan_in_which_one_micro_step_differs(tmp_path: Path) -> None:
    """One that stands for others cannot: the message says which, and what to do."""
    path = tmp_path / "plan.json"
    data = copied(path, MANY)
    order = only_graph(data)["prefetch"]["order"]
    place = order.index("join reduce.backward.12")  # of the fourth micro-step
    assert order.index("layers.0 forward #4") < place < order.index("layers.0 forward #5")
    assert order[place + 1] == "reduce.backward.13"
    order[place], order[place + 1] = order[place + 1], order[place]
    with pytest.raises(ConfigError, match=r"its graph holds 5 micro-steps.*Order every micro-step"):
        replayed(path, data, **LONG)


def test_a_plan_that_leaves_the_order_open(tmp_path: Path) -> None:
    """Where the order that is found does not repeat, the graph holds all, as without a plan."""
    path = tmp_path / "plan.json"
    data = copied(path, MANY)
    for name in ("accumulate", "bucket", "prefetch"):
        del only_graph(data)[name]
    path.write_text(json.dumps(data))
    options = {**SMALL, "prefetch": {"distance": 50, "reduce_distance": 50}}
    found = captured({**options, "plan": str(path)}, **LONG)
    assert launches(found) == launches(captured(options, **LONG))
    assert sum(name.startswith("reduce") for name in launches(found)) % 8 == 0


def test_a_plan_of_too_few_micro_steps(tmp_path: Path) -> None:
    """A graph holds all of them, or five."""
    path = tmp_path / "plan.json"
    data = copied(path, MANY)
    only_graph(data)["accumulate"]["micro_steps"] = 3
    with pytest.raises(ConfigError, match="of 8 micro-batches the graph holds 5 or 8"):
        replayed(path, data, **LONG)


@pytest.mark.parametrize("clip", [0.5, *exhaustive(None)])
def test_the_plan_of_a_step_is_of_the_users_own(tmp_path: Path, clip: float | None) -> None:
    """What inspect compiles is what `compile_step` makes of the same model, layer for layer."""
    path = tmp_path / "plan.json"
    build = chain(DEPTH, WIDTH, 8)
    # Regions are compiled in one of the two cases, as they are by default.
    options = {**SMALL, "lower_regions": {"backend": "eager" if clip else "inductor"}}
    found = capture(
        lambda: with_loss(build),
        zero=3,
        world_size=8,
        step=True,
        micro_batches=2,
        clip_grad_norm=clip,
        options=options,
    )
    written(path, found)
    compilation = compiled_step(
        lambda: with_loss(build),
        options={**options, "plan": str(path)},
        optimizer=lambda p: torch.optim.AdamW(p, fused=True),
        micro_batches=2,
        clip_grad_norm=clip,
    )
    decisions = compilation.context.decisions
    assert decisions.replayed == set(decisions.made)
    with pytest.raises(ConfigError, match=r"is of other graphs .* norm to clip to"):
        compiled_step(
            lambda: with_loss(build),
            options={**options, "plan": str(path)},
            micro_batches=2,
            clip_grad_norm=2.0,
        )


def test_a_setting_beside_a_plan_is_said_to_have_no_effect(tmp_path: Path) -> None:
    """The plan decides; what it was made with is no news."""
    path = tmp_path / "plan.json"
    copied(path)
    captured({**SMALL, "plan": str(path)})
    with pytest.warns(fxzero.FxZeroWarning, match="distance=3.* has no effect: the plan decides"):
        captured({**SMALL, "plan": str(path), "prefetch": {"distance": 3}})


@pytest.mark.parametrize("memory", ["all_host", "l2l", *exhaustive("states_host")])
def test_a_plan_with_something_on_the_host_replays(tmp_path: Path, memory: str) -> None:
    """What the name of a preset fills in is no news either."""
    path = tmp_path / "plan.json"
    options = {**SMALL, "memory": memory, "offload_activations": {"share": 1.0, "min_bytes": 1}}
    first = captured(options, step=True)
    written(path, first, options)
    again = captured({**options, "plan": str(path), "strict": True}, step=True)
    assert text(again) == text(first)


def test_it_says_by_what_it_was_decided(tmp_path: Path) -> None:
    """The numbers that decided, the costs and the settings."""
    options = {**SMALL, "cost": {"cluster": "dgx_h100"}}
    data = written(tmp_path / "plan.json", captured(options), options)
    assert data["costs"] == "analytic, dgx_h100"
    assert data["settings"]["cost"] == {"model": "analytic", "cluster": "dgx_h100"}
    decisions = only_graph(data)
    assert set(decisions) == {"lower_kernels", "recompute", "bucket", "prefetch"}
    assert decisions["prefetch"]["step_us"] > decisions["prefetch"]["exposed_us"] >= 0
    assert decisions["prefetch"]["held_bytes"] <= decisions["prefetch"]["budget_bytes"]
    assert {b["full_bytes"] for b in decisions["bucket"]["buckets"]} == {WIDTH * WIDTH * 4}


def launches(found: Capture) -> list[str]:
    """Buckets in launch order."""
    (graph,) = [c.joint for c in found.compilations]
    assert graph is not None
    return [t.stamp.bucket for t in graph.transfers()]


def test_an_order_that_was_changed_by_hand_is_the_schedule(tmp_path: Path) -> None:
    """Two gathers change places."""
    path = tmp_path / "plan.json"
    data = copied(path)
    order = only_graph(data)["prefetch"]["order"]
    before = launches(captured())
    first, second = (i for i, name in enumerate(order) if name in before[:2])
    order[first], order[second] = order[second], order[first]
    after = launches(replayed(path, data))
    assert after[:2] == before[1::-1]
    assert after[2:] == before[2:]


def test_buckets_that_were_changed_by_hand_travel_so(tmp_path: Path) -> None:
    """Two layers join; the order that names the old ones is left out, and made anew."""
    path = tmp_path / "plan.json"
    data = copied(path)
    decisions = only_graph(data)
    buckets = decisions["bucket"]["buckets"]
    first, second = [b for b in buckets if (b["lane"], b["phase"]) == ("gather", "forward")][:2]
    first["params"] += second["params"]
    buckets.remove(second)
    del decisions["prefetch"]
    found = replayed(path, data)
    (graph,) = [c.joint for c in found.compilations]
    assert graph is not None
    (joined,) = [t for t in graph.transfers() if t.stamp.bucket == first["name"]]
    assert joined.record.num_tensors == 2
    assert joined.record.full_bytes == 2 * WIDTH * WIDTH * 4


def test_what_is_repeated_can_be_changed_by_hand(tmp_path: Path) -> None:
    """Nothing is."""
    path = tmp_path / "plan.json"
    data = copied(path)
    decisions = only_graph(data)
    assert decisions["recompute"]["values"]
    decisions["recompute"]["values"] = []
    del decisions["prefetch"]
    found = replayed(path, data)
    notes = [r.notes for r in found.compilations[0].records if r.name == "recompute"]
    assert notes[0]["repeated"] == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"zero": 2}, "another ZeRO stage"),
        ({"depth": DEPTH + 1}, "another model"),
        ({"step": True}, "another door"),
    ],
)
def test_a_plan_of_another_graph_is_refused(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    """By its digest, before anything is decided."""
    path = tmp_path / "plan.json"
    copied(path)
    with pytest.raises(Exception, match=r"is of other graphs \([0-9a-f]{16}\) than this one"):
        replayed(path, **settings)


def test_a_digest_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = copied(path)
    data["graphs"] = {"0123456789abcdef": only_graph(data)}
    with pytest.raises(Exception, match=r"is of other graphs \(0123456789abcdef\)"):
        replayed(path, data)


def drop_a_task(d: Data) -> None:
    d["prefetch"]["order"].pop()


def double_a_task(d: Data) -> None:
    d["prefetch"]["order"].append(d["prefetch"]["order"][0])


def backwards(d: Data) -> None:
    d["prefetch"]["order"].reverse()


def keep_nothing_there_is(d: Data) -> None:
    d["prefetch"]["kept"] = ["gather.backward.99"]


def lose_a_parameter(d: Data) -> None:
    d["bucket"]["buckets"][0]["params"] = []


def repeat_for_nobody(decisions: Data) -> None:
    decisions["recompute"]["values"][0]["value"] = "nobody"


def keep_twice(decisions: Data) -> None:
    kept = [b["name"] for b in decisions["bucket"]["buckets"] if b["name"].startswith("gather.b")]
    decisions["prefetch"]["kept"] = kept[:1] * 2


def misspell_a_pass(decisions: Data) -> None:
    decisions["bukcet"] = decisions["bucket"]


def repeat_what_is_not_there(d: Data) -> None:
    d["recompute"]["values"][0]["nodes"] = ["nothing"]


def misspell(d: Data) -> None:
    d["prefetch"]["budget"] = 1


def leave_out_a_key(d: Data) -> None:
    del d["prefetch"]["order"]


def use_text_for_a_number(d: Data) -> None:
    d["bucket"]["buckets"][0]["axis"] = "0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_a_task, r"must name each of \d+ tasks once; look at tail"),
        (double_a_task, r"must name each of \d+ tasks once"),
        (backwards, r"the plan's order has '.*' before '.*', which it needs"),
        (keep_nothing_there_is, r"keeps bucket 'gather.backward.99', and could keep: gather"),
        (lose_a_parameter, r"must carry each of 4 parameters once; look at layers\.\d\.weight"),
        (repeat_what_is_not_there, r"repeats 'nothing', which is no forward node"),
        (repeat_for_nobody, r"for 'nobody', which is not among them"),
        (keep_twice, r"keeps a bucket twice: gather"),
        (misspell_a_pass, r"bukcet: did you mean 'bucket'"),
        (misspell, r"has no setting 'budget': did you mean 'budget_bytes'"),
        (leave_out_a_key, r"prefetch lacks 'order'"),
        (use_text_for_a_number, r"axis='0' must be a whole number"),
    ],
)
def test_decisions_that_cannot_be(
    tmp_path: Path, change: Callable[[Data], None], message: str
) -> None:
    """The sentence says what is wrong with the file."""
    path = tmp_path / "plan.json"
    data = copied(path)
    change(only_graph(data))
    with pytest.raises(Exception, match=message):
        replayed(path, data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "is no plan of format 1"),
        ('{"format": 2, "graphs": {}}', r"is no plan of format 1 \(found 2\)"),
        ('{"format": 1, "graphs": []}', "graphs are no mapping from digests to decisions"),
        ('{"format": 1, "graphs": {"00": []}}', "graph 00 has no decisions by pass"),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Exception, match=message):
        captured({"plan": str(path)})


def test_the_command_writes_it(tmp_path: Path) -> None:
    """And refuses a folder that is not there before it compiles anything."""
    path = tmp_path / "plan.json"
    target = ["inspect", "tests.compiler.test_plan:two_ranks"]
    result = CliRunner().invoke(app, [*target, "--plan", str(path)])
    assert result.exit_code == 0, result.output
    assert only_graph(json.loads(path.read_text()))["prefetch"]["order"]
    again = CliRunner().invoke(app, [*target, "--options", json.dumps({"plan": str(path)})])
    assert again.exit_code == 0, again.output
    other = CliRunner().invoke(
        app, [*target, "--zero", "1", "--options", json.dumps({"plan": str(path)})]
    )
    assert other.exit_code == 2
    assert "is of other graphs" in other.stderr
    missing = CliRunner().invoke(app, [*target, "--plan", str(tmp_path / "no" / "plan.json")])
    assert missing.exit_code == 2
    assert "Name a file in a folder that exists" in missing.stderr


def test_a_digest_does_not_count_models() -> None:
    """A model's number says how many were sharded before it in this process."""
    first, second = captured(), captured()
    assert _number(first) != _number(second)
    digests = [c.context.decisions.digest for f in (first, second) for c in f.compilations]
    assert len(digests) == 2
    assert len({*digests}) == 1


def test_a_digest_is_that_of_all_ranks() -> None:
    """Thirteen rows on eight ranks: the last ones hold one, or none."""

    def build() -> Any:
        layers = nn.Sequential(nn.Linear(13, 13), nn.ReLU(), nn.Linear(13, 13))
        return layers, (torch.randn(4, 13),)

    digests = set()
    for rank in (0, 6, 7):
        found = capture(build, zero=3, world_size=8, rank=rank, options=SMALL)
        digests |= {c.context.decisions.digest for c in found.compilations}
    assert len(digests) == 1


def rewrite(graph: StepGraph) -> None:
    """Change everything that a pass may change."""
    first = next(graph.nodes(role=Role.COMPUTE))
    first.replace_all_uses_with(first.all_input_nodes[0])
    graph.set_output_values(())
    graph.gradients.clear()
    graph.inputs.clear()


def test_a_clone_is_rewritten_alone() -> None:
    graph = scheduled(chain(2), "stamp")
    before, gradients = graph.text(), dict(graph.gradients)
    other = graph.clone()
    assert other.text() == before
    rewrite(other)
    assert (graph.text(), graph.gradients) == (before, gradients)


class Regression(nn.Module):
    """A loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.float64) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) → scalar."""
        return (self.layers(x) ** 2).mean()


def train(plan: str) -> list[Tensor]:
    """Job: two steps, by a plan or without."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = fxzero.shard(Regression(), zero=3)
    options: Data = {**SMALL, "plan": plan}
    run = torch.compile(model, backend="fxzero", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        run(torch.randn(4, 16, dtype=torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def two_ranks() -> Any:
    """The model and its batch, as each of two ranks has it."""
    return Regression(), (torch.randn(4, 16, dtype=torch.float64),)


@pytest.mark.parametrize("world", [2])
def test_real_ranks_run_a_plan_of_ranks_in_name(ranks: Pools, world: int, tmp_path: Path) -> None:
    """Written without them, changed by hand, and bitwise the same training."""
    path = tmp_path / "plan.json"
    found = capture(two_ranks, zero=3, world_size=world, options=SMALL)
    data = written(path, found)
    changed = copy.deepcopy(data)
    prefetch = only_graph(changed)["prefetch"]
    gathers = [i for i, name in enumerate(prefetch["order"]) if name.startswith("gather.forward")]
    prefetch["order"] = [
        *(prefetch["order"][i] for i in gathers),
        *(name for i, name in enumerate(prefetch["order"]) if i not in gathers),
    ]
    path.write_text(json.dumps(changed))
    plain, planned = ranks(world).run(train, ""), ranks(world).run(train, str(path))
    for ours, theirs in zip(planned, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))


def compile_again(plan: str) -> list[int]:
    """Job: the same model by one setting, another, and a plan; the gathers of a forward each."""
    torch.manual_seed(0)
    model = fxzero.shard(Regression(), zero=3)
    state = model_state(model)
    assert state is not None
    counts = []
    for settings in ({"bucket": {"cap_bytes": 1}}, {"bucket": {"min_bytes": 1 << 20}}):
        for options in (settings, {**settings, "plan": plan}):
            torch._dynamo.reset()
            run = torch.compile(model, backend="fxzero", options=options)
            before = state.traffic.num_gathers
            with warnings.catch_warnings():  # that the plan decides, not the setting
                warnings.simplefilter("ignore", fxzero.FxZeroWarning)
                loss = run(torch.randn(4, 16, dtype=torch.float64))
            counts.append(state.traffic.num_gathers - before)
            loss.backward()
    return counts


@pytest.mark.parametrize("world", [2])
def test_ranks_agree_anew_on_other_settings(ranks: Pools, world: int, tmp_path: Path) -> None:
    """What was agreed on for one setting is not taken for another one, nor for a plan."""
    path = tmp_path / "plan.json"
    written(path, capture(two_ranks, zero=3, world_size=world, options=SMALL))
    for counts in ranks(world).run(compile_again, str(path)):
        assert counts == [6, 3, 1, 3]


def test_an_error_reaches_the_caller_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Config.from_options({"plan": 3})
