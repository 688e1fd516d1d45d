"""Parts of a tensor cover it, or it is said what they do instead."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fxzero.checkpoint.coverage import fault_of_chunks

Box = tuple[tuple[int, ...], tuple[int, ...]]


def fault(size: tuple[int, ...], *boxes: Box) -> str:
    """Of parts by their offsets and sizes."""
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    return fault_of_chunks(TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks))


@pytest.mark.parametrize(
    ("size", "boxes"),
    [
        ((), [((), ())]),
        ((4,), [((0,), (4,))]),
        ((4,), [((2,), (2,)), ((0,), (2,))]),
        ((5,), [((0,), (3,)), ((3,), (2,)), ((5,), (0,))]),
        ((4,), [((0,), (4,)), ((0,), (4,))]),
        ((0, 4), [((0, 0), (0, 4))]),
        ((0, 4), []),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))]),
    ],
)
def test_all_of_it(size: tuple[int, ...], boxes: list[Box]) -> None:
    """Shards, uneven and empty ones, replicas, blocks."""
    assert fault(size, *boxes) == ""


@pytest.mark.parametrize(
    ("size", "boxes", "said"),
    [
        ((), [], "its 0 parts hold 0 of 1 elements"),
        ((4,), [((0,), (2,)), ((3,), (1,))], "its 2 parts hold 3 of 4 elements of [4]"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "[0:3] and [2:4] overlap"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap"),  # as many elements as it has
        ((4,), [((2,), (4,))], "[2:6] is not in a tensor of [4]"),
        ((4,), [((0, 0), (2, 2))], "is not in a tensor of [4]"),
        ((4, 4), [((0, 0), (2, 4)), ((1, 1), (2, 2)), ((3, 0), (1, 4))], "overlap"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 3), (4, 1))], "hold 12 of 16"),
    ],
)
def test_less_or_other(size: tuple[int, ...], boxes: list[Box], said: str) -> None:
    """A gap, an overlap, a part of something else."""
    assert said in fault(size, *boxes)


def cut(size: tuple[int, ...], draw: random.Random, pieces: int) -> list[Box]:
    """A tensor in pieces, by cuts through one of them at a time."""
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(pieces):
        offsets, sizes = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(size))
        at = draw.randint(0, sizes[dim])
        first, second = list(sizes), list(sizes)
        first[dim], second[dim] = at, sizes[dim] - at
        moved = list(offsets)
        moved[dim] += at
        boxes += [(offsets, tuple(first)), (tuple(moved), tuple(second))]
    draw.shuffle(boxes)
    return boxes


@pytest.mark.parametrize("seed", range(50))
def test_any_way_to_cut(seed: int) -> None:
    """Nothing is wrong with it; without one piece, or with one moved, something is."""
    draw = random.Random(seed)
    size = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
    boxes = cut(size, draw, draw.randint(0, 8))
    assert fault(size, *boxes) == ""
    full = [box for box in boxes if math.prod(box[1])]
    gone = draw.choice(full)
    left = [box for box in full if box != gone]
    assert "elements of" in fault(size, *left)
    moved = (tuple(offset + 1 for offset in gone[0]), gone[1])
    assert fault(size, *left, moved) != ""


def test_a_thousand_shards_are_looked_at_quickly() -> None:
    """Each is compared with those beside it: a million comparisons would take seconds."""
    rows = [((2 * i, 0), (2, 8)) for i in range(20_000)]
    assert fault((40_000, 8), *rows) == ""
