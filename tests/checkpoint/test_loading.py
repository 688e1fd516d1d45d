"""`fxzero.checkpoint.load` in one process: what does not fit is said, and nothing is changed."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.checkpoint import manifest as manifests
from fxzero.checkpoint import saving
from fxzero.checkpoint.manifest import hash_blocks
from fxzero.checkpoint.reader import CheckedReader
from fxzero.errors import CheckpointError
from tests.checkpoint import saved
from tests.checkpoint.runs import (
    Counting,
    Run,
    adamw,
    all_of,
    bits,
    make_run,
    save_now,
    train_once,
    unchanged,
    visible,
)


@pytest.fixture(autouse=True)
def _forget_saves() -> Iterator[None]:
    """What one test's save has met is not the next one's."""
    yield
    saving._running.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With one checkpoint of a run after two steps."""
    run = make_run(0)
    run.train(2)
    save_now(run, tmp_path / "checkpoints", 2)
    return tmp_path / "checkpoints"


def refused(run: Run, folder: Path, match: str, **settings: Any) -> None:
    """Loading fails with a message, and the run is as it was."""
    with unchanged(run), pytest.raises(CheckpointError, match=match):
        fxzero.checkpoint.load(run.state, folder, **settings)


# -- going on


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, asynchronous: bool) -> None:
    """Dropout, shuffles and schedule too; what is trained while it is written is not in it."""
    run = make_run(0)
    run.train(2)
    under_way = fxzero.checkpoint.save(run.state, tmp_path, step=2, asynchronous=asynchronous)
    run.train(3)
    expected = all_of(run)
    under_way.wait()
    other = make_run(5)
    other.train()
    loaded = fxzero.checkpoint.load(other.state, tmp_path)
    assert loaded is not None
    assert loaded.step == 2
    other.train(3)
    assert all_of(other) == expected


def test_a_later_save_does_not_change_an_earlier_one(tmp_path: Path) -> None:
    """Copies in memory are used again."""
    run = make_run(0)
    expected = []
    for step in range(4):
        run.train()
        fxzero.checkpoint.save(run.state, tmp_path, step=step)
        expected.append(all_of(run))
    for step in range(4):
        fxzero.checkpoint.load(run.state, tmp_path, step=step)
        assert all_of(run) == expected[step]


def test_tensors_of_several_blocks(tmp_path: Path) -> None:
    """20 MB, whose bytes no block begins with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(1000, 5000, bias=False))
    state = fxzero.TrainState(model)
    expected = bits(model.state_dict())
    path = fxzero.checkpoint.save(state, tmp_path, step=1).wait()
    nn.init.zeros_(model[1].weight)
    fxzero.checkpoint.load(state, tmp_path)
    assert bits(model.state_dict()) == expected
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[17 << 20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))} was changed.*16777216 to"):
        fxzero.checkpoint.load(state, tmp_path)


# -- what is not there


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_torch_conjugates_later(tmp_path: Path, asynchronous: bool) -> None:
    """A tensor may lie in memory as the conjugate, or the negative, of what it is."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Module()
        module.w = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64).conj())
        module.register_buffer("n", torch.randn(6, dtype=torch.complex64).conj().imag)
        return module

    made, loaded = make(0), make(1)
    state = fxzero.TrainState(made)
    fxzero.checkpoint.save(state, tmp_path, step=1, asynchronous=asynchronous).wait()
    fxzero.checkpoint.load(fxzero.TrainState(loaded), tmp_path)
    for name, value in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    """So has one that does not exist, and neither is made."""
    for folder in (tmp_path, tmp_path / "none", tmp_path / "none" / "below"):
        run = make_run()
        with unchanged(run):
            assert fxzero.checkpoint.load(run.state, folder) is None
            assert fxzero.checkpoint.load(run.state, str(folder)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    """To load from, and to save to, and below it."""
    file = tmp_path / "file"
    file.write_text("x")
    run = make_run()
    for path in (file, file / "below"):
        refused(run, path, re.escape(str(file)))
        with unchanged(run), pytest.raises(CheckpointError, match=re.escape(str(file))):
            save_now(run, path, 1)


def test_a_step_that_was_not_saved(folder: Path) -> None:
    """The message has those that were."""
    refused(make_run(), folder, r"has no checkpoint 3\. It has \[2\]", step=3)
    refused(make_run(), folder / "none", "has no checkpoint 3.*none", step=3)


def test_a_checkpoint_by_its_path(folder: Path) -> None:
    """And no other number under it."""
    run = make_run(5)
    loaded = fxzero.checkpoint.load(run.state, folder / "step-0000000002")
    assert loaded is not None
    assert loaded.step == 2
    refused(make_run(5), folder / "step-0000000002", "3", step=3)


# -- another model


def wider() -> nn.Module:
    """Another shape."""
    return nn.Sequential(
        nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 2)
    )


def without_bias() -> nn.Module:
    """Fewer names."""
    return nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    )


def deeper() -> nn.Module:
    """More names."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)
    )


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (wider, r"0\.weight is \[9, 4\] here and \[8, 4\] there"),
        (without_bias, r"0\.bias is not in the model"),
        (deeper, r"3\.weight is not in it"),
    ],
)
def test_of_another_model(folder: Path, build: Any, names: str) -> None:
    """By name and shape; an older checkpoint of the model is not taken for it."""
    run = make_run(3, build=build)
    run.train()
    refused(run, folder, rf"step-0000000002 is of another model.*{names}")


class Tied(nn.Module):
    """Two names for one tensor, or for two."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return self.head(self.embedding(x))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Written once; into a model that unties them, each gets its copy."""
    model = Tied(tied=True)
    path = fxzero.checkpoint.save(fxzero.TrainState(model), tmp_path, step=1).wait()
    assert sum(f.stat().st_size for f in path.glob("*.distcp")) < 2 * 1500
    for tied in (True, False):
        other = Tied(tied)
        fxzero.checkpoint.load(fxzero.TrainState(other), tmp_path)
        assert (other.head.weight is other.embedding.weight) == tied
        assert bits(other.state_dict()) == bits(model.state_dict())


def test_two_weights_are_not_read_into_one(tmp_path: Path) -> None:
    """One of them would be lost in silence."""
    torch.manual_seed(0)
    fxzero.checkpoint.save(fxzero.TrainState(Tied(tied=False)), tmp_path, step=1).wait()
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        fxzero.checkpoint.load(fxzero.TrainState(Tied(tied=True)), tmp_path)


class Extra(nn.Linear):
    """Has a state that is no tensor."""

    extra = {"scale": 1.5, "seen": (1, 2)}

    def get_extra_state(self) -> Any:
        """Numbers."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Back."""
        self.extra = state


def test_extra_state_comes_back(tmp_path: Path) -> None:
    """Of modules that have some."""
    model = Extra(4, 2)
    model.extra = {"scale": 2.5, "seen": (3,)}
    fxzero.checkpoint.save(fxzero.TrainState(model), tmp_path, step=1).wait()
    other = Extra(4, 2)
    fxzero.checkpoint.load(fxzero.TrainState(other), tmp_path)
    assert other.extra == {"scale": 2.5, "seen": (3,)}


@pytest.mark.parametrize(("then", "now"), [(nn.Linear, Extra), (Extra, nn.Linear)])
def test_extra_state_that_only_one_of_both_has(tmp_path: Path, then: Any, now: Any) -> None:
    """Another model: nothing is changed before that is seen."""
    torch.manual_seed(0)
    run = make_run(0, build=lambda: then(4, 2))
    save_now(run, tmp_path, 1)
    refused(make_run(1, build=lambda: now(4, 2)), tmp_path, "_extra_state")


# -- another optimizer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With a state of another name."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("then", "now"), [(adamw, sgd), (sgd, adamw)])
@pytest.mark.parametrize("steps", [0, 1], ids=["begins", "has trained"])
def test_of_another_optimizer(tmp_path: Path, then: Any, now: Any, steps: int) -> None:
    """Its state would be ignored, or miss in the next step."""
    run = make_run(0, then)
    run.train(2)
    save_now(run, tmp_path, 2)
    other = make_run(1, now)
    other.train(steps)
    refused(other, tmp_path, "(?i)optimizer")
    loaded = fxzero.checkpoint.load(other.state, tmp_path, leave=["optimizer"])
    assert loaded is not None
    other.train()


def test_an_optimizer_of_more_parameters(tmp_path: Path) -> None:
    """Frozen then, trained now: by name."""
    run = make_run(0)
    run.model[4].bias.requires_grad_(False)
    some = fxzero.TrainState(run.model, adamw(p for p in run.model.parameters() if p.requires_grad))
    fxzero.checkpoint.save(some, tmp_path, step=1).wait()
    all_ = fxzero.TrainState(run.model, run.optimizer)
    with unchanged(run), pytest.raises(CheckpointError, match=r"1 parameters.*4\.bias"):
        fxzero.checkpoint.load(all_, tmp_path)


def test_parameters_of_groups_with_other_settings_in_one_group(tmp_path: Path) -> None:
    """Nobody knows which one would hold."""
    run = make_run(0)
    groups = [
        {"params": list(run.model[0].parameters()), "weight_decay": 0.1},
        {"params": [*run.model[1].parameters(), *run.model[4].parameters()], "lr": 0.3},
    ]
    fxzero.checkpoint.save(
        fxzero.TrainState(run.model, torch.optim.AdamW(groups, lr=0.1)), tmp_path, step=1
    ).wait()
    with unchanged(run), pytest.raises(CheckpointError, match=r"0\.weight and 1\.weight"):
        fxzero.checkpoint.load(fxzero.TrainState(run.model, run.optimizer), tmp_path)


def test_saved_without_an_optimizer(tmp_path: Path) -> None:
    """It says how to leave it."""
    run = make_run(0)
    fxzero.checkpoint.save(fxzero.TrainState(run.model), tmp_path, step=1).wait()
    other = make_run(1)
    other.train()
    both = fxzero.TrainState(other.model, other.optimizer)
    with unchanged(other), pytest.raises(CheckpointError, match=r"leave=\('optimizer',\)"):
        fxzero.checkpoint.load(both, tmp_path)
    before = bits(other.optimizer.state_dict())
    loaded = fxzero.checkpoint.load(both, tmp_path, leave=("optimizer",))
    assert loaded is not None
    assert any("optimizer" in text for text in loaded.left)
    assert bits(other.optimizer.state_dict()) == before
    assert bits(other.model.state_dict()) == bits(run.model.state_dict())


def test_the_model_alone(folder: Path) -> None:
    """Of a checkpoint of a whole run."""
    run = make_run(3)
    loaded = fxzero.checkpoint.load(fxzero.TrainState(run.model, rng=False), folder)
    assert loaded is not None
    whole = make_run(4)
    fxzero.checkpoint.load(whole.state, folder)
    assert bits(run.model.state_dict()) == bits(whole.model.state_dict())


# -- parts


def test_a_part_that_was_not_saved(tmp_path: Path) -> None:
    """Scheduler now, none then: by name, with the way out."""
    run = make_run(0)
    fxzero.checkpoint.save(fxzero.TrainState(run.model, run.optimizer), tmp_path, step=1).wait()
    other = make_run(1)
    refused(other, tmp_path, r"has no (scheduler|loader).*leave=\('(scheduler|loader)',\)")
    before = bits(other.scheduler.state_dict())
    loaded = fxzero.checkpoint.load(other.state, tmp_path, leave=("scheduler", "loader"))
    assert loaded is not None
    assert {text.split(":")[0] for text in loaded.left} == {"scheduler", "loader"}
    assert bits(other.scheduler.state_dict()) == before


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "loader", "rng"])
def test_what_is_left_stays_as_it_is(folder: Path, part: str) -> None:
    """And all else is loaded."""
    whole, run = make_run(3), make_run(3)
    run.train()
    before = dict(zip(*_parts(run), strict=True))
    loaded = fxzero.checkpoint.load(run.state, folder, leave=[part])
    after = dict(zip(*_parts(run), strict=True))
    assert loaded is not None
    assert [text.split(":")[0] for text in loaded.left] == [part]
    fxzero.checkpoint.load(whole.state, folder)
    expected = dict(zip(*_parts(whole), strict=True))
    for name in after:
        assert after[name] == (before if name == part else expected)[name], name


def _parts(run: Run) -> tuple[list[str], list[Any]]:
    return ["model", "optimizer", "scheduler", "loader", "rng"], [
        bits(run.model.state_dict()),
        bits(run.optimizer.state_dict()),
        bits(run.scheduler.state_dict()),
        run.loader.position,
        bits(torch.get_rng_state()),
    ]


def test_to_leave_what_there_is_not(folder: Path) -> None:
    """A slip of the pen is met before anything is read."""
    refused(make_run(), folder, "shceduler.*scheduler", leave=["shceduler"])


def test_to_leave_one_part_by_a_string(folder: Path) -> None:
    """It is taken for its name: not for its letters."""
    loaded = fxzero.checkpoint.load(make_run().state, folder, leave="optimizer")
    assert loaded is not None
    assert [text.split(":")[0] for text in loaded.left] == ["optimizer"]


class Picky(Counting):
    """Refuses whatever it is given."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Another version of it has saved that."""
        raise KeyError("epoch")


def test_a_part_that_does_not_take_its_state(folder: Path) -> None:
    """The rest of the run is as it was: half a resume trains something that nobody has."""
    run = make_run(3)
    run.train()
    loader = Picky(3)
    state = fxzero.TrainState(run.model, run.optimizer, scheduler=run.scheduler, loader=loader)
    with unchanged(run), pytest.raises((CheckpointError, KeyError), match=r"loader|epoch"):
        fxzero.checkpoint.load(state, folder)


def test_a_part_without_a_state(tmp_path: Path) -> None:
    """Is met when the state is made; so are names that are taken."""
    run = make_run()
    with pytest.raises(CheckpointError, match=r"loader is a list, which has no state_dict\(\)"):
        fxzero.TrainState(run.model, loader=[1, 2])
    with pytest.raises(CheckpointError, match="'model' is the name"):
        fxzero.TrainState(run.model, model=run.loader)
    with pytest.raises(CheckpointError, match="found int"):
        fxzero.TrainState(3)


def test_further_parts_and_generators(tmp_path: Path) -> None:
    """By the names that they are given."""
    run, generator = make_run(), torch.Generator().manual_seed(3)
    state = fxzero.TrainState(run.model, augmentation=generator, curriculum=Counting(4))
    torch.rand(3, generator=generator)
    fxzero.checkpoint.save(state, tmp_path, step=1).wait()
    expected = torch.rand(3, generator=generator)
    other, curriculum = torch.Generator(), Counting(0)
    fxzero.checkpoint.load(
        fxzero.TrainState(run.model, augmentation=other, curriculum=curriculum), tmp_path
    )
    assert torch.equal(torch.rand(3, generator=other), expected)
    assert curriculum.position == 4


# -- what cannot be saved


class Unsayable(Counting):
    """Has a state that no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """A function."""
        return {"then": {"what": [print]}}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_cannot_be_written(tmp_path: Path, asynchronous: bool) -> None:
    """Said at once, by its place; the next save works."""
    run = make_run()
    bad = fxzero.TrainState(run.model, loader=Unsayable())
    with pytest.raises(CheckpointError, match=r"loader\['then'\]\['what'\]\[0\] is a builtins\."):
        fxzero.checkpoint.save(bad, tmp_path, step=1, asynchronous=asynchronous)
    assert list(tmp_path.iterdir()) == []
    fxzero.checkpoint.save(run.state, tmp_path, step=2, asynchronous=asynchronous).wait()
    assert visible(tmp_path) == ["step-0000000002"]


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    """Before anything is written."""
    run, other = make_run(0), make_run(1)
    state = fxzero.TrainState(run.model, other.optimizer)
    with pytest.raises(CheckpointError, match=r"6 parameters.*not the model's"):
        fxzero.checkpoint.save(state, tmp_path, step=1, asynchronous=False)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": True}, "step=True"),
        ({"step": 1, "keep": 0}, "keep=0"),
        ({"step": 1, "keep_every": 0}, "keep_every=0"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, settings: Any, match: str) -> None:
    """Before anything is written."""
    with pytest.raises(CheckpointError, match=match):
        fxzero.checkpoint.save(make_run().state, tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


# -- Stateful


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    """As its docstring says."""
    run, other = make_run(0), make_run(1)
    run.train()
    good = other.state.state_dict()
    lacking = {**good, "model": dict(list(good["model"].items())[:-1])}
    wrong = {**good, "model": {**good["model"], "4.bias": torch.zeros(3)}}
    parts = {name: value for name, value in good.items() if name != "scheduler"}
    for state in (lacking, wrong, parts):
        with unchanged(run), pytest.raises(CheckpointError):
            run.state.load_state_dict(state)


def test_a_state_dict_comes_back() -> None:
    """In the same process, with no file."""
    run, other = make_run(0), make_run(1)
    run.train(2)
    other.state.load_state_dict(run.state.state_dict())
    expected = all_of(run)
    assert all_of(other) == expected


# -- files that somebody else has written


def forged(path: Path, **files: bytes) -> None:
    """Replace files of a checkpoint, and its manifest so that it fits."""
    content = json.loads((path / "manifest.json").read_bytes())
    del content["sha256"]
    for name, data in files.items():
        name = {"metadata": ".metadata", "values": "values.json"}[name]
        (path / name).write_bytes(data)
        record = hash_blocks(data)
        content["files"][name] = {"bytes": record.bytes, "blocks": list(record.blocks)}
    signed = {**content, "sha256": manifests._hash(content)}
    (path / "manifest.json").write_text(json.dumps(signed))


@pytest.mark.parametrize(
    "values",
    [b"[]", b"3", b"{", b'{"rng": 1}', b'{"rng": {"all": {"!": 1}}}', b'{"rng": {}}', b"{}"],
)
def test_values_that_nobody_writes(folder: Path, values: bytes) -> None:
    """With a manifest that fits: a CheckpointError that names the checkpoint."""
    forged(folder / "step-0000000002", values=values)
    refused(make_run(3), folder, "step-0000000002")


def test_a_forged_manifest_is_the_test_of_the_test(folder: Path) -> None:
    """Whoever forges well is believed."""
    path = folder / "step-0000000002"
    values = json.loads((path / "values.json").read_bytes())
    values["loader"] = {"all": {"position": 77}}
    forged(path, values=json.dumps(values).encode())
    run = make_run(3)
    fxzero.checkpoint.load(run.state, folder)
    assert run.loader.position == 77


# -- what a process without rights meets

AS_NOBODY = """
import os, sys
import fxzero
from torch import nn
os.setgid(65534)
os.setuid(65534)
state = fxzero.TrainState(nn.Linear(2, 2))
for folder in sys.argv[1:]:
    for action in ("load", "save"):
        try:
            if action == "load":
                found = fxzero.checkpoint.load(state, folder)
            else:
                found = fxzero.checkpoint.save(state, folder, step=9, asynchronous=False)
        except Exception as error:
            found = error
        print(action, type(found).__name__, ascii(found), flush=True)
"""


@pytest.fixture(scope="module")
def told() -> Iterator[dict[tuple[str, str], str]]:
    """What somebody who is not root is told of folders without permissions."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory(prefix="fxzero-denied-") as name:
        top, kinds = Path(name), ["folder", "newest", "file"]
        top.chmod(0o755)
        for kind in kinds:
            for step in (1, 2):
                state = fxzero.TrainState(nn.Linear(2, 2))
                fxzero.checkpoint.save(state, top / kind, step=step).wait()
        (top / "folder").chmod(0)
        (top / "newest" / "step-0000000002").chmod(0)
        (top / "file" / "step-0000000002" / "values.json").chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, *(str(top / kind) for kind in kinds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        keys = [(kind, action) for kind in kinds for action in ("load", "save")]
        yield dict(zip(keys, done.stdout.splitlines(), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["folder", "newest", "file"])
def test_permission_is_denied(told: dict[tuple[str, str], str], kind: str) -> None:
    """By the file system itself: a fall back that is said, or an error that names the path."""
    load, save = told[kind, "load"], told[kind, "save"]
    if kind == "folder":
        assert re.match(r"load CheckpointError .*/folder", load)
    else:
        assert re.match(rf"load Loaded .*step=1, .*/{kind}/step-0000000002", load)
    assert re.match(rf"save CheckpointError .*/{kind}", save)


def test_training_after_a_refusal_goes_on(folder: Path) -> None:
    """The optimizer still holds its own state."""
    run = make_run(3, build=wider)
    run.train()
    refused(run, folder, "another model")
    train_once(run.model, run.optimizer)


class Average:
    """An average of weights, as people write one: tensors by name, and how often it was updated."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, Any] = {
            "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
            "updates": 0,
        }

    def update(self, model: nn.Module) -> None:
        self.state["updates"] += 1
        for name, parameter in model.named_parameters():
            self.state["weights"][name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_large_tensors_of_a_part_go_beside_the_models(tmp_path: Path) -> None:
    """As bytes of a file that is hashed, not as text."""
    model = nn.Linear(64, 64)
    average = Average(model)
    nn.init.ones_(model.weight)
    average.update(model)
    state = fxzero.TrainState(model, average=average, rng=False)
    path = fxzero.checkpoint.save(state, tmp_path, step=1).wait()
    assert (path / "values.json").stat().st_size < 1000
    other = nn.Linear(64, 64)
    theirs = Average(other)
    fxzero.checkpoint.load(fxzero.TrainState(other, average=theirs, rng=False), tmp_path)
    assert theirs.state["updates"] == 1
    for name, tensor in average.state["weights"].items():
        assert torch.equal(theirs.state["weights"][name], tensor)


def test_a_buffer_that_persists_under_one_of_its_names(tmp_path: Path) -> None:
    """The other name is of no interest."""

    def make(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        tensor = torch.full((3,), value)
        model.register_buffer("passing", tensor, persistent=False)
        model.register_buffer("lasting", tensor)
        return model

    fxzero.checkpoint.save(fxzero.TrainState(make(1.0)), tmp_path, step=1).wait()
    other = make(2.0)
    fxzero.checkpoint.load(fxzero.TrainState(other), tmp_path)
    assert other.get_buffer("lasting").tolist() == [1.0] * 3


def test_an_expanded_buffer_is_refused(tmp_path: Path) -> None:
    """Nothing could be loaded into it."""
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(1).expand(5))
    with pytest.raises(CheckpointError, match=r"model\.wide is expanded.*clone"):
        fxzero.checkpoint.save(fxzero.TrainState(model), tmp_path, step=1)


@pytest.mark.parametrize("name", ["model.thin", "optimizer.state.thin.exp_avg"])
def test_a_tensor_of_which_a_part_is_missing(tmp_path: Path, name: str) -> None:
    """Its memory would hold numbers of somebody else: the checkpoint before is taken."""
    run = saved.Run(model=saved.Odd)
    run.train()
    run.save(tmp_path, 1)
    path = run.save(tmp_path, 2)
    saved.change_metadata(path, saved.drop_a_part(name))
    loaded = fxzero.checkpoint.load(run.state, tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    (why,) = loaded.skipped
    assert f"{name} is not whole: its 0 parts hold 0 of" in why


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was(tmp_path: Path, is_on: bool) -> None:
    """Also behind an error."""
    state = fxzero.TrainState(nn.Linear(3, 3), rng=False)
    fxzero.checkpoint.save(state, tmp_path, step=1).wait()
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        fxzero.checkpoint.load(state, tmp_path)
        assert gc.isenabled() == is_on
        with pytest.raises(CheckpointError):
            fxzero.checkpoint.load(fxzero.TrainState(nn.Linear(4, 3), rng=False), tmp_path)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()


def test_what_was_read_of_one_that_is_broken_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the one before is read, without Python's collector: a host may have room for one."""
    run = make_run(0)
    for step in (1, 2, 3):
        run.train(1)
        save_now(run, tmp_path, step)
    for step in (2, 3):
        path = tmp_path / f"step-{step:010}" / "__0_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    before: list[weakref.ref[Tensor]] = []
    read = CheckedReader.read_data

    def looked(reader: CheckedReader, plan: Any, planner: Any) -> Any:
        assert [one for one in before if one() is not None] == []
        before.extend(weakref.ref(copy) for copy in planner._copies.values())
        return read(reader, plan, planner)

    monkeypatch.setattr(CheckedReader, "read_data", looked)
    loaded = fxzero.checkpoint.load(run.state, tmp_path)
    assert loaded is not None
    assert (loaded.step, len(loaded.skipped)) == (1, 2)
    assert len(before) > 10
