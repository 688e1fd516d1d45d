"""Costs that are measured: by all ranks together, kept on disk, and equal on all ranks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxzero
from fxzero.compiler.compilation import Compilation, observers
from fxzero.cost.measured import CostFile, MeasuredCosts
from fxzero.errors import ConfigError
from fxzero.inspect import capture
from fxzero.transfer import Transfer, TransferKind
from tests.parity.harness import Pools
from tests.tracing import Chain, chain


def test_a_file_of_figures(tmp_path: Path) -> None:
    """What was written is read; what is damaged, or not there, is measured again."""
    kept = CostFile(tmp_path)
    assert kept.read("a") is None
    kept.write("a", [1.0, 2.5])
    assert kept.read("a") == [1.0, 2.5]
    for damage in ("", "{", '{"figures": "fast"}', '{"figures": [null]}', "[]"):
        kept.path("a").write_text(damage)
        assert kept.read("a") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Costs the time to measure again, and nothing else."""
    (tmp_path / "costs").write_text("a file where the folder would be")
    kept = CostFile(tmp_path / "costs")
    kept.write("a", [1.0])
    assert kept.read("a") is None


def figures(folder: str) -> tuple[Any, Any]:
    """What this rank decides by after compiling with measured costs."""
    os.environ["FXZERO_CACHE_DIR"] = folder
    torch._dynamo.reset()
    model = fxzero.shard(Chain(3, 64), zero=3)
    found: list[Compilation] = []
    observers.append(found.append)
    try:
        step = fxzero.compile_step(
            model,
            torch.optim.AdamW(model.parameters()),
            options={"cost": {"model": "measured"}, "lower_regions": {"backend": "eager"}},
        )
        step(torch.randn(8, 64))
    finally:
        observers.remove(found.append)
        del os.environ["FXZERO_CACHE_DIR"]
    costs = found[0].context.costs
    assert isinstance(costs, MeasuredCosts)
    message = Transfer(TransferKind.ALL_GATHER, 1 << 20, dist.get_world_size())
    return sorted(costs._regions.values()), costs.transfer(message)


def test_all_ranks_decide_by_the_same_figures(ranks: Pools, tmp_path: Path) -> None:
    """Rank 0's, positive, and found on disk by the next run."""
    first, second = ranks(2).run(figures, str(tmp_path))
    assert first == second
    regions, transfer = first
    assert regions
    assert all(us > 0 and math.isfinite(us) for us in regions)
    assert transfer.wire_us > 0
    files = list(tmp_path.glob("costs/*.json"))
    assert files
    for path in files:
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "figures": [v * 2 for v in values["figures"]]}))
    again, _ = ranks(2).run(figures, str(tmp_path))
    assert again[0] == [2 * us for us in regions]


def test_fake_ranks_measure_nothing() -> None:
    """A thousand ranks in one process: their collectives do not run."""
    options = {"cost": {"model": "measured"}}
    with pytest.raises(ConfigError, match=r"needs real ranks.*cost.cluster='dgx_h100'"):
        capture(chain(2), zero=3, world_size=8, options=options)
