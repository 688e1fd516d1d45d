"""torchmetrics beside a sharded model, in a loop of one's own, and a sharded model under Fabric."""

from __future__ import annotations

import lightning
import pytest
import torch
import torch.distributed as dist
import torchmetrics

import fxzero
from fxzero.errors import ShardingError
from tests.integrations.lightning_runs import EAGERLY, WORDS, Words, as_torchrun, sentences
from tests.parity.harness import Pools
from tests.tiers import exhaustive


def measure(zero: int | None) -> dict[str, float]:
    """Train three steps, and measure what comes out on this rank's rows and on all."""
    torch.manual_seed(0)
    model = Words()
    if zero is not None:
        fxzero.shard(model, zero)
        model.compile(backend="fxzero", options=EAGERLY)
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy("multiclass", num_classes=WORDS),
            "perplexity": torchmetrics.text.Perplexity(),
        }
    )
    norm = torchmetrics.MeanMetric()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (words,) = sentences().tensors
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        rows = words[8 * step : 8 * step + 8]
        rows = rows if zero is None else rows[rank::world]
        logits = model(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        metrics["accuracy"].update(logits.flatten(0, 1), rows[:, 1:].flatten())
        metrics["perplexity"].update(logits, rows[:, 1:])
        norm.update(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: float(value) for name, value in {**metrics.compute(), "n": norm.compute()}.items()
    }


@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
def test_metrics_of_a_sharded_model_are_of_all_ranks(ranks: Pools, zero: int) -> None:
    here = ranks(2).run(measure, zero)
    assert here[0] == here[1]
    assert here[0] == pytest.approx(ranks(2).run(measure, None)[0], abs=1e-5)


def under_fabric() -> str:
    """Give a sharded model to a Fabric that wraps models by DDP."""
    with as_torchrun():
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        try:
            fabric.setup(fxzero.shard(Words(), 3))
        except ShardingError as error:
            return str(error)
        return "nothing was said"


def test_fabric_does_not_wrap_a_sharded_model(ranks: Pools) -> None:
    assert all("DistributedDataParallel" in said for said in ranks(2).run(under_fabric))
