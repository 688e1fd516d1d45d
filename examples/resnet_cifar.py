"""Train a ResNet on images of CIFAR's shape, its parameters and optimizer state sharded.

    torchrun --standalone --nproc-per-node 2 examples/resnet_cifar.py --zero 2
    torchrun --standalone --nproc-per-node 2 examples/resnet_cifar.py --zero 3 --tiny

The images are drawn here, ten classes of coloured noise: nothing to download, and something to
learn. BatchNorm takes its statistics over this rank's rows, as it does under
DistributedDataParallel, which `--ddp` trains by the same loop; what it keeps of them is rank 0's on
all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

import fxzero
from examples.logs import StepLog, open_log
from examples.ranks import mean_over_ranks, rank, set_threads, world_size

CLASSES = 10


class Block(nn.Module):
    """Two convolutions and a way past them (He et al. 2016, figure 2)."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.past = nn.Conv2d(before, width, 1, stride, bias=False) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C', H/s, W/s)."""
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + (x if self.past is None else self.past(x)))


class ResNet(nn.Module):
    """The ResNet for CIFAR (He et al. 2016, section 4.2): three groups, 6·blocks + 2 layers."""

    def __init__(self, blocks: int, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers, before = [], width
        for group in range(3):
            for i in range(blocks):
                after = width << group
                layers.append(Block(before, after, 2 if group and not i else 1))
                before = after
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (B, 3, 32, 32): logits (B, 10), or the mean loss if labels (B,) are given."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits, labels)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, Tensor]:
        """Random images and labels."""
        device = self.head.weight.device
        images = torch.randn(batch_size, 3, 32, 32, device=device)
        return images, torch.randint(CLASSES, (batch_size,), device=device)


def resnet20() -> ResNet:
    """0.27 million parameters."""
    return ResNet(3)


def batch_of(step: int, rows: int, classes: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch: noise around a mean of each class (10, 3, 1, 1)."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    images = classes[labels] + torch.randn(rows, 3, 32, 32, generator=generator)
    own = slice(rank() * rows // world_size(), (rank() + 1) * rows // world_size())
    return images[own], labels[own]


def main() -> None:
    """Train, and say how many of new images are told right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zero", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, no fxzero")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="rows of a step, over all ranks")
    parser.add_argument("--options", default={}, type=json.loads, help="the compiler's, as JSON")
    parser.add_argument("--tiny", action="store_true", help="one block in each group, 4 channels")
    parser.add_argument("--output", type=Path, default=Path("outputs/resnet_cifar"))
    args = parser.parse_args()
    fxzero.init_distributed()
    set_threads(None)

    torch.manual_seed(0)
    model: nn.Module = ResNet(1, 4) if args.tiny else resnet20()
    compiled = model = (
        DistributedDataParallel(model) if args.ddp else fxzero.shard(model, args.zero)
    )
    if not args.ddp:
        compiled = torch.compile(model, backend="fxzero", options=args.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    classes = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    with open_log(args.output, args.steps, {**vars(args), "output": str(args.output)}) as log:
        steps = StepLog(log, model, every=1 if args.tiny else 10, samples_per_step=args.batch)
        for number in range(1, args.steps + 1):
            loss = compiled(*batch_of(number, args.batch, classes))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.after(number, loss.detach(), 0.1)
        model.eval()
        with torch.no_grad():
            images, labels = batch_of(0, args.batch, classes)
            right = mean_over_ranks((model(images).argmax(1) == labels).float().mean())
        log.record(args.steps, accuracy=right)
        log.say(f"told right: {right:.1%} of {args.batch} new images")


if __name__ == "__main__":
    main()
