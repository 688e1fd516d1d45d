"""Checkpoints of torch.distributed.checkpoint and ours, each read by the other; wrapped models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fxzero
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import adamw, bits, make_run, unchanged
from tests.checkpoint.test_ranks import in_full
from tests.parity.harness import Pools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Tied(nn.Module):
    """An embedding that is the head too, odd sizes, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(self.embedding(tokens)))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    """On all ranks alike."""
    tokens = torch.arange(6)
    for _ in range(steps):
        nn.functional.cross_entropy(model(tokens), tokens + 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(seed: int, steps: int, zero: int = 3) -> tuple[nn.Module, Optimizer]:
    """Sharded by fxzero."""
    model = fxzero.shard(Tied(seed), zero=zero)
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def fsdp2(seed: int, steps: int) -> tuple[nn.Module, Optimizer]:
    """Sharded by torch."""
    model = fully_shard(Tied(seed))
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    """In full, with buffers."""
    return in_full(model, optimizer), bits(dict(model.named_buffers()))


# -- FSDP2


def test_torch_reads_ours_into_fsdp2(ranks: Pools, tmp_path: Path) -> None:
    """By `get_model_state_dict` and `get_optimizer_state_dict`, tied weights under both names."""
    ranks(2, timeout_s=120).run(torch_reads_ours, tmp_path)


def torch_reads_ours(folder: Path) -> None:
    """Job."""
    model, optimizer = ours(0, 2)
    path = fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), folder, step=2).wait()
    theirs, their_optimizer = fsdp2(1, 1)
    state = {
        "model": get_model_state_dict(theirs),
        "optimizer": get_optimizer_state_dict(theirs, their_optimizer),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(theirs, state["model"])
    set_optimizer_state_dict(theirs, their_optimizer, state["optimizer"])
    assert everything(theirs, their_optimizer) == everything(model, optimizer)
    assert "head.weight" in state["model"], "the premise"
    whole = {"model": {"head.weight": torch.zeros(7, 6), "embedding.weight": torch.zeros(7, 6)}}
    dcp.load(whole, checkpoint_id=path)
    assert torch.equal(whole["model"]["head.weight"], whole["model"]["embedding.weight"])
    assert whole["model"]["head.weight"].any()


@pytest.mark.parametrize("layout", ["", "app.", "optim"])
def test_we_read_what_torch_saved_of_fsdp2(ranks: Pools, tmp_path: Path, layout: str) -> None:
    """Into our shards, into FSDP2 and into a plain model; settings of the optimizer stay."""
    expected = ranks(2, timeout_s=120).run(we_read_fsdp2, tmp_path, layout)[0]
    model = Tied(5)
    optimizer = adamw(model.parameters())
    state = fxzero.TrainState(model, optimizer)
    loaded = fxzero.checkpoint.load(state, tmp_path / "theirs")
    assert loaded is not None
    assert loaded.step == 0
    assert {text.split(":")[0] for text in loaded.left} == {"rng", "settings of the optimizer"}
    assert everything(model, optimizer) == expected


def we_read_fsdp2(folder: Path, layout: str) -> Any:
    """Job."""
    theirs, their_optimizer = fsdp2(0, 2)
    key = "optim" if layout == "optim" else "optimizer"
    state: dict[str, Any] = {
        "model": get_model_state_dict(theirs),
        key: get_optimizer_state_dict(theirs, their_optimizer),
    }
    dcp.save({"app": state} if layout == "app." else state, checkpoint_id=folder / "theirs")
    expected = everything(theirs, their_optimizer)
    for make in (ours, fsdp2):
        for steps in (0, 1):
            model, optimizer = make(3, steps)
            optimizer.param_groups[0]["lr"] = 0.123
            loaded = fxzero.checkpoint.load(fxzero.TrainState(model, optimizer), folder / "theirs")
            assert loaded is not None
            assert everything(model, optimizer) == expected
            assert optimizer.param_groups[0]["lr"] == 0.123
    return expected


def test_fsdp2_is_saved_by_us(ranks: Pools, tmp_path: Path) -> None:
    """And goes on in our shards."""
    ranks(2, timeout_s=120).run(fsdp2_by_us, tmp_path)


def fsdp2_by_us(folder: Path) -> None:
    """Job."""
    theirs, their_optimizer = fsdp2(0, 2)
    state = fxzero.TrainState(theirs, their_optimizer)
    fxzero.checkpoint.save(state, folder, step=2).wait()
    for make in (ours, fsdp2):
        model, optimizer = make(3, 1)
        fxzero.checkpoint.load(fxzero.TrainState(model, optimizer), folder)
        assert everything(model, optimizer) == everything(theirs, their_optimizer)


# -- a step


def test_torch_saves_and_loads_a_step(ranks: Pools, tmp_path: Path) -> None:
    """``dcp.save({"app": step})``: a fresh one takes it, and trains on alike."""
    for name in ("adamw", "momentum"):
        ranks(2, timeout_s=180).run(a_step_by_torch, tmp_path / name, name)


def a_step_by_torch(folder: Path, name: str) -> None:
    """Job."""
    make: dict[str, Callable[[Any], Optimizer]] = {
        "adamw": adamw,
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    }
    x, y = torch.linspace(-1, 1, 12).view(3, 4), torch.zeros(3, 2)

    def a_step(seed: int) -> Any:
        torch.manual_seed(seed)
        model = fxzero.shard(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), zero=3)
        optimizer = make[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return fxzero.compile_step(
            model,
            optimizer,
            nn.functional.mse_loss,
            scheduler=scheduler,
            options={"lower_regions": {"backend": "eager"}},
        )

    step = a_step(0)
    step(x, y)
    step(x, y)
    dcp.save({"app": step}, checkpoint_id=folder)
    other = a_step(1)
    dcp.load({"app": other}, checkpoint_id=folder)
    assert in_full(other.model, other.optimizer) == in_full(step.model, step.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == step.optimizer.param_groups[0]["lr"]
    assert other.scheduler.state_dict() == step.scheduler.state_dict()
    assert torch.equal(other(x, y).loss, step(x, y).loss)
    assert in_full(other.model, other.optimizer) == in_full(step.model, step.optimizer)


# -- a plain model and torch


def test_torch_reads_ours_into_a_plain_model(tmp_path: Path) -> None:
    """In a single process, by the names of a state dict."""
    run = make_run(0)
    run.train(2)
    path = fxzero.checkpoint.save(run.state, tmp_path, step=2).wait()
    other = make_run(1)
    other.train()
    state = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optimizer"])
    assert bits(other.model.state_dict()) == bits(run.model.state_dict())
    assert bits(other.optimizer.state_dict()["state"]) == bits(run.optimizer.state_dict()["state"])
    rate = [group["lr"] for group in run.optimizer.param_groups]
    assert [group["lr"] for group in other.optimizer.param_groups] == rate


def test_we_read_a_bare_state_dict(tmp_path: Path) -> None:
    """``dcp.save(model.state_dict())``, and under a name of one's own."""
    run = make_run(0)
    run.train()
    saved = {"bare": run.model.state_dict(), "named": {"my": {"net": run.model.state_dict()}}}
    for name, state in saved.items():
        dcp.save(state, checkpoint_id=tmp_path / name)
        for prefix in (None, {"bare": "", "named": "my.net."}[name]):
            other = make_run(1)
            fxzero.checkpoint.load(fxzero.TrainState(other.model), tmp_path / name, prefix=prefix)
            assert bits(other.model.state_dict()) == bits(run.model.state_dict())


def test_a_model_under_several_names_is_asked_for(tmp_path: Path) -> None:
    """An average beside the weights: which one, the user says."""
    run, average = make_run(0), make_run(1)
    state = {"model": run.model.state_dict(), "ema": average.model.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "it")
    expected = bits(average.model.state_dict())
    other = make_run(2)
    with unchanged(other), pytest.raises(CheckpointError, match=r"several names.*prefix="):
        fxzero.checkpoint.load(fxzero.TrainState(other.model), tmp_path / "it")
    fxzero.checkpoint.load(fxzero.TrainState(other.model), tmp_path / "it", prefix="ema.")
    assert bits(other.model.state_dict()) == expected


def test_another_model_that_torch_saved(tmp_path: Path) -> None:
    """Names, shapes, and no optimizer; a step that it does not have."""
    dcp.save({"model": nn.Linear(3, 3).state_dict()}, checkpoint_id=tmp_path / "it")
    run = make_run(0)
    with unchanged(run), pytest.raises(CheckpointError, match=r"not this model.*0\.weight"):
        fxzero.checkpoint.load(fxzero.TrainState(run.model), tmp_path / "it")
    model = nn.Linear(3, 3)
    state = fxzero.TrainState(model, adamw(model.parameters()))
    with pytest.raises(CheckpointError, match=r"no optimizer state.*leave=\('optimizer',\)"):
        fxzero.checkpoint.load(state, tmp_path / "it")
    with pytest.raises(CheckpointError, match="7"):
        fxzero.checkpoint.load(state, tmp_path / "it", step=7, leave=["optimizer"])


def test_a_parameter_without_a_state_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """The first one was never used: others have a state."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = adamw(model.parameters())
    model["b"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {i: n for i, (n, _) in enumerate(model.named_parameters())}
    state = {
        "model": model.state_dict(),
        "optimizer": {"state": {names[i]: s for i, s in optimizer.state_dict()["state"].items()}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "it")
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    theirs = adamw(other.parameters())
    fxzero.checkpoint.load(fxzero.TrainState(other, theirs), tmp_path / "it")
    assert bits(theirs.state_dict()["state"]) == bits(optimizer.state_dict()["state"])


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped"])
def test_a_struck_file_of_torch(tmp_path: Path, how: str) -> None:
    """It has no manifest: what its archives' checksums say is asked for."""
    run = make_run(0)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "it")
    (file,) = (tmp_path / "it").glob("*.distcp")
    data = bytearray(file.read_bytes())
    if how == "flipped":
        weight = run.model[0].weight.detach().numpy().tobytes()
        data[data.index(weight) + 5] ^= 64
    file.write_bytes(data[: len(data) // 2] if how == "truncated" else data)
    if how == "missing":
        file.unlink()
    other = make_run(1)
    with unchanged(other), pytest.raises(CheckpointError, match=str(tmp_path / "it")):
        fxzero.checkpoint.load(fxzero.TrainState(other.model), tmp_path / "it")


# -- wrapped models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapped", ["whole", "part", "in place"])
def test_a_compiled_model(tmp_path: Path, wrapped: str) -> None:
    """Names as without; both ways."""

    def build(seed: int) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
        inner = model
        if wrapped == "whole":
            model = torch.compile(model, backend="eager")
        elif wrapped == "part":
            model[1] = torch.compile(model[1], backend="eager")
        else:
            model.compile(backend="eager")
        return model, inner

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    plain_optimizer = adamw(plain.parameters())
    compiled, _ = build(0)
    compiled_optimizer = adamw(compiled.parameters())
    for model, optimizer in ((plain, plain_optimizer), (compiled, compiled_optimizer)):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    one, other = (
        fxzero.TrainState(plain, plain_optimizer),
        fxzero.TrainState(compiled, compiled_optimizer),
    )
    fxzero.checkpoint.save(one, tmp_path / "plain", step=1).wait()
    path = fxzero.checkpoint.save(other, tmp_path / "compiled", step=1).wait()
    names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    assert not any("_orig_mod" in name for name in names)
    expected = bits([t.detach() for t in plain.parameters()])
    for state in (one, other):
        for folder in ("plain", "compiled"):
            with torch.no_grad():
                for p in state.model.parameters():
                    p.zero_()
            fxzero.checkpoint.load(state, tmp_path / folder)
            assert bits([t.detach() for t in state.model.parameters()]) == expected


def test_a_model_under_ddp(ranks: Pools, tmp_path: Path) -> None:
    """Compiled too: written once, under plain names, and into shards."""
    ranks(2, timeout_s=120).run(under_ddp, tmp_path)


def under_ddp(folder: Path) -> None:
    """Job."""
    for number, wrap in enumerate((lambda m: m, lambda m: torch.compile(m, backend="eager"))):
        model = wrap(DistributedDataParallel(Tied(0)))
        optimizer = adamw(model.parameters())
        train(model, optimizer)
        state = fxzero.TrainState(model, optimizer)
        path = fxzero.checkpoint.save(state, folder / str(number), step=2).wait()
        names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        assert "model.embedding.weight" in names
        assert not any(name.startswith("ranks.") for name in names)
        expected = everything(state.model, optimizer)
        other = DistributedDataParallel(Tied(1))
        theirs = adamw(other.parameters())
        fxzero.checkpoint.load(fxzero.TrainState(other, theirs), folder / str(number))
        assert everything(other.module, theirs) == expected
        sharded, its = ours(2, 1)
        fxzero.checkpoint.load(fxzero.TrainState(sharded, its), folder / str(number))
        assert everything(sharded, its) == expected
        dist.barrier()


def test_groups_in_another_order(tmp_path: Path) -> None:
    """And split otherwise: states and settings go by name."""

    def groups(model: nn.Module, order: int) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        if order == 0:
            return [
                {"params": matrices, "weight_decay": 0.3},
                {"params": rest, "lr": 0.02, "weight_decay": 0.0},
            ]
        return [
            {"params": rest[2:]},
            {"params": matrices[::-1]},
            {"params": rest[:2], "lr": 1.0},
        ]

    run = make_run(0)
    optimizer = torch.optim.AdamW(groups(run.model, 0), lr=0.1)
    run.model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    fxzero.checkpoint.save(fxzero.TrainState(run.model, optimizer), tmp_path, step=1).wait()
    other = make_run(1)
    theirs = torch.optim.AdamW(groups(other.model, 1), lr=7.0)
    fxzero.checkpoint.load(fxzero.TrainState(other.model, theirs), tmp_path)
    names = {p: n for n, p in other.model.named_parameters()}
    mine = dict(run.model.named_parameters())
    for group in theirs.param_groups:
        for p in group["params"]:
            assert bits(theirs.state[p]) == bits(optimizer.state[mine[names[p]]])
            assert group["lr"] == (0.1 if p.ndim > 1 else 0.02)
            assert group["weight_decay"] == (0.3 if p.ndim > 1 else 0.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_models_of_transformers(tmp_path: Path, kind: str) -> None:
    """Tied embeddings, buffers that are not saved, shared ones of T5."""
    transformers = pytest.importorskip("transformers")
    configs = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            tie_word_embeddings=True,
        ),
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32),
        "t5": lambda: transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            vocab_size=32,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
    }
    make = {
        "llama": transformers.LlamaForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "t5": transformers.T5ForConditionalGeneration,
    }[kind]

    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = make(configs[kind]()).train()
        optimizer = adamw(model.parameters())
        tokens = torch.arange(6).view(1, 6)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = build(0)
    path = fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), tmp_path, step=1).wait()
    other, theirs = build(1)
    fxzero.checkpoint.load(fxzero.TrainState(other, theirs), tmp_path)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(theirs.state_dict()) == bits(optimizer.state_dict())
    assert other.get_input_embeddings().weight is other.get_output_embeddings().weight
    state = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=path)
    assert bits(state["model"]) == bits(dict(model.state_dict()))
