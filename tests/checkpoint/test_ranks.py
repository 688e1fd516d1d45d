"""Checkpoints of two ranks: what each has of its own, other layouts, and errors of one of them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fxzero
from fxzero.checkpoint import saving
from fxzero.checkpoint.blocks import CheckedFile
from fxzero.checkpoint.folder import read_manifest
from fxzero.checkpoint.manifest import file_of_rank
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import Counting, bits, hidden, visible
from tests.parity.harness import Pools
from tests.parity.training import full_optimizer_state, full_parameters
from tests.tiers import exhaustive

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "rate in a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
}
ALONE: dict[str, Make] = {
    **OPTIMIZERS,
    "adafactor": lambda p: torch.optim.Adafactor([q for q in p if q.numel()], 0.1),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, line_search_fn="strong_wolfe"),
}
if not hasattr(torch.optim, "Muon"):
    del ALONE["muon"]


class Odd(nn.Module):
    """Sizes that two ranks cannot halve: 0-dim, one row, no rows, odd, frozen, a buffer."""

    def __init__(self, seed: int = 0, scale: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(scale))
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        self.seen += 1
        return self.frozen(self.layers(x)) * self.scale + self.one + self.none.sum()


def step_once(model: nn.Module, optimizer: Optimizer) -> None:
    """On one batch, whatever the optimizer asks for."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """All but the frozen ones."""
    return [p for p in model.parameters() if p.requires_grad]


def in_full(model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Everything, as bits, whatever the layout."""
    found = dict(full_parameters(model))
    if optimizer is not None:
        found.update(full_optimizer_state(model, optimizer))
    return bits(dict(sorted(found.items())))


# -- optimizers


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("begun", [False, True])
def test_every_optimizer_goes_on(tmp_path: Path, name: str, begun: bool) -> None:
    """In one process: what was trained from the checkpoint is what would have been."""
    model = Odd()
    optimizer = ALONE[name](trainable(model))
    for _ in range(2 * begun):
        step_once(model, optimizer)
    fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), tmp_path, step=2).wait()
    step_once(model, optimizer)
    other = Odd(1)
    theirs = ALONE[name](trainable(other))
    step_once(other, theirs)
    fxzero.checkpoint.load(fxzero.TrainState(other, theirs), tmp_path)
    assert len(theirs.state) == (0 if not begun and name != "adagrad" else len(theirs.state))
    step_once(other, theirs)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(theirs.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("begun", [False, True])
def test_every_optimizer_goes_on_over_shards(
    ranks: Pools, tmp_path: Path, name: str, begun: bool
) -> None:
    """ZeRO 3 on two ranks; a fresh optimizer takes it as well as one that has trained."""
    ranks(2, timeout_s=120).run(go_on, tmp_path, name, begun, (1,))


def test_a_parameter_without_dims_goes_on_over_shards(ranks: Pools, tmp_path: Path) -> None:
    """Its state has several tensors of its shape, of which one counts steps."""
    ranks(2, timeout_s=120).run(go_on, tmp_path, "adamw", True, ())


def go_on(folder: Path, name: str, begun: bool, scale: tuple[int, ...]) -> None:
    """Job."""
    model = fxzero.shard(Odd(0, scale), zero=3)
    optimizer = OPTIMIZERS[name](trainable(model))
    for _ in range(2 * begun):
        step_once(model, optimizer)
    fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), folder, step=2).wait()
    step_once(model, optimizer)
    for has_trained in (False, True):
        other = fxzero.shard(Odd(1, scale), zero=3)
        theirs = OPTIMIZERS[name](trainable(other))
        if has_trained:
            step_once(other, theirs)
        fxzero.checkpoint.load(fxzero.TrainState(other, theirs), folder)
        step_once(other, theirs)
        assert bits(other.state_dict()) == bits(model.state_dict())
        assert bits(theirs.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_that_does_not_lie_as_its_parameter(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    """Adafactor's rows and columns: where the optimizer has made its state, it says how it lies."""
    ranks(2, timeout_s=120).run(factored, tmp_path, zero)


def factored(folder: Path, zero: int) -> None:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(4, 4), zero=zero)
    optimizer = torch.optim.Adafactor(model.parameters(), 0.1)
    step_once(model, optimizer)
    state = fxzero.TrainState(model, optimizer)
    fxzero.checkpoint.save(state, folder, step=1).wait()
    expected = bits(optimizer.state_dict())
    step_once(model, optimizer)
    fxzero.checkpoint.load(state, folder)
    assert bits(optimizer.state_dict()) == expected
    torch.manual_seed(1)  # a process that was started again: its optimizer has no state yet
    other = fxzero.shard(nn.Linear(4, 4), zero=zero)
    theirs = torch.optim.Adafactor(other.parameters(), 0.1)
    fxzero.checkpoint.load(fxzero.TrainState(other, theirs), folder)
    assert bits(theirs.state_dict()) == expected
    for _ in range(2):
        step_once(model, optimizer)
        step_once(other, theirs)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(theirs.state_dict()) == bits(optimizer.state_dict())


# -- layouts


def save_odd(folder: Path, zero: int, mesh: tuple[int, ...]) -> Any:
    """Job: a run of two steps; all of it in full."""
    on = init_device_mesh("cpu", mesh) if mesh else None
    model = fxzero.shard(Odd(), zero=zero, mesh=on)
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    for _ in range(2):
        step_once(model, optimizer)
    fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), folder, step=2).wait()
    return in_full(model, optimizer)


def load_odd(folder: Path, zero: int, mesh: tuple[int, ...]) -> Any:
    """Job: all of what was loaded, in full."""
    on = init_device_mesh("cpu", mesh) if mesh else None
    model = fxzero.shard(Odd(3), zero=zero, mesh=on)
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    fxzero.checkpoint.load(fxzero.TrainState(model, optimizer, rng=False), folder)
    return in_full(model, optimizer)


def load_plain(folder: Path) -> Any:
    """In a process of its own, into an ordinary model."""
    model = Odd(3)
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    fxzero.checkpoint.load(fxzero.TrainState(model, optimizer), folder)
    return in_full(model, optimizer)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(), (2, 1), (1, 2)])
def test_from_any_layout_to_flat_shards_and_to_a_plain_model(
    ranks: Pools, tmp_path: Path, zero: int, mesh: tuple[int, ...]
) -> None:
    """Every tensor to the bit."""
    pool = ranks(2, timeout_s=120)
    expected = pool.run(save_odd, tmp_path, zero, mesh)[0]
    assert load_plain(tmp_path) == expected
    assert pool.run(load_odd, tmp_path, 3, ()) == [expected] * 2
    if zero == 3:
        assert pool.run(load_odd, tmp_path, 3, (2, 1)) == [expected] * 2
        assert pool.run(load_odd, tmp_path, 0, ()) == [expected] * 2


@pytest.mark.parametrize(("world", "zero"), exhaustive((4, 1), (4, 3)))
def test_from_two_axes_to_flat_shards(ranks: Pools, tmp_path: Path, world: int, zero: int) -> None:
    """HSDP: each shard is on two ranks, and written once."""
    expected = ranks(world).run(save_odd, tmp_path / "a", zero, (2, 2))[0]
    assert ranks(world).run(load_odd, tmp_path / "a", 3, ()) == [expected] * 4
    assert ranks(world).run(save_odd, tmp_path / "b", 3, ())[0] == expected
    assert ranks(world).run(load_odd, tmp_path / "b", zero, (2, 2)) == [expected] * 4
    assert load_plain(tmp_path / "a") == expected


def test_from_a_plain_model_to_shards(ranks: Pools, tmp_path: Path) -> None:
    """Of every stage."""
    model = Odd()
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    step_once(model, optimizer)
    fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), tmp_path, step=1).wait()
    expected = in_full(model, optimizer)
    for zero in (0, 2, 3):
        assert ranks(2, timeout_s=120).run(load_odd, tmp_path, zero, ()) == [expected] * 2


def test_shards_in_fewer_bits(ranks: Pools, tmp_path: Path) -> None:
    """Rounded once; back into more bits they are what they were."""
    ranks(2, timeout_s=120).run(into_fewer_bits, tmp_path)


def into_fewer_bits(folder: Path) -> None:
    """Job."""
    model = fxzero.shard(Odd(), zero=3)
    fxzero.checkpoint.save(fxzero.TrainState(model), folder / "a", step=1).wait()
    narrow = fxzero.shard(Odd(1).bfloat16(), zero=3)
    fxzero.checkpoint.load(fxzero.TrainState(narrow), folder / "a")
    wanted = {n: t.bfloat16() for n, t in full_parameters(model).items() if t is not None}
    assert bits(full_parameters(narrow)) == bits(wanted)
    fxzero.checkpoint.save(fxzero.TrainState(narrow), folder / "b", step=1).wait()
    wide = fxzero.shard(Odd(2), zero=3)
    fxzero.checkpoint.load(fxzero.TrainState(wide), folder / "b")
    assert bits(full_parameters(wide)) == bits({n: t.float() for n, t in wanted.items()})


# -- what each rank has of its own


def test_generators_of_ranks_that_did_not_exist_stay(ranks: Pools, tmp_path: Path) -> None:
    """Else all ranks would drop out alike."""
    fxzero.checkpoint.save(fxzero.TrainState(Odd()), tmp_path, step=1).wait()
    ranks(2, timeout_s=120).run(generators_after_one_rank, tmp_path)


def generators_after_one_rank(folder: Path) -> None:
    """Job."""
    state = fxzero.TrainState(fxzero.shard(Odd(), zero=3))
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    loaded = fxzero.checkpoint.load(state, folder)
    assert loaded is not None
    if dist.get_rank() == 1:
        assert torch.equal(torch.get_rng_state(), before)
        assert any(text.startswith("rng") for text in loaded.left)
    else:
        assert not torch.equal(torch.get_rng_state(), before)


def test_each_rank_gets_back_its_own(ranks: Pools, tmp_path: Path) -> None:
    """Generators, positions, ignored parameters and their optimizer states, running means."""
    ranks(2, timeout_s=120).run(own_of_each, tmp_path)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(CheckpointError, match=r"2\.bias is no shard.*2 ranks"):
        fxzero.checkpoint.load(fxzero.TrainState(plain, rng=False), tmp_path)
    loader = fxzero.TrainState(plain, rng=False, loader=Counting())
    with pytest.raises(CheckpointError, match=r"loader was another on each of 2 ranks"):
        fxzero.checkpoint.load(loader, tmp_path)


def own_of_each(folder: Path) -> None:
    """Job."""
    rank = dist.get_rank()

    def make() -> tuple[nn.Module, Optimizer, Counting]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        fxzero.shard(model, zero=3, ignored=[model[2].bias])
        return model, torch.optim.AdamW(model.parameters(), 0.1), Counting(10 * rank)

    model, optimizer, loader = make()
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.randn(6, 4) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = fxzero.TrainState(model, optimizer, loader=loader)
    biases: list[Any] = [None, None]
    dist.all_gather_object(biases, model[2].bias.detach())
    assert not torch.equal(*biases), "the premise"
    expected = bits([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    fxzero.checkpoint.save(state, folder, step=2)
    torch.rand(3)
    other, theirs, position = make()
    position.position = 77
    loaded = fxzero.checkpoint.load(fxzero.TrainState(other, theirs, loader=position), folder)
    assert loaded is not None
    assert loaded.left == ()
    assert bits([other.state_dict(), theirs.state_dict(), torch.get_rng_state()]) == expected
    assert position.position == 10 * rank


# -- errors of one rank


class Broken(Counting):
    """Whose state cannot be said, or not be taken."""

    def __init__(self, says: Any = 0, takes: bool = True) -> None:
        super().__init__(says)
        self.takes = takes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Or not."""
        if not self.takes:
            raise KeyError("epoch")
        super().load_state_dict(state)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_one_rank_cannot_write_is_an_error_on_all(
    ranks: Pools, tmp_path: Path, asynchronous: bool
) -> None:
    """Which names the rank; nothing is visible, and the next one works."""
    ranks(2, timeout_s=60).run(one_cannot_write, tmp_path, asynchronous)


def one_cannot_write(folder: Path, asynchronous: bool) -> None:
    """Job."""
    model = fxzero.shard(Odd(), zero=3)
    bad = fxzero.TrainState(model, loader=Broken(print if dist.get_rank() == 1 else 1))
    with pytest.raises(CheckpointError) as caught:
        fxzero.checkpoint.save(bad, folder, step=1, asynchronous=asynchronous).wait()
    assert "loader['position']" in str(caught.value)
    assert dist.get_rank() == 1 or "rank 1" in str(caught.value)
    saving._running.clear()
    dist.barrier()
    assert visible(folder) == hidden(folder) == []
    dist.barrier()
    good = fxzero.TrainState(model, loader=Broken(1))
    fxzero.checkpoint.save(good, folder, step=1, asynchronous=asynchronous).wait()
    assert visible(folder) == ["step-0000000001"]


def test_an_error_that_was_waited_for_is_not_met_again(ranks: Pools, tmp_path: Path) -> None:
    """The next save is another one."""
    ranks(2, timeout_s=60).run(waited_for, tmp_path)


def waited_for(folder: Path) -> None:
    """Job."""
    model = fxzero.shard(Odd(), zero=3)
    bad = fxzero.TrainState(model, loader=Broken(print))
    with pytest.raises(CheckpointError):
        fxzero.checkpoint.save(bad, folder, step=1).wait()
    try:
        fxzero.checkpoint.save(fxzero.TrainState(model), folder, step=2).wait()
    finally:
        saving._running.clear()
    assert visible(folder) == ["step-0000000002"]


def test_a_byte_that_one_rank_meets_ends_in_the_older_one_on_all(
    ranks: Pools, tmp_path: Path
) -> None:
    """Each reads its own part alone."""
    ranks(2, timeout_s=60).run(one_meets_a_byte, tmp_path)


def one_meets_a_byte(folder: Path) -> None:
    """Job."""
    model = fxzero.shard(nn.Linear(64, 64, bias=False), zero=3)
    state = fxzero.TrainState(model, rng=False)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        fxzero.checkpoint.save(state, folder, step=step).wait()
    dist.barrier()
    file = folder / "step-0000000002" / "__1_0.distcp"
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    loaded = fxzero.checkpoint.load(state, folder)
    assert loaded is not None
    assert loaded.step == 1
    assert str(file) in loaded.skipped[0]
    assert full_parameters(model)["weight"].eq(1).all()  # type: ignore[union-attr]
    (folder / "step-0000000001" / "values.json").unlink(missing_ok=True)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"(?s)__1_0\.distcp.*values\.json"):
        fxzero.checkpoint.load(state, folder)


@pytest.mark.parametrize("kind", ["file", "empty", "missing", "other model"])
def test_a_folder_that_does_not_fit_is_said_on_all_ranks(
    ranks: Pools, tmp_path: Path, kind: str
) -> None:
    """No rank waits for one that has failed."""
    folder = tmp_path / "it"
    if kind == "file":
        folder.write_text("x")
    elif kind == "empty":
        folder.mkdir()
    elif kind == "other model":
        fxzero.checkpoint.save(fxzero.TrainState(nn.Linear(3, 3)), folder, step=1).wait()
    ranks(2, timeout_s=60).run(does_not_fit, folder, kind)


def does_not_fit(folder: Path, kind: str) -> None:
    """Job."""
    state = fxzero.TrainState(fxzero.shard(Odd(), zero=3))
    if kind in ("empty", "missing"):
        assert fxzero.checkpoint.load(state, folder) is None
        return
    with pytest.raises(CheckpointError, match=str(folder)):
        fxzero.checkpoint.load(state, folder)
    if kind == "file":
        for asynchronous in (True, False):
            with pytest.raises(CheckpointError, match=str(folder)):
                fxzero.checkpoint.save(state, folder, step=1, asynchronous=asynchronous).wait()
            saving._running.clear()


def test_a_part_that_one_rank_cannot_take_is_an_error_on_all(ranks: Pools, tmp_path: Path) -> None:
    """The others would train on, and wait."""
    ranks(2, timeout_s=60).run(one_cannot_take, tmp_path)


@pytest.mark.parametrize(
    ("what", "begun"),
    [
        *(
            pytest.param(what, True, id=what)
            for what in ("model", "optimizer", "hook", "in_place", "clears", "drops", "rounds")
        ),
        *(pytest.param(what, False, id=f"{what}-anew") for what in ("model", "optimizer")),
    ],
)
def test_a_model_of_one_rank_that_takes_nothing_is_an_error_on_all(
    ranks: Pools, tmp_path: Path, what: str, begun: bool
) -> None:
    """All are told which rank and why, and none of them goes on from what it has read: they train
    on, from where they were or from the begin."""
    ranks(2, timeout_s=60).run(one_refuses, tmp_path, what, begun)


class RefusedError(RuntimeError):
    """What a model, or an optimizer, has against a state."""


class ChangesAndRefuses(torch.optim.AdamW):
    """Does something to its state, and refuses the other one."""

    what = ""

    def __setstate__(self, state: Any) -> None:
        pass

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        for values in self.state.values():
            if self.what == "in_place":
                values["exp_avg"].zero_()
            elif self.what == "drops":
                del values["exp_avg"]
            elif self.what == "rounds":
                values["exp_avg"] = values["exp_avg"].bfloat16()
        if self.what == "clears":
            self.state = collections.defaultdict(dict)
        raise RefusedError("not this one")


def one_refuses(folder: Path, what: str, begun: bool) -> None:
    """Job: rank 1 has a hook that raises, in the last moment."""
    model = fxzero.shard(Odd(), zero=3)
    changes = what in ("in_place", "clears", "drops", "rounds")
    kind = ChangesAndRefuses if changes else torch.optim.AdamW
    ChangesAndRefuses.what = what
    optimizer = kind(trainable(model), 0.1)
    counter = Broken(takes=True)
    state = fxzero.TrainState(model, optimizer, loader=counter)
    step_once(model, optimizer)
    fxzero.checkpoint.save(state, folder, step=1).wait()
    if begun:
        step_once(model, optimizer)
    else:  # no rank has compared its model with the others'
        model = fxzero.shard(Odd(), zero=3)
        optimizer = kind(trainable(model), 0.1)
        state = fxzero.TrainState(model, optimizer, loader=counter)
    counter.epoch = 7
    before = bits(model.state_dict()), bits(optimizer.state_dict()), counter.state_dict()

    def refuse(*_: Any) -> None:
        raise RefusedError("not this one")

    if what == "hook" and dist.get_rank() == 0:  # which writes into what is there
        optimizer.register_load_state_dict_pre_hook(
            lambda own, _: [v["exp_avg"].zero_() for v in own.state.values()] and None
        )
    if dist.get_rank() == 1 and not changes:
        owner: Any = model if what == "model" else optimizer
        owner.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(CheckpointError, match=r"not this one.*Nothing was changed"):
        fxzero.checkpoint.load(state, folder)
    after = bits(model.state_dict()), bits(optimizer.state_dict()), counter.state_dict()
    assert after == before
    step_once(model, optimizer)  # and all of them go on together


def test_a_rank_reads_little_of_the_others_files(ranks: Pools, tmp_path: Path) -> None:
    """What is written for all, such as counts of steps, is together in one rank's file: files are
    read by blocks, and it was once in between everything else in all of them."""
    ranks(2, timeout_s=60).run(reads_little, tmp_path)


def reads_little(folder: Path) -> None:
    """Job: 12 MiB of parameters a rank, and twice as much state."""
    model = fxzero.shard(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = fxzero.TrainState(model, optimizer, rng=False)
    fxzero.checkpoint.save(state, folder, step=1).wait()
    blocks: list[tuple[str, int]] = []
    read = CheckedFile._read

    def counted(self: CheckedFile, number: int, *args: Any) -> None:
        blocks.append((self.path.name, number))
        read(self, number, *args)

    CheckedFile._read = counted  # type: ignore[method-assign]
    try:
        fxzero.checkpoint.load(state, folder)
    finally:
        CheckedFile._read = read  # type: ignore[method-assign]
    rank = dist.get_rank()
    own, others = (
        sum(name == file_of_rank(which) for name, _ in blocks) for which in (rank, 1 - rank)
    )
    written = read_manifest(folder / "step-0000000001").files[file_of_rank(rank)]
    assert own == written.num_blocks >= 4
    assert others == (1 if rank == 1 else 0)  # one of them writes all of it


@pytest.mark.parametrize(("zero", "alone"), [(3, True), (1, True), (0, False)])
def test_what_several_ranks_read_stays_in_the_page_cache(
    ranks: Pools, tmp_path: Path, zero: int, alone: bool
) -> None:
    """Past it each of them would have it from the disk; and so in another world."""
    ranks(2, timeout_s=60).run(reads_alone, tmp_path, zero, {0, 1} if alone else set())
    ranks(2, timeout_s=60).run(reads_alone, tmp_path, 3 - zero, {0, 1} if zero == 1 else set())
    ranks(1, timeout_s=60).run(reads_alone, tmp_path, zero, set())


def reads_alone(folder: Path, zero: int, alone: set[int]) -> None:
    """Job: which files are read past the page cache."""
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = fxzero.shard(model, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = fxzero.TrainState(model, optimizer, rng=False)
    if not any(folder.iterdir()):
        dist.barrier()
        fxzero.checkpoint.save(state, folder, step=1).wait()
    opened: dict[str, bool] = {}
    init = CheckedFile.__init__

    def noted(self: CheckedFile, path: Path, *args: Any, is_alone: bool = False) -> None:
        opened[path.name] = is_alone
        init(self, path, *args, is_alone=is_alone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedFile, "__init__", noted)
        fxzero.checkpoint.load(state, folder)
    found = {name for name, is_alone in opened.items() if is_alone}
    rank = dist.get_rank()
    assert found == ({file_of_rank(rank)} if rank in alone else set())
    assert any(name.endswith(".distcp") for name in opened)


def one_cannot_take(folder: Path) -> None:
    """Job."""
    model = fxzero.shard(Odd(), zero=3)
    fxzero.checkpoint.save(fxzero.TrainState(model, loader=Broken()), folder, step=1).wait()
    state = fxzero.TrainState(model, loader=Broken(takes=dist.get_rank() == 0))
    with pytest.raises((CheckpointError, KeyError), match=r"epoch"):
        fxzero.checkpoint.load(state, folder)


class CountingSteps(Optimizer):
    """Keeps Python's numbers: one that is equal on all ranks, one that depends on the shard."""

    def __init__(self, parameters: Any, lr: float = 0.1, own: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "own": own})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if group["own"]:
                    state["rank"] = float(dist.get_rank())


def save_numbers(folder: Path, own: bool) -> None:
    """Job."""
    model = fxzero.shard(nn.Linear(4, 4), zero=3)
    optimizer = CountingSteps(model.parameters(), own=own)
    optimizer.step()
    fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), folder, step=1).wait()
    fxzero.checkpoint.load(fxzero.TrainState(model, optimizer), folder)
    for parameter in model.parameters():
        assert optimizer.state[parameter].get("rank", dist.get_rank()) == dist.get_rank()


def test_numbers_in_an_optimizers_state_on_fewer_ranks(ranks: Pools, tmp_path: Path) -> None:
    """What was equal goes over; what was not is refused, not dropped."""
    for own in (False, True):
        ranks(2, timeout_s=120).run(save_numbers, tmp_path / str(own), own)
    model = nn.Linear(4, 4)
    optimizer = CountingSteps(model.parameters())
    state = fxzero.TrainState(model, optimizer, rng=False)
    fxzero.checkpoint.load(state, tmp_path / "False")
    assert [optimizer.state[p] for p in model.parameters()] == [{"count": 1}] * 2
    with pytest.raises(CheckpointError, match=r"weight\.rank of the optimizer's state was another"):
        fxzero.checkpoint.load(state, tmp_path / "True")
