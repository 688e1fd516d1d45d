# ruff: noqa: E501
"""What backward repeats instead of reading it from forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxzero.errors import ConfigError
from fxzero.graph import Phase, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_random
from fxzero.graph.stamps import stamp_of
from fxzero.passes import Recompute
from fxzero.passes.recompute import Policy
from tests.tracing import find, of, record_of, scheduled, sides, texts, words

_aten = torch.ops.aten


class Gelu(nn.Module):
    """Backward wants gelu(x) for the weight's gradient, and x for gelu's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.down(F.gelu(self.up(x))).sum()


class Checkpointed(nn.Module):
    """The same, with everything between input and output to be repeated, dropout included."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = Gelu()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return checkpoint(self.block, x, use_reentrant=False).sum()

    def block(self, x: Tensor) -> Tensor:
        """What is checkpointed."""
        x = F.dropout(x.sin(), self.dropout) if self.dropout else x.sin()
        return self.inner(x) * x.exp()


gelu = of(Gelu, 4, 8)
checkpointed = of(Checkpointed, 4, 8)
with_dropout = of(lambda: Checkpointed(0.5), 4, 8)


def repeated(graph: StepGraph) -> dict[str, str]:
    """Repeated nodes, and what they repeat."""
    return {n.name: stamp_of(n).again for n in graph.nodes() if stamp_of(n).again}


@texts
def test_before_and_after() -> None:
    """gelu is repeated; its input, a matrix product, is saved."""
    record = record_of(gelu, "recompute", zero=0)
    assert_expected_inline(
        words(record.before),
        """\
primals_1: f32[8, 8] = input
primals_2: f32[4, 8] = input
primals_3: f32[8, 8] = input
tangents_1: f32[] = input
unshard: f32[8, 8] = fxzero.unshard(primals_1, N/up.weight, reduce)  # forward compute unshard up
t: f32[8, 8] = aten.t(unshard)  # forward compute compute up
mm: f32[4, 8] = aten.mm(primals_2, t)  # forward compute compute up
gelu: f32[4, 8] = aten.gelu(mm)  # forward compute compute up
unshard_1: f32[8, 8] = fxzero.unshard(primals_3, N/down.weight, reduce)  # forward compute unshard down
t_1: f32[8, 8] = aten.t(unshard_1)  # forward compute compute down
mm_1: f32[4, 8] = aten.mm(gelu, t_1)  # forward compute compute down
sum_1: f32[] = aten.sum(mm_1)  # forward compute compute down
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute down
clone: f32[4, 8] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute down
t_2: f32[8, 4] = aten.t(clone)  # backward compute compute down
mm_2: f32[8, 8] = aten.mm(t_2, gelu)  # backward compute compute down
t_3: f32[8, 8] = aten.t(mm_2)  # backward compute compute down
t_4: f32[8, 8] = aten.t(t_1)  # backward compute compute down
mm_3: f32[4, 8] = aten.mm(clone, t_4)  # backward compute compute down
t_5: f32[8, 8] = aten.t(t_3)  # backward compute compute down
reshard_grad: f32[8, 8] = fxzero.reshard_grad(t_5, N/down.weight, reduce)  # backward compute reshard down
gelu_backward: f32[4, 8] = aten.gelu_backward(mm_3, mm)  # backward compute compute up
t_6: f32[8, 4] = aten.t(gelu_backward)  # backward compute compute up
mm_4: f32[8, 8] = aten.mm(t_6, primals_2)  # backward compute compute up
t_7: f32[8, 8] = aten.t(mm_4)  # backward compute compute up
t_8: f32[8, 8] = aten.t(t)  # backward compute compute up
mm_5: f32[4, 8] = aten.mm(gelu_backward, t_8)  # backward compute compute up
t_9: f32[8, 8] = aten.t(t_7)  # backward compute compute up
reshard_grad_1: f32[8, 8] = fxzero.reshard_grad(t_9, N/up.weight, reduce)  # backward compute reshard up
return [sum_1, reshard_grad_1, mm_5, reshard_grad]""",
    )
    assert_expected_inline(
        words(record.diff()),
        """\
--- before recompute
+++ after recompute
@@ -14,7 +14,9 @@
 clone: f32[4, 8] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute down
 t_2: f32[8, 4] = aten.t(clone)  # backward compute compute down
-mm_2: f32[8, 8] = aten.mm(t_2, gelu)  # backward compute compute down
+gelu_1: f32[4, 8] = aten.gelu(mm)  # backward compute compute up
+mm_2: f32[8, 8] = aten.mm(t_2, gelu_1)  # backward compute compute down
 t_3: f32[8, 8] = aten.t(mm_2)  # backward compute compute down
-t_4: f32[8, 8] = aten.t(t_1)  # backward compute compute down
+t_10: f32[8, 8] = aten.t(unshard_1)  # backward compute compute down
+t_4: f32[8, 8] = aten.t(t_10)  # backward compute compute down
 mm_3: f32[4, 8] = aten.mm(clone, t_4)  # backward compute compute down
 t_5: f32[8, 8] = aten.t(t_3)  # backward compute compute down
@@ -24,5 +26,6 @@
 mm_4: f32[8, 8] = aten.mm(t_6, primals_2)  # backward compute compute up
 t_7: f32[8, 8] = aten.t(mm_4)  # backward compute compute up
-t_8: f32[8, 8] = aten.t(t)  # backward compute compute up
+t_11: f32[8, 8] = aten.t(unshard)  # backward compute compute up
+t_8: f32[8, 8] = aten.t(t_11)  # backward compute compute up
 mm_5: f32[4, 8] = aten.mm(gelu_backward, t_8)  # backward compute compute up
 t_9: f32[8, 8] = aten.t(t_7)  # backward compute compute up""",
    )


def test_nothing_crosses_that_is_cheap() -> None:
    """Forward saves the product and not its gelu."""
    crossing = {n.target for n in sides(gelu, zero=0).saved if n.op == "call_function"}
    assert _aten.mm.default in crossing
    assert _aten.gelu.default not in crossing
    kept = sides(gelu, Recompute(max_nodes=0), zero=0).saved
    assert _aten.gelu.default in {n.target for n in kept}


@pytest.mark.parametrize("max_nodes", [0, 16])
def test_checkpoint_is_obeyed(max_nodes: int) -> None:
    """Everything inside is repeated, matrix products too, and nothing of it is saved."""
    cut = sides(checkpointed, Recompute(max_nodes), zero=0)
    assert {n.op for n in cut.saved} == {"placeholder"}
    assert len(find(cut.forward, _aten.mm.default)) == 2
    again = [n for n in find(cut.backward, _aten.mm.default) if stamp_of(n).again]
    # The second product is not needed: the graph reads its inputs only, but exp multiplies it.
    assert [stamp_of(n).again for n in again] == ["mm", "mm_1"]


def test_random_nodes_are_saved() -> None:
    """The dropout mask of a checkpointed block crosses; drawing it again would be another."""
    graph = scheduled(with_dropout, "recompute", zero=0)
    random = [n for n in graph.nodes() if is_random(n)]
    assert random
    assert all(stamp_of(n).phase is Phase.FORWARD for n in random)
    assert repeated(graph)
    saved = sides(with_dropout, zero=0).saved
    assert any(is_random(n) or any(is_random(s) for s in n.all_input_nodes) for n in saved)


def test_a_copy_reads_copies() -> None:
    """A repeated node reads repeated nodes, so forward keeps none of the chain alive."""
    graph = scheduled(checkpointed, "recompute", zero=0)
    copies = repeated(graph)
    originals = set(copies.values())
    backward = list(graph.nodes(phase=Phase.BACKWARD))
    assert originals
    assert backward
    for node in backward:
        assert originals.isdisjoint(source.name for source in node.all_input_nodes)


def test_notes() -> None:
    """What was repeated for whom, in numbers."""
    notes: Any = record_of(checkpointed, "recompute", Recompute(max_nodes=0), zero=0).notes
    assert notes["for_checkpoint"] >= 4
    assert notes["repeated"] >= notes["for_checkpoint"]
    assert notes["unsaved_bytes"] > 0
    nothing: Any = record_of(gelu, "recompute", Recompute(max_nodes=0), zero=0).notes
    assert nothing["for_checkpoint"] == 0


class Attention(nn.Module):
    """Checkpointed attention: an operator that torch tags as random, and that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, T, 8) → scalar."""
        return checkpoint(self.block, x, use_reentrant=False).sum()

    def block(self, x: Tensor) -> Tensor:
        """What is checkpointed."""
        x = self.layer(x)
        return F.scaled_dot_product_attention(x, x, x)


def test_checkpointed_attention_can_be_cut() -> None:
    """What is not repeated is saved part by part: a list cannot cross."""
    saved = sides(of(Attention, 2, 2, 4, 8), zero=0).saved
    assert saved
    assert all(isinstance(n.meta["val"], Tensor) for n in saved)


class ChangesBuffer(nn.Module):
    """Backward needs what the buffer was before the forward changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        y = self.layer(x + self.shift)
        self.shift.mul_(3)
        return y.sum()


def test_what_reads_a_changed_input_is_saved() -> None:
    """It is cheap, and repeated later it would be another value."""
    graph = scheduled(of(ChangesBuffer, 4, 8), "recompute", zero=0)
    (shift,) = graph.mutated
    assert all(stamp_of(user).phase is Phase.FORWARD for user in shift.users)


class ChangesWhatAViewShows(nn.Module):
    """The same, read through a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.rand(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(4, 8) → scalar."""
        y = self.layer(x + self.shift.t() * 2)
        self.shift.mul_(3)
        return y.sum()


def test_what_reads_a_view_of_a_changed_input_is_saved() -> None:
    """By hand, too: everything is repeated but that."""
    by_hand = Recompute(repeat=("*",))
    graph = scheduled(of(ChangesWhatAViewShows, 4, 8), "recompute", by_hand, zero=0)
    (shift,) = graph.mutated
    readers = [user for view in shift.users for user in view.users if is_view(view)]
    assert readers
    assert all(stamp_of(user).phase is Phase.FORWARD for user in readers)
    assert all(stamp_of(user).phase is Phase.FORWARD for user in shift.users)


class ReadsConstant(nn.Module):
    """Backward needs what is computed from a number that stands in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.layer(x + torch.tensor([1.0, 2.0] * 4) * 2).sum()


def test_what_is_repeated_may_read_a_constant() -> None:
    """Which is on both sides of the cut then."""
    both = sides(of(ReadsConstant, 4, 8), Recompute(repeat=("*",)), zero=0)
    for side in (both.forward, both.backward):
        assert side.graph.find_nodes(op="get_attr")
    assert not any(n.op == "get_attr" for n in both.saved)


class Blocks(nn.Module):
    """Three blocks between an entry and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().sum()


blocks = of(Blocks, 4, 8)


def products_again(recompute: Recompute) -> list[str]:
    """The layers whose matrix products backward repeats."""
    graph = scheduled(blocks, "recompute", recompute, zero=0)
    products = (_aten.mm.default, _aten.addmm.default)
    return [
        stamp_of(n).layer
        for n in graph.nodes(phase=Phase.BACKWARD)
        if n.target in products and stamp_of(n).again
    ]


def test_every_block() -> None:
    """Its input crosses, its first product is repeated; entry and head are as they were."""
    assert products_again(Recompute()) == []
    assert set(products_again(Recompute(policy=Policy.FULL))) == {f"blocks.{i}" for i in range(3)}
    saved = sides(blocks, Recompute(policy=Policy.FULL), zero=0).saved
    assert not [n for n in saved if n.meta["val"].shape == (4, 32)]
    assert len([n for n in saved if n.meta["val"].shape == (4, 8)]) >= 3


@pytest.mark.parametrize("name", ["blocks.1", "blocks.1.*", "blocks.[1]"])
def test_modules_to_repeat(name: str) -> None:
    """By a pattern of their names, with what is in them."""
    assert set(products_again(Recompute(repeat=(name,)))) == {"blocks.1"}


@pytest.mark.parametrize("name", ["aten.addmm", "addmm", "aten.addmm.default"])
def test_operators_to_repeat(name: str) -> None:
    """Wherever what they compute is needed: tanh's backward reads tanh alone, unless that is repeated
    too."""
    blocks = {f"blocks.{i}" for i in range(3)}
    assert not blocks & set(products_again(Recompute(repeat=(name,))))
    assert blocks <= set(products_again(Recompute(repeat=(name, "tanh"))))


def test_what_is_saved_by_name_is_not_repeated() -> None:
    """Whatever asks for it."""
    full = Recompute(policy=Policy.FULL, save=("blocks.1",))
    assert set(products_again(full)) == {"blocks.0", "blocks.2"}
    both = Recompute(repeat=("addmm", "tanh"), save=("blocks.*",))
    assert not set(products_again(both)) & {f"blocks.{i}" for i in range(3)}
    kept = sides(blocks, Recompute(save=("tanh",)), zero=0).saved
    assert _aten.tanh.default in {n.target for n in kept}


@pytest.mark.parametrize("what", ["save", "repeat"])
def test_names_of_nothing(what: str) -> None:
    """A typing error would otherwise train with another memory than was asked for."""
    with pytest.raises(ConfigError, match=rf"recompute\.{what}: nothing .* 'blocks\.9'.*named_mod"):
        products_again(Recompute(**{what: ("blocks.9",)}))  # type: ignore[arg-type]


class CheckpointedBlocks(Blocks):
    """Each block by itself, as `gradient_checkpointing_enable` does it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: x + block(x), x, use_reentrant=False)
        return self.head(x).square().sum()


class NormedBlocks(CheckpointedBlocks):
    """What a block hands on is a norm's, one part of what its operator returns."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(
                lambda x, block=block: F.layer_norm(x + block(x), (8,)), x, use_reentrant=False
            )
        return self.head(x).square().sum()


@pytest.mark.parametrize("model", [CheckpointedBlocks, NormedBlocks])
def test_checkpoints_one_behind_the_other(model: type[nn.Module]) -> None:
    """Each keeps its input: backward repeats one at a time, not all of them from the first one's."""
    cut = sides(of(model, 4, 8), Recompute(max_nodes=0), zero=0)
    inputs = [n for n in cut.saved if n.op == "call_function" and n.meta["val"].shape == (4, 8)]
    assert len(inputs) >= 3
    assert not [n for n in cut.saved if n.meta["val"].shape == (4, 32)]
    again = [n for n in cut.backward.nodes() if stamp_of(n).again]
    for node in again:
        layers = {stamp_of(s).layer for s in node.all_input_nodes if s in again}
        assert layers <= {stamp_of(node).layer}


class Dropped(nn.Module):
    """Attention of the kind that returns several tensors, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, T, 8) → scalar."""
        for layer in self.inner:
            y = layer(x)
            x = x + F.dropout(F.scaled_dot_product_attention(y, y, y), 0.3)
        return x.square().sum()


def test_nothing_random_is_repeated_by_policy() -> None:
    """Not by any; and no list of tensors crosses, whose parts do."""
    for recompute in (
        Recompute(policy=Policy.FULL),
        Recompute(repeat=("inner.*", "mul")),
    ):
        build = of(Dropped, 2, 2, 4, 8)
        graph = scheduled(build, "recompute", recompute, zero=0)
        assert not [n for n in graph.nodes() if stamp_of(n).again and is_random(n)]
        assert repeated(graph)
        saved = sides(build, recompute, zero=0).saved
        assert all(isinstance(n.meta["val"], Tensor) for n in saved)
