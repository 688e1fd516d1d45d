"""Modules as people write them for Lightning, beyond the plain one of `lightning_runs`."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integrations.lightning_runs import WORDS, Module, Words


class CallsItsChild(Module):
    """`forward` is not what training runs."""

    def loss(self, batch: Any) -> Tensor:
        """By the child itself."""
        (tokens,) = batch
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TouchesParts(Module):
    """Submodules and a weight, outside of any forward."""

    def loss(self, batch: Any) -> Tensor:
        """By layers, and a penalty on a weight."""
        (tokens,) = batch
        x = self.model.embed(tokens[:, :-1])
        for layer in self.model.layers:
            x = layer(x)
        logits = F.linear(x, self.model.head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        penalty = 1e-3 * self.model.head.weight.square().sum()
        self.log("penalty", penalty, sync_dist=True)
        return loss + penalty

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Logs the norm of all gradients, as ranks have it together."""
        norm = nn.utils.clip_grad_norm_(self.parameters(), 1e9)
        self.log("norm", norm, sync_dist=True)


class Sums(Module):
    """With buffers that its forward changes, and a penalty from all parameters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm = nn.BatchNorm1d(WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Normalised logits."""
        logits = self.model(tokens)
        return self.norm(logits.flatten(0, 1)).view_as(logits)


class ChildSums(Module):
    """Whose steps call children with buffers, and not the forward of the whole."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Sequential(self.model, nn.Flatten(0, 1), nn.BatchNorm1d(WORDS))

    def loss(self, batch: Any) -> Tensor:
        """Of predicting each next word."""
        (tokens,) = batch
        return F.cross_entropy(self.net(tokens[:, :-1]), tokens[:, 1:].flatten())


class Measures(Module):
    """With metrics of torchmetrics, in a child, a list and a collection; one has a network."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=WORDS)
        self.each = torchmetrics.MetricCollection(
            {"mean": torchmetrics.MeanMetric(), "kept": torchmetrics.CatMetric()}
        )
        self.distance = Distance()

    def validation_step(self, batch: Any, index: int) -> None:
        """Counts right answers."""
        logits = self(batch[0][:, :-1])
        self.accuracy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.each.update(logits.mean((1, 2)))
        self.distance.update(logits)
        self.log("accuracy", self.accuracy)
        self.log("distance", self.distance)

    def on_validation_epoch_end(self) -> None:
        """Over all ranks."""
        found = self.each.compute()
        self.extra = sorted(found["kept"].tolist())
        self.log("mean", found["mean"])
        self.each.reset()


class Distance(torchmetrics.Metric):
    """As FID does it: by the features of a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(WORDS, 2).requires_grad_(False)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor) -> None:
        """Features of a batch."""
        features = self.network(logits)
        self.total += features.sum()
        self.seen.append(features.flatten())

    def compute(self) -> Tensor:
        """Their sum, twice."""
        seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        return self.total + seen.sum()


class SkipsALayer(Module):
    """Whose second of two micro-batches does without a layer."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """A layer less in each other batch."""
        self.skips = index % 2 == 1
        return super().training_step(batch, index)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.model.embed(tokens)
        for layer in self.model.layers[: 1 if getattr(self, "skips", False) else 2]:
            x = layer(x)
        return self.model.head(x)


class Adversaries(LightningModule):
    """Two networks, two optimizers, and backwards by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.makes = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 9))
        self.judges = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        """First one, then the other."""
        real = batch[0] / WORDS
        noise = real.flip(1).roll(1, 0)
        makes, judges = self.optimizers()
        self.toggle_optimizer(makes)
        loss = F.softplus(-self.judges(self.makes(noise))).mean()
        self._step(makes, loss)
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        fake = self.judges(self.makes(noise).detach())
        self._step(judges, F.softplus(fake).mean() + F.softplus(-self.judges(real)).mean())
        self.untoggle_optimizer(judges)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.losses.append(float(loss))
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()

    def validation_step(self, batch: Any, index: int) -> None:
        """How it judges."""
        self.log("val", self.judges(batch[0] / WORDS).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """One each."""
        return (
            torch.optim.Adam(self.makes.parameters(), 1e-2),
            torch.optim.SGD(self.judges.parameters(), 0.1, momentum=0.9),
        )


class ListedEarly(Module):
    """Its optimizer, and the list of its parameters, are older than its shards."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        decays = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() < 2]
        self.groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest}]
        self.made = torch.optim.AdamW(self.groups, lr=1e-2)

    def configure_optimizers(self) -> Any:
        """Made long ago."""
        return self.made


class LineSearched(Module):
    """LBFGS calls the step several times, and takes products over all parameters."""

    def configure_optimizers(self) -> Any:
        """See the class."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OnMeta(LightningModule):
    """Made where its parameters have no memory."""

    training_step = Module.training_step
    validation_step = Module.validation_step
    loss = Module.loss
    forward = Module.forward
    configure_optimizers = Module.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 1e-2})
        self.losses: list[float] = []
        self.model: Any = None

    def configure_model(self) -> None:
        """Once."""
        if self.model is None:
            with torch.device("meta"):
                self.model = Words()
