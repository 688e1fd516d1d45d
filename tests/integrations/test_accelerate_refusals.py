"""What accelerate can be told beside fxzero and must not be: said before anything is made."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

import fxzero
from fxzero.integrations.accelerate import FxZeroAccelerator, FxZeroPlugin
from tests.integrations.accelerate_runs import Loop, as_launched, forget, make
from tests.parity.harness import Pools

ROOT = Path(__file__).parents[2]
BF16 = FxZeroPlugin(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "variables", "said"),
    [
        ({"fsdp_plugin": object()}, {}, "fsdp_plugin= and fxzero="),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is set"),
        ({"dynamo_backend": "inductor"}, {}, "dynamo_backend='inductor'"),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "dynamo_backend='eager'"),
        ({"mixed_precision": "fp8"}, {}, "fp8"),
        ({"fxzero": FxZeroPlugin(whole_step=True)}, {}, r"call fxzero\.compile_step"),
        ({"mixed_precision": "bf16", "fxzero": BF16}, {}, "leave out one of the two"),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=1)]},
            {},
            "bucket_cap_mb=1",
        ),
    ],
)
def test_what_is_refused_leaves_no_state(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    variables: dict[str, str],
    said: str,
) -> None:
    forget()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fxzero.ConfigError, match=said):
        FxZeroAccelerator(cpu=True, **settings)
    assert not AcceleratorState._shared_state


def test_what_ddp_must_be_told_is_needless_here() -> None:
    forget()
    told = DistributedDataParallelKwargs(find_unused_parameters=True)
    FxZeroAccelerator(cpu=True, kwargs_handlers=[told])
    forget()


def refusals(folder: str) -> list[str]:
    """What is said to the wrong calls on sharded models."""
    said = []
    with as_launched():
        model = fxzero.shard(nn.Linear(4, 4), 3)
        plain = Accelerator(cpu=True)
        with pytest.raises(fxzero.ShardingError) as met:
            plain.prepare(model)
        said.append(str(met.value))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        plain._models.clear()
        plain.prepare(optimizer)
        if plain.is_main_process:  # the others save nothing, and wait for nobody
            with pytest.raises(fxzero.ShardingError) as met:
                plain.save_state(folder)
            said.append(str(met.value))
    with as_launched():
        accelerator = make(Loop(zero=1))
        model, optimizer = nn.Linear(4, 4), None
        with pytest.raises(fxzero.ConfigError) as wrong:
            accelerator.prepare(torch.compile(nn.Linear(4, 4)))
        said.append(str(wrong.value))
        model = accelerator.prepare(model)
        for call in (
            lambda: accelerator.trigger_sync_in_backward(model),
            lambda: accelerator.join_uneven_inputs([model]),
        ):
            with pytest.raises(fxzero.ConfigError) as wrong, call():
                pass
            said.append(str(wrong.value))
        with pytest.raises(fxzero.CheckpointError) as lost:
            accelerator.load_state(folder)
        said.append(str(lost.value))
    return said


def test_wrong_calls_are_told_the_right_ones(ranks: Pools, tmp_path: Path) -> None:
    said, _ = ranks(2).run(refusals, str(tmp_path))
    assert len(said) == 6
    assert all("FxZeroAccelerator" in text for text in said[:2])
    for text, word in zip(
        said[2:], ("is compiled", "decided by its forward", "equally many", "plain"), strict=True
    ):
        assert word in text


def test_the_page_shows_the_difference_of_the_examples() -> None:
    names = ("examples/accelerate_lm_ddp.py", "examples/accelerate_lm.py")
    texts = [(ROOT / name).read_text().splitlines() for name in names]
    shown = list(difflib.unified_diff(*texts, *names, n=1, lineterm=""))
    page = (ROOT / "docs/pages/integrations/accelerate.md").read_text()
    assert "\n".join(shown) in page
    assert len([line for line in shown[2:] if line[0] == "+" and line[1:].strip()]) <= 4
