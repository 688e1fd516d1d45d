"""What differs between two checkpoints is named, with how much; what does not is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxzero
from fxzero.checkpoint import folder
from fxzero.checkpoint.comparing import compare, difference
from fxzero.checkpoint.opened import AT_ONCE_BYTES, Opened
from fxzero.errors import CheckpointError
from tests.checkpoint.saved import Run, change_metadata, drop_a_part
from tests.parity.harness import Pools


def opened(run: Run, path: Path, step: int = 1) -> Opened:
    """A run, saved and opened."""
    return Opened(run.save(path, step))


def test_the_same_run_saved_twice(tmp_path: Path) -> None:
    """Under other numbers: nothing differs."""
    run = Run()
    run.train()
    found = compare(opened(run, tmp_path, 1), opened(run, tmp_path, 2))
    assert found.is_equal
    assert found.num_equal == 27
    assert found.skipped == ()


def test_one_element(tmp_path: Path) -> None:
    """Its tensor, how far, and of how large a one."""
    run = Run()
    before = opened(run, tmp_path, 1)
    with torch.no_grad():
        run.model.norm.weight[3] += 0.25  # type: ignore[index, operator, union-attr]
    found = compare(before, opened(run, tmp_path, 2))
    assert not found.is_equal
    (row,) = found.tensors
    assert row.name == "model.norm.weight"
    assert (row.largest, row.relative) == (0.25, 0.2)
    assert (row.num_different, row.num_elements, row.num_non_finite) == (1, 8, 0)
    assert found.values == found.forms == found.only_before == found.only_after == ()
    assert found.num_equal == 11


def test_a_step_of_training(tmp_path: Path) -> None:
    """Values by their paths."""
    run = Run()
    run.train()
    before = opened(run, tmp_path, 1)
    run.train()
    found = compare(before, opened(run, tmp_path, 2))
    changed = {row.path: (row.before, row.after) for row in found.values}
    assert changed["scheduler.last_epoch"] == ("1", "2")
    assert changed["scheduler._last_lr[0]"] == ("0.005", "0.0025")
    assert changed["optimizer.param_groups[0].lr"] == ("0.005", "0.0025")
    assert changed["rng.torch"] == ("tensor uint8 [5056]", "tensor uint8 [5056], others")
    assert set(changed) == {
        "scheduler.last_epoch",
        "scheduler._step_count",
        "scheduler._last_lr[0]",
        "optimizer.param_groups[0].lr",
        "rng.torch",
    }
    names = {row.name for row in found.tensors}
    assert "model.embed.weight" in names
    assert "model.mask" not in names


class Other(nn.Module):
    """A tensor of another shape, one of another dtype, one that the first does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.ones(4))
        self.c = nn.Parameter(torch.ones(4))


class Another(nn.Module):
    """The other side."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, 2))
        self.b = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.d = nn.Parameter(torch.ones(4))


def test_another_model(tmp_path: Path) -> None:
    """Names, shapes, dtypes."""
    found = compare(
        opened(Run(model=Other), tmp_path / "a"), opened(Run(model=Another), tmp_path / "b")
    )
    assert found.only_before == ("model.c",)
    assert found.only_after == ("model.d",)
    assert [(row.name, row.before, row.after) for row in found.forms] == [
        ("model.a", "float32 [4]", "float32 [2, 2]"),
        ("model.b", "float32 [4]", "bfloat16 [4]"),
    ]
    assert found.tensors == ()  # ones are ones in both dtypes
    assert found.num_equal == 0
    (row,) = found.values
    assert row.path == "optimizer.param_groups[0].params[2]"


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], None),
        ([0.0], [-0.0], None),
        ([-4.0, 1.0], [-3.0, 1.0], (1.0, 0.25, 1, 0)),
        ([1.0, NAN], [1.5, 2.0], (0.5, 0.5 / 1.5, 2, 1)),
        ([INF, 1.0], [-INF, 1.0], (0.0, 0.0, 1, 1)),
        ([0.0, 0.0], [0.0, 1e-30], (1e-30, 1.0, 1, 0)),
        ([], [], None),
    ],
)
def test_figures(
    before: list[float], after: list[float], expected: tuple[float, float, int, int] | None
) -> None:
    """Of what is finite, apart from what is not."""
    found = difference("x", *(torch.tensor(v, dtype=torch.float64) for v in (before, after)))
    row = found and (found.largest, found.relative, found.num_different, found.num_non_finite)
    assert row == expected


@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (lambda: torch.tensor([2**60, 1]), lambda t: t + torch.tensor([1, 0])),
        (lambda: torch.tensor([True, False]), lambda t: ~t),
        (lambda: torch.tensor([1 + 2j]), lambda t: t + 1j),
        (lambda: torch.tensor([1.0]).bfloat16(), lambda t: t + 1),
        (
            lambda: torch.tensor([1.0]).to(torch.float8_e4m3fn),
            lambda t: (t.float() + 1).to(t.dtype),
        ),
        (lambda: torch.tensor([1], dtype=torch.uint8), lambda t: t + 255 - 1),
    ],
)
def test_dtypes(make: Callable[[], Tensor], differs: Callable[[Tensor], Tensor]) -> None:
    """Also integers that no floating-point number holds."""
    assert difference("x", make(), make()) is None
    found = difference("x", make(), differs(make()))
    assert found is not None
    assert found.num_different >= 1


def test_slices_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is compared by parts."""
    monkeypatch.setattr("fxzero.checkpoint.comparing._SLICE_ELEMENTS", 16)
    a = torch.randn(50, 7, dtype=torch.float64)
    b = a.clone()
    b[49, 6] += 2
    b[3] += 1
    found = difference("x", a, b)
    assert found is not None
    assert found.largest == pytest.approx(2, rel=1e-12)
    assert found.relative == pytest.approx(2 / float(torch.cat((a, b)).abs().max()), rel=1e-12)
    assert found.num_different == 8


class Sharded(nn.Module):
    """An uneven number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 4)


def save_from_ranks(path: Path, zero: int) -> None:
    """On every rank: the values that one process has, sharded."""
    torch.manual_seed(5)
    model = Sharded()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number)
    model = fxzero.shard(model, zero=zero)
    fxzero.checkpoint.save(fxzero.TrainState(model, rng=False), path, step=1, asynchronous=False)
    folder.unlock(path)
    dist.barrier()


def test_layouts_are_no_difference(ranks: Pools, tmp_path: Path) -> None:
    """One of each stage on two ranks, against one process."""
    for zero in (0, 3):
        ranks(2).run(save_from_ranks, tmp_path / str(zero), zero)
    alone = Sharded()
    with torch.no_grad():
        for number, parameter in enumerate(alone.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number)
    state = fxzero.TrainState(alone, rng=False)
    fxzero.checkpoint.save(state, tmp_path / "1", step=1, asynchronous=False)
    folder.unlock(tmp_path / "1")
    paths = [Opened(tmp_path / name / "step-0000000001") for name in ("0", "1", "3")]
    assert len(paths[2].tensors["model.up.weight"].chunks) == 2
    for before in paths:
        for after in paths:
            found = compare(before, after)
            assert found.is_equal, (before.path, after.path, found)
            assert found.num_equal == 4


def save_generators(path: Path) -> None:
    """Each rank has its own."""
    torch.manual_seed(dist.get_rank())
    fxzero.checkpoint.save(fxzero.TrainState(nn.Linear(2, 2)), path, step=1).wait()
    folder.unlock(path)


def test_values_of_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Each by its rank; a rank that one side does not have."""
    ranks(2).run(save_generators, tmp_path / "two")
    torch.manual_seed(0)
    state = fxzero.TrainState(nn.Linear(2, 2))
    torch.manual_seed(0)
    fxzero.checkpoint.save(state, tmp_path / "one", step=1, asynchronous=False)
    folder.unlock(tmp_path / "one")
    two, one = (Opened(tmp_path / n / "step-0000000001") for n in ("two", "one"))
    assert compare(two, two).values == ()
    paths = {row.path for row in compare(two, one).values}
    assert any("of rank 1" in path for path in paths), paths


def test_others_values_are_not_read(tmp_path: Path) -> None:
    """They are pickles; their tensors are compared."""
    run = Run(model=Other)
    mine = opened(run, tmp_path / "a")
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "b", no_dist=True)
    found = compare(mine, Opened(tmp_path / "b"))
    assert found.is_equal
    assert found.num_equal == 3
    assert found.skipped == (f"values: {tmp_path / 'b'} has them as a pickle, which is not read",)


def test_what_is_not_whole_is_not_compared(tmp_path: Path) -> None:
    """Memory of somebody else would be."""
    run = Run(model=Other)
    path = run.save(tmp_path, 1)
    change_metadata(path, drop_a_part("model.b"))
    with pytest.raises(CheckpointError, match=r"model\.b is not whole: its 0 parts hold 0 of 4"):
        compare(Opened(path), Opened(path))


def test_tensors_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the whole model."""
    run = Run()
    before = opened(run, tmp_path)
    assert AT_ONCE_BYTES == 64 << 20
    monkeypatch.setattr("fxzero.checkpoint.opened.AT_ONCE_BYTES", 200)
    sizes = []
    read = Opened.read

    def noted(self: Opened, names: list[str]) -> dict[str, Tensor]:
        tensors = read(self, names)
        sizes.append((len(names), sum(t.nbytes for t in tensors.values())))
        return tensors

    monkeypatch.setattr(Opened, "read", noted)
    assert compare(before, before).is_equal
    assert all(num_bytes <= 200 or count == 1 for count, num_bytes in sizes)
    assert any(count > 1 for count, _ in sizes)
