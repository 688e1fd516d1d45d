"""Steps in stages, on one rank of many that exist only in name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero.graph import StepGraph
from fxzero.inspect.capture import fake_ranks
from tests.tracing import observed


class Skips(nn.Module):
    """Four layers; the last one also reads what the first one has made, and both ends a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = first = torch.tanh(self.h[0](self.table(ids)))
        mask = torch.arange(8) > 2  # needs no parameter: every reader makes it
        for layer in self.h[1:]:
            x = torch.tanh(layer(x)) * mask
        return F.cross_entropy(self.head(x + first), ids)


class Decoder(nn.Module):
    """Two layers encode; what the others decode is looked up in the table that both ends share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded = nn.Embedding(12, 8)
        self.decoded = nn.Embedding(12, 8)
        self.decoded.weight = self.encoded.weight
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.h[1](torch.tanh(self.h[0](self.encoded(ids)))))
        y = torch.relu(self.decoded(ids) * 2)
        return (torch.tanh(self.h[2](y + x)) + self.h[3](y)).pow(2).mean()


DECODER = {"encoded": 0, "decoded": 2, **{f"h.{i}": i for i in range(4)}}
STAGES = {"table": 0, "head": 3, **{f"h.{i}": i for i in range(4)}}


def scheduled(
    place: int,
    *,
    schedule: str = "1f1b",
    zero: int = 0,
    shards: int = 1,
    micro_batches: int = 6,
    clip: float | None = None,
    build: Callable[[], nn.Module] = Skips,
    stages: Mapping[str, int] = STAGES,
    lowering: str = "eager",
    batch: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> StepGraph:
    """The scheduled step of a rank of one of four places."""
    shape, names = (4, shards), ("pipeline", "shard")
    seen: list[Any] = []

    def keep(compilation: Any) -> None:
        compilation.keep_graphs = True
        seen.append(compilation)

    torch._dynamo.reset()
    with fake_ranks(4 * shards, place * shards), observed(keep):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = build()
        fxzero.shard(model, zero=zero, mesh=mesh, stages=stages, schedule=schedule)
        step = fxzero.compile_step(
            model,
            torch.optim.AdamW(model.parameters(), fused=True),
            micro_batches=micro_batches,
            clip_grad_norm=clip,
            options={"lower_regions": {"backend": lowering}, **(options or {})},
        )
        step(torch.zeros(2 * micro_batches, dtype=torch.long) if batch is None else batch)
    graph: StepGraph = seen[0].joint
    return graph
