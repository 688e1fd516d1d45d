"""The pipeline checks contracts first, then times, verifies and records each pass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import LOWERING, SCHEDULING, Pipelines, loop_passes, step_passes
from fxzero.compiler.run import PassRecord, check_contracts, run_passes
from fxzero.errors import ContractError, PassError, VerificationError
from fxzero.graph import Stamp, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.passes import (
    Bucket,
    Context,
    Fact,
    Notes,
    Pass,
    Prefetch,
    ReleaseSaved,
    ShardParams,
    StampNodes,
)
from tests.tracing import chain, find, trace, up_to


@dataclass(frozen=True)
class Breaking(Pass):
    """Forgets a stamp."""

    name: ClassVar[str] = "breaking"
    ran: ClassVar[list[str]] = []

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """Make a node without a stamp."""
        (product, *_) = find(graph, torch.ops.aten.mm.default)
        with graph.graph.inserting_after(product):
            graph.graph.call_function(torch.ops.aten.sin.default, (product,))
        self.ran.append(self.name)
        return Notes()


@pytest.mark.parametrize(
    "pipelines",
    [
        loop_passes(Config()),
        step_passes(Config(), 4, 1.0),
        step_passes(Config.from_options({"memory": "l2l"}), 4, 1.0),
    ],
)
def test_the_order_of_the_package_holds(pipelines: Pipelines) -> None:
    """What lowering needs, scheduling provides, but for what is said where a graph is cut."""
    facts = check_contracts(pipelines.scheduling)
    assert facts >= {Fact.STAMPED, Fact.GATHERED, Fact.REDUCED, Fact.BUCKETED, Fact.SCHEDULED}
    said = {Fact.CUT} if ReleaseSaved() in pipelines.lowering else {Fact.CUT, Fact.RELEASED}
    assert Fact.LOWERED in check_contracts(pipelines.lowering, facts | said)


def test_every_pass_has_one_place() -> None:
    """Each is in the order once, and options of the configuration belong to one."""
    order = [*SCHEDULING, *LOWERING]
    assert len(set(order)) == len(order)
    more = {"offload_activations": {"share": 1.0}, "tile_linear": {"max_bytes": 1}}
    more |= {"slab": {"enabled": True}}
    everything = Config.from_options({"memory": "infinity", **more})
    doors = [loop_passes(Config()), step_passes(everything), step_passes(Config(), pipelined=True)]
    run = {type(one) for door in doors for one in (*door.scheduling, *door.lowering)}
    assert run == set(order)
    options = {f.name for f in fields(Config) if isinstance(getattr(Config(), f.name), Pass)}
    assert options <= {kind.name for kind in order}


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            [ShardParams(), StampNodes()],
            "pass 'shard_params' requires a graph that is stamped: run it after stamp",
        ),
        (
            [StampNodes(), Prefetch(), Bucket()],
            "pass 'prefetch' requires a graph that is bucketed: run it after bucket",
        ),
        (
            [StampNodes(), Bucket()],
            "pass 'bucket' requires a graph that is expanded, gathered, reduced: nothing here does",
        ),
    ],
)
def test_a_wrong_order_names_the_provider(passes: list[Pass], message: str) -> None:
    """And nothing runs: a graph that is half rewritten helps nobody."""
    graph = trace(chain(1))
    before = graph.text()
    with pytest.raises(ContractError) as caught:
        run_passes(passes, graph, Context())
    assert str(caught.value) == message
    assert isinstance(caught.value, PassError)
    assert graph.text() == before


def test_given_facts_count() -> None:
    """A side of the cut is stamped already; nothing else is taken for granted."""
    with pytest.raises(ContractError, match="a graph that is stamped"):
        check_contracts([ShardParams()])
    assert check_contracts([ShardParams()], given={Fact.STAMPED}) == {
        Fact.STAMPED,
        *ShardParams.provides,
    }


def test_records() -> None:
    """A row a pass: its options, its notes, its time, the nodes it left."""
    graph = trace(chain(1))
    seen: list[PassRecord] = []
    passes = up_to("prefetch", Prefetch(distance=2))
    records = run_passes(passes, graph, Context(), keep_text=True, observe=seen.append)
    assert seen == records
    assert [r.name for r in records] == [p.name for p in passes]
    assert records[-1].options == str(Prefetch(distance=2))
    assert all(r.time_ms > 0 for r in records)
    assert records[-1].nodes_after == len(graph.graph.nodes)
    for earlier, later in pairwise(records):
        assert earlier.after == later.before
        assert earlier.nodes_after == later.nodes_before
    sharded = next(record for record in records if record.name == "shard_params")
    assert sharded.nodes_before != sharded.nodes_after
    assert str(sharded.notes) == "params=1, gathers=2"


def test_diffs() -> None:
    """Only what changed, and what it changed into."""
    record = run_passes(up_to("shard_params"), trace(chain(1)), Context(), keep_text=True)[-1]
    lines = record.diff().splitlines()
    assert lines[:2] == ["--- before shard_params", "+++ after shard_params"]
    assert any(line.startswith("-unshard: ") for line in lines)
    assert any(line.startswith("+layers_0_weight: ") for line in lines)


def test_texts_are_kept_on_request_only() -> None:
    """They take longer to print than a pass takes to run."""
    record = run_passes([StampNodes()], trace(chain(1)), Context())[0]
    assert (record.before, record.after, record.diff()) == ("", "", "")


def test_every_pass_is_verified() -> None:
    """The pass that broke a rule is the one that is named, and none runs after it."""
    graph = trace(chain(1))
    seen: list[PassRecord] = []
    passes = [StampNodes(), Breaking(), ShardParams()]
    with pytest.raises(VerificationError, match=r"after pass 'breaking': node sin.* has no stamp"):
        run_passes(passes, graph, Context(), observe=seen.append)
    assert [r.name for r in seen] == ["stamp"]


def test_notes() -> None:
    """A mapping that prints; an empty one says so."""
    assert dict(Notes(moved=3)) == {"moved": 3}
    assert str(Notes(moved=3, freed="1 MiB")) == "moved=3, freed=1 MiB"
    assert str(Notes()) == "nothing to do"


def test_new_nodes_say_who_made_them() -> None:
    """Provenance of everything that was not captured."""
    graph = trace(chain(2))
    old = {n.name for n in graph.graph.nodes}
    run_passes(up_to("prefetch"), graph, Context())
    made_by = {stamp_of(n).made_by for n in graph.graph.nodes if n.name not in old}
    assert made_by <= {"recompute", "shard_params", "shard_grads", "bucket"}
    assert Stamp.__dataclass_fields__["made_by"].default == "capture"
