"""Exported weights are the model's, bit by bit, as others' libraries load them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import fxzero
from fxzero.checkpoint import export, folder
from fxzero.checkpoint.weight_files import SUFFIX
from fxzero.errors import CheckpointError, ConfigError, FxZeroWarning
from tests.checkpoint.saved import Odd, Run, change_metadata, drop_a_part, flip
from tests.parity.harness import Pools

safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'fxzero[hf]'")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, tied names once."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name != "head.weight"}


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """Scalars, tensors of nothing, integers, booleans, halves; tied ones once."""
    run = Run()
    run.train()
    run.save(tmp_path / "ck", 1)
    found = export(tmp_path / "ck", tmp_path / "model.safetensors")
    assert_equal(safetensors.load_file(tmp_path / "model.safetensors"), weights_of(run.model))
    assert found.files == (tmp_path / "model.safetensors",)
    assert found.index is None
    assert found.num_tensors == 11
    assert found.shared == {"head.weight": "embed.weight"}
    assert found.left_out == {"optimizer": 15 + len(run.optimizer.param_groups[0]), "values": 5}
    with safetensors.safe_open(found.files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_the_librarys_own_reader_ties_again(tmp_path: Path) -> None:
    """`load_model` finds nothing missing, and nothing too many."""
    run = Run()
    run.train()
    run.save(tmp_path / "ck", 1)
    export(tmp_path / "ck", tmp_path / "model.safetensors")
    other = Odd()
    assert not torch.equal(other.embed.weight, run.model.embed.weight)  # type: ignore[arg-type]
    assert safetensors.load_model(other, str(tmp_path / "model.safetensors")) == (set(), [])
    assert_equal(weights_of(other), weights_of(run.model))
    assert other.head.weight is other.embed.weight


def test_the_file_is_laid_out_as_documented(tmp_path: Path) -> None:
    """No gaps, and every tensor at a multiple of its elements' size."""
    Run().save(tmp_path / "ck", 1)
    export(tmp_path / "ck", tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    spans = sorted(about["data_offsets"] for about in header.values())
    assert spans[0][0] == 0
    assert spans[-1][1] == len(data) - 8 - length
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    sizes = {"I64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    for about in header.values():
        assert about["data_offsets"][0] % sizes[about["dtype"]] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of what is floating-point; integers and booleans stay."""
    run = Run()
    run.train()
    run.save(tmp_path / "ck", 1)
    export(tmp_path / "ck", tmp_path / "out", dtype=dtype)
    expected = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights_of(run.model).items()
    }
    assert_equal(safetensors.load_file(tmp_path / "out" / "model.safetensors"), expected)


class Large(nn.Module):
    """Values that float16 does not have, beside infinite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1e5, -7e4, 2.0, float("inf")]))


def test_values_that_become_infinite_are_said(tmp_path: Path) -> None:
    """How many, and of which tensor."""
    Run(model=Large).save(tmp_path / "ck", 1)
    with pytest.warns(FxZeroWarning, match=r"2 values of 1 tensors \(w\) are too large"):
        found = export(tmp_path / "ck", tmp_path / "out", dtype=torch.float16)
    assert found.overflows == {"w": 2}
    assert export(tmp_path / "ck", tmp_path / "b", dtype=torch.bfloat16).overflows == {}


class Layers(nn.Module):
    """Several tensors of 4 KiB, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))
        self.bias = nn.Parameter(torch.randn(3))


def test_shards(tmp_path: Path) -> None:
    """No file holds more than was said, and the index names all."""
    run = Run(model=Layers)
    run.save(tmp_path / "ck", 1)
    found = export(tmp_path / "ck", tmp_path / "out", shard_bytes=9000)
    names = [path.name for path in found.files]
    assert names == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert found.index == tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(found.index.read_text())
    state = dict(run.model.state_dict())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    loaded: dict[str, Tensor] = {}
    for path in found.files:
        part = safetensors.load_file(path)
        assert sum(t.nbytes for t in part.values()) <= 9000
        assert {index["weight_map"][name] for name in part} == {path.name}
        loaded.update(part)
    assert_equal(loaded, state)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, found.index.name])


def test_a_tensor_larger_than_a_shard(tmp_path: Path) -> None:
    """Has a file of its own."""
    Run(model=Layers).save(tmp_path / "ck", 1)
    found = export(tmp_path / "ck", tmp_path / "mine.safetensors", shard_bytes=100)
    assert len(found.files) == 6
    assert found.files[0].name == "mine-00001-of-00006.safetensors"
    assert found.index == tmp_path / "mine.safetensors.index.json"


# -- transformers


def tiny(kind: str, tied: bool) -> nn.Module:
    """A model of transformers."""
    transformers: Any = pytest.importorskip("transformers", reason="pip install 'fxzero[hf]'")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tied
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # nothing is as its own initialisation makes it
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 6000])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_loads_it(kind: str, tied: bool, shard_bytes: int, tmp_path: Path) -> None:
    """With nothing missing, nothing left, and the same logits; tied or not, one file or several."""
    model: Any = tiny(kind, tied)
    state = fxzero.TrainState(model, torch.optim.AdamW(model.parameters()))
    fxzero.checkpoint.save(state, tmp_path / "ck", step=1, asynchronous=False)
    folder.unlock(tmp_path / "ck")
    found = export(tmp_path / "ck", tmp_path / "out", shard_bytes=shard_bytes)
    assert (len(found.files) == 1) == (shard_bytes > 6000)
    assert ("lm_head.weight" in found.shared) == tied
    model.config.save_pretrained(tmp_path / "out")
    assert_loads(model, tmp_path / "out", tied)


def assert_loads(model: Any, path: Path, tied: bool) -> None:
    """By `AutoModel.from_pretrained`."""
    import transformers

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(dict(loaded.state_dict()), dict(model.state_dict()))
    is_tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert is_tied == tied
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    base = transformers.AutoModel.from_pretrained(path)
    assert_equal(dict(base.state_dict()), dict(model.base_model.state_dict()))


def test_transformers_loads_tied_weights_of_others(tmp_path: Path) -> None:
    """`dcp.save` writes them under both names, and so does the export: it cannot know."""
    model: Any = tiny("llama", tied=True)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ck", no_dist=True)
    found = export(tmp_path / "ck", tmp_path / "out", dtype=torch.float32)
    assert found.shared == {}
    model.config.save_pretrained(tmp_path / "out")
    assert_loads(model, tmp_path / "out", tied=True)


# -- of ranks, and of others


class Net(nn.Module):
    """An uneven number of rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(4, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → scalar."""
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def save_by_fxzero(path: Path) -> dict[str, Tensor]:
    """On each rank, after a step; its batch is its own, and so are the running statistics."""
    model = fxzero.shard(Net(), zero=3, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    model(torch.randn(6, 4)).backward()
    optimizer.step()
    state = fxzero.TrainState(model, optimizer)
    fxzero.checkpoint.save(state, path, step=1, asynchronous=False)
    folder.unlock(path)
    full = get_model_state_dict(model)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in full.items()}


def test_shards_of_ranks_are_put_together(ranks: Pools, tmp_path: Path) -> None:
    """Of what each rank has for itself, the first rank's is taken, and that is said."""
    expected, other = ranks(2).run(save_by_fxzero, tmp_path / "ck")
    assert not torch.equal(expected["norm.running_mean"], other["norm.running_mean"])
    with pytest.warns(FxZeroWarning, match=r"each rank had its own .*norm\.running_mean"):
        found = export(tmp_path / "ck", tmp_path / "out")
    assert_equal(safetensors.load_file(found.files[0]), expected)


def save_by_fsdp2(path: Path, nested: bool) -> dict[str, Tensor]:
    """On each rank: FSDP2's model and optimizer, by `dcp.save`."""
    model = fully_shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    model(torch.randn(6, 4)).backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "step": 3,
    }
    dcp.save({"app": state} if nested else state["model"], checkpoint_id=path)
    full = {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state["model"].items()
    }
    dist.barrier()
    return full


@pytest.mark.parametrize(
    ("nested", "prefix"), [(True, None), (True, "app.model"), (True, "app.model."), (False, None)]
)
def test_of_fsdp2(ranks: Pools, tmp_path: Path, nested: bool, prefix: str | None) -> None:
    """Where the model stands in it is found, or said."""
    expected, _ = ranks(2).run(save_by_fsdp2, tmp_path / "ck", nested)
    found = export(tmp_path / "ck", tmp_path / "out", prefix=prefix)
    assert_equal(safetensors.load_file(found.files[0]), expected)
    assert ("app" in found.left_out) == nested


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """By its prefix, which is taken off."""
    run = Run(model=Net)
    run.save(tmp_path / "ck", 1)
    found = export(tmp_path / "ck", tmp_path / "out", prefix="model.up")
    assert_equal(safetensors.load_file(found.files[0]), dict(run.model.up.state_dict()))  # type: ignore[union-attr, operator]


def test_where_the_model_is_not_clear(tmp_path: Path) -> None:
    """Two are named, and a prefix that there is not."""
    both = {"student": {"w": torch.ones(2)}, "teacher": {"w": torch.ones(2)}}
    dcp.save(both, checkpoint_id=tmp_path / "ck", no_dist=True)
    with pytest.raises(ConfigError, match="student of 1 tensors, teacher of 1 tensors"):
        export(tmp_path / "ck", tmp_path / "out")
    with pytest.raises(ConfigError, match="did you mean 'teacher'"):
        export(tmp_path / "ck", tmp_path / "out", prefix="taecher")
    assert export(tmp_path / "ck", tmp_path / "out", prefix="student").num_tensors == 1


# -- what goes wrong


def test_a_changed_byte_is_not_exported(tmp_path: Path) -> None:
    """And nothing is left behind."""
    path = Run().save(tmp_path / "ck", 1)
    (file,) = path.glob("*.distcp")
    flip(file)
    with pytest.raises(CheckpointError, match=f"{file} was changed since it was written"):
        export(tmp_path / "ck", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    """Is not filled with whatever memory holds."""
    path = Run().save(tmp_path / "ck", 1)
    change_metadata(path, drop_a_part("model.thin"))
    with pytest.raises(CheckpointError, match=r"model\.thin is not whole"):
        export(path, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    """One that is not is passed over, and that is said."""
    run = Run()
    run.save(tmp_path / "ck", 1)
    expected = {name: tensor.clone() for name, tensor in weights_of(run.model).items()}
    run.train()
    newest = run.save(tmp_path / "ck", 2)
    (newest / "values.json").unlink()
    with pytest.warns(FxZeroWarning, match="a newer checkpoint is not whole: .*values.json"):
        found = export(tmp_path / "ck", tmp_path / "out")
    assert found.source.name == "step-0000000001"
    assert_equal(safetensors.load_file(found.files[0]), expected)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    """Nor left beside files that a reader would take with it: transformers prefers one file."""
    Run().save(tmp_path / "ck", 1)
    (tmp_path / "out").mkdir()
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors",
    ):
        (tmp_path / "out" / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"{name} is there already"):
            export(tmp_path / "ck", tmp_path / "out")
        assert (tmp_path / "out" / name).read_text() == "mine"
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "config.json").write_text("mine")
    export(tmp_path / "ck", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


WRONG: list[tuple[str, str]] = [
    ("nowhere", "is not there. Name a folder of checkpoints"),
    ("empty", "has no checkpoint. A checkpoint is a folder step-… in it"),
    ("file", "is a file. Name a folder of checkpoints"),
    ("deepspeed", "It looks like one of DeepSpeed's: fxzero export --deepspeed"),
]


@pytest.mark.parametrize(("name", "said"), WRONG)
def test_no_checkpoint(name: str, said: str, tmp_path: Path) -> None:
    """What is there instead."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "latest").write_text("global_step3")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=said):
        export(tmp_path / name, tmp_path / "out")


class Complex(nn.Module):
    """A dtype that the format does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex128))


def test_a_dtype_that_files_do_not_have(tmp_path: Path) -> None:
    """By the tensor's name, before anything is written."""
    Run(model=Complex).save(tmp_path / "ck", 1)
    with pytest.raises(CheckpointError, match="w is complex128, which a safetensors file cannot"):
        export(tmp_path / "ck", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before the first byte."""
    Run().save(tmp_path / "ck", 1)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="has room for 100 bytes, and the weights are"):
        export(tmp_path / "ck", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Says so by the file's name, and leaves nothing that could be taken for weights."""
    Run().save(tmp_path / "ck", 1)
    (tmp_path / "out").mkdir()
    os.symlink("/dev/full", tmp_path / "out" / ".writing-model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        export(tmp_path / "ck", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


PEAK = """
import sys
from itertools import pairwise
from pathlib import Path
import torch
import fxzero.checkpoint

def peak() -> int:
    (line,) = (t for t in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in t)
    return int(line.split()[1]) << 10

source, out, small = sys.argv[1:]
fxzero.checkpoint.export(small, out + "/small", dtype=torch.bfloat16)  # what is imported late
before = peak()
fxzero.checkpoint.export(source, out + "/large", dtype=torch.bfloat16)
print(peak() - before)
"""


class Wide(nn.Module):
    """384 MiB in matrices of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(2048, 1024).normal_() for _ in range(48))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what the peak was")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """64 MiB of tensors, as much of blocks on their way, and what the allocator keeps."""
    for name, model in (("small", Large), ("large", Wide)):
        state = fxzero.TrainState(model(), rng=False)
        fxzero.checkpoint.save(state, tmp_path / name, step=1, asynchronous=False)
        folder.unlock(tmp_path / name)
    words = [sys.executable, "-c", PEAK, tmp_path / "large", tmp_path / "out", tmp_path / "small"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    written = (tmp_path / "out" / "large" / f"model{SUFFIX}").stat().st_size
    assert written > 190 << 20
    assert grown < 240 << 20, f"{grown >> 20} MiB for a model of 384"
