"""Runs of compute become regions, compiled once per distinct structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxzero.compiler.compilation import Compilation
from fxzero.graph import Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.structure import structure_key
from fxzero.passes import Context, LowerRegions, ReleaseSaved
from fxzero.passes.lower_regions import RegionBackend
from fxzero.regions.cutout import Cutout, cut_out, move_parts_together, runs
from fxzero.regions.region import RegionCache, Structure
from tests.tracing import observed, of, sides


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → (B, 8)."""
        return x + self.down(self.up(x).tanh())


def tower(depth: int) -> Any:
    """Equal blocks."""
    return of(_TOWERS[depth], 4, 8)


_TOWERS = {
    depth: (lambda depth=depth: nn.Sequential(*(Block() for _ in range(depth)))) for depth in (3, 6)
}


def cutouts(graph: StepGraph) -> list[Cutout]:
    """The regions of a graph, not yet compiled."""
    move_parts_together(graph)
    cuts = enumerate(runs(graph.graph.nodes))
    return [cut_out(graph.pieces, run, f"region_{i}") for i, run in cuts]


def keys(graph: StepGraph) -> list[object]:
    """What tells the structures apart."""
    return [cutout.key for cutout in cutouts(graph)]


def test_a_region_as_text() -> None:
    """A block's forward between its transfers."""
    (first, *_) = cutouts(sides(tower(3), zero=3).forward)
    assert_expected_inline(
        first.module().code.strip(),
        """\
def forward(self, input_0, input_1, input_2, input_3):
    t = torch.ops.aten.t.default(input_0);  input_0 = None
    addmm = torch.ops.aten.addmm.default(input_1, input_2, t);  input_1 = t = None
    tanh = torch.ops.aten.tanh.default(addmm);  addmm = None
    t_1 = torch.ops.aten.t.default(input_3);  input_3 = None
    mm = torch.ops.aten.mm.default(tanh, t_1);  t_1 = None
    add = torch.ops.aten.add.Tensor(input_2, mm);  input_2 = mm = None
    return (tanh, add)""",
    )


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_depth_does_not_change_the_number_of_structures(side: str, zero: int) -> None:
    """Six equal blocks have twice the regions of three, of the same structures."""
    three = keys(getattr(sides(tower(3), zero=zero), side))
    six = keys(getattr(sides(tower(6), zero=zero), side))
    assert len(six) >= len(three) + 3
    assert (len(six) - len(three)) % 3 == 0
    assert set(six) == set(three)
    assert len(set(six)) <= 4


def test_structures_differ_where_shapes_do() -> None:
    """Another batch size is another structure."""
    narrow, wide = (sides(of(_TOWERS[3], rows, 8), zero=3).forward for rows in (4, 6))
    assert set(keys(narrow)).isdisjoint(keys(wide))


def test_structures_differ_where_constants_do() -> None:
    """A number written in the code is part of the structure."""

    def scaled(factor: float) -> object:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4)
        product = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
        return structure_key([x], [product], [product], None)

    assert scaled(2.0) == scaled(2.0)
    assert scaled(2.0) != scaled(3.0)


def test_structures_differ_where_results_do() -> None:
    """What others read of a region is part of the structure."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    one = graph.call_function(torch.ops.aten.sin.default, (x,))
    two = graph.call_function(torch.ops.aten.cos.default, (one,))
    assert structure_key([x], [one, two], [two], None) != structure_key(
        [x], [one, two], [one, two], None
    )


def test_a_cache_hit_compiles_nothing() -> None:
    """A region of another graph with an equal structure gets the same callable."""
    cache = RegionCache()
    (first, *_) = cutouts(sides(tower(3), zero=3).forward)
    (again, *_) = cutouts(sides(tower(6), zero=3).forward)
    known = Structure(run=list, roots=())
    cache.structures[first.key] = known
    assert cache.get(again.key, again.module, None) is known
    assert cache.compilations == 0


def test_runs_end_at_transfers_and_layers() -> None:
    """No region holds two layers, nor anything but compute."""
    for side in ("forward", "backward"):
        graph = getattr(sides(tower(3), zero=3), side)
        move_parts_together(graph)
        found = runs(graph.graph.nodes)
        assert found
        for run in found:
            assert len({stamp_of(n).layer for n in run}) == 1
            assert {stamp_of(n).role for n in run} == {Role.COMPUTE}


def test_eager_lowers_nothing() -> None:
    """The graph stays as it was."""
    graph = sides(tower(3), zero=3).forward
    before = graph.text()
    assert dict(LowerRegions(RegionBackend.EAGER).run(graph, Context())) == {}
    assert graph.text() == before


@pytest.mark.slow
def test_equal_layers_are_compiled_once() -> None:
    """Real Inductor, real numbers: what six blocks need was compiled for three."""
    notes: list[Any] = []
    for depth in (3, 6):
        compilations: list[Compilation] = []
        model, inputs = tower(depth)()
        torch._dynamo.reset()
        with observed(compilations.append):
            compiled = torch.compile(model, backend="fxzero")
            actual = compiled(*inputs)
            actual.sum().backward()
        torch.testing.assert_close(actual, model(*inputs))
        records = [r for c in compilations for r in c.records if r.name == "lower_regions"]
        notes.append(
            {key: sum(int(str(r.notes[key])) for r in records) for key in records[0].notes}
        )
    three, six = notes
    assert 0 < three["compiled"] < three["regions"]
    assert six["regions"] >= three["regions"] + 3
    assert six["compiled"] == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_random_numbers_are_those_of_an_eager_run() -> None:
    """Dropout stays out of regions, so that a seed means the same thing with and without them."""
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.1))
    model = torch.compile(plain, backend="fxzero")
    x = torch.randn(64, 8)
    gradients, after = [], []
    for module in (plain, model):
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(module(x).square().sum(), [plain[0].weight])
        gradients.append(gradient)
        after.append(torch.rand(1))
    assert torch.equal(*after)
    error = (gradients[0] - gradients[1]).abs().max()
    assert error <= 1e-5 * gradients[0].abs().max()


def run_of(*outputs: Tensor) -> Any:
    """A compiled region that returns these tensors."""
    return lambda inputs: list(outputs)


def test_outputs_that_alias_unexpectedly_are_copied() -> None:
    """Two outputs in one storage, where the graph says two: freeing one would free both."""
    base = torch.arange(8.0)
    structure = Structure(run_of(base[:4], base[4:]), roots=(5, 6))
    for _ in range(2):  # the first call finds out, later ones know
        first, second = structure([])
        assert first.data_ptr() == base.data_ptr()
        assert second.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        assert torch.equal(second, base[4:])
    assert structure.copied == {1}


def test_expected_aliases_are_kept() -> None:
    """A view of an output, or of an input, costs no copy."""
    x = torch.arange(8.0)
    made = x + 1
    structure = Structure(run_of(made, made[:2], x[:2]), roots=(3, 3, -1))
    outputs = structure([x])
    assert structure.copied == frozenset()
    assert [o.data_ptr() for o in outputs] == [made.data_ptr(), made.data_ptr(), x.data_ptr()]


def test_an_output_inside_an_input_is_copied() -> None:
    """Unless the graph says so."""
    x = torch.arange(8.0)
    structure = Structure(run_of(x[:2]), roots=(4,))
    (output,) = structure([x])
    assert output.data_ptr() != x.data_ptr()
    assert torch.equal(output, x[:2])


def test_inputs_may_alias_each_other() -> None:
    """Any of them is as good an owner as the expected one."""
    x = torch.arange(8.0)
    structure = Structure(run_of(x[:2]), roots=(-2,))
    (output,) = structure([x, x])
    assert output.data_ptr() == x.data_ptr()


def test_empty_outputs_own_nothing() -> None:
    """All empty storages have one address."""
    structure = Structure(run_of(torch.empty(0), torch.empty(0)), roots=(1, 2))
    structure([])
    assert structure.copied == frozenset()


def test_the_pass_needs_released_graphs() -> None:
    """Regions are cut around releases, so those come first."""
    assert ReleaseSaved.provides <= LowerRegions.requires
