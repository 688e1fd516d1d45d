"""The worked cases at tiny size, on two ranks: they learn what plain PyTorch learns.

Losses are compared step by step; an update that goes wrong shows in the next one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.data import Batches, stdlib_text
from examples.gpt_lite import TINY, build, ddp_step
from examples.zero_inference import prompts_of
from tests.examples.running import EAGER, losses, metrics, on_two_ranks

STEPS = 4


def expected_losses(lr: float, weight_decay: float) -> list[float]:
    """Of plain PyTorch in this process, on the rows of both ranks."""
    torch.manual_seed(0)
    model = build(tiny=True)
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=weight_decay)
    step = ddp_step(model, optimizer, micro_batches=1)
    batches = Batches(stdlib_text(4_000_000), TINY["block_size"], 8, 0)
    return [step(*batches[number]).loss.item() for number in range(1, STEPS + 1)]


SIZES = ("--tiny", "--steps", str(STEPS), "--batch", "8")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--zero", "1", "--pipeline", "2", *EAGER),
        ("--zero", "2", *EAGER),
        ("--zero", "3"),
        ("--zero", "3", "--pipeline", "2"),
        ("--ddp",),
    ],
    ids=" ".join,
)
def test_gpt_lite(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Under ZeRO's stages, in a pipeline, and as PyTorch has it."""
    on_two_ranks("gpt_lite.py", *layout, *SIZES, "--micro-batches", "2", folder=tmp_path)
    found = losses(tmp_path / "outputs/gpt_lite")
    assert found == pytest.approx(expected_losses(6e-4, 0.1), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "options"),
    [("2", EAGER), ("0", EAGER), ("1", EAGER), ("2", ()), ("3", EAGER)],
)
def test_resnet(zero: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """BatchNorm too: the accuracy is by the statistics that it has kept."""
    found = []
    for how in (("--ddp",), ("--zero", zero, *options)):
        folder = tmp_path / how[0]
        on_two_ranks("resnet_cifar.py", *how, *SIZES, "--output", folder, folder=tmp_path)
        (accuracy,) = (r["accuracy"] for r in metrics(folder) if "accuracy" in r)
        found.append((losses(folder), accuracy))
    (ddp, as_ddp), (here, accuracy) = found
    assert len(here) == STEPS
    assert here == pytest.approx(ddp, rel=1e-5)
    assert accuracy == as_ddp


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["all_host", "none", "states_host", "infinity"])
def test_gpt_xl(memory: str, tmp_path: Path) -> None:
    """Wherever its states are; that they are elsewhere shows in copies."""
    disk = ("--disk", tmp_path / "disk") if memory == "infinity" else ()
    on_two_ranks("gpt_xl.py", "--memory", memory, *disk, *SIZES, *EAGER, folder=tmp_path)
    folder = tmp_path / "outputs/gpt_xl"
    assert losses(folder) == pytest.approx(expected_losses(2e-4, 0.01), rel=1e-5)
    if memory != "infinity":  # reads from disk are not counted as copies
        assert (metrics(folder)[-1]["num_uploads"] > 0) is (memory != "none")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_zero_inference(tied: bool, tmp_path: Path) -> None:
    """Token by token what one process generates, in less memory than the model has; prompts end at
    different tokens, and no rank waits for one that has ended."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=515,
        eos_token_id=list(range(2, 12)),
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    expected = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        prompts = torch.randint(3, 515, (2, 5), generator=generator)
        made = model.generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected.append(made.tolist())
    sizes = ("--batch", "2", "--prompt", "5", "--new-tokens", "8")
    output = tmp_path / "tokens.json"
    words = ("--model", tmp_path / "llama", "--output", output)
    # What is freed goes back at once, so that the process's memory is that of its tensors.
    kept = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = on_two_ranks("zero_inference.py", *words, *sizes, folder=tmp_path, **kept)
    found = json.loads(output.read_text())
    assert found["tokens"] == [row for rows in expected for row in rows]
    assert found["model_bytes"] == sum(p.nbytes for p in model.parameters())
    assert found["shard_bytes"] < 0.51 * found["model_bytes"]
    assert found["shard_bytes"] + found["gathered_and_cache_bytes"] < 0.8 * found["model_bytes"]
    assert "new tokens/s over 2 ranks" in printed


def test_prompts_are_of_one_rank() -> None:
    """Alone this is rank 0; the test above writes out what the others draw."""
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(prompts_of(2, 5, 129), torch.randint(3, 129, (2, 5), generator=generator))
