"""Whether the parts of a tensor that were saved are all of it.

    │ rank 0: rows 0 to 31 │ rank 1: rows 32 to 63 │ ░░░ nobody has these ░░░ │

torch.distributed.checkpoint reads the parts that are there, and leaves the rest of the memory as it
was: a part that is missing shows as numbers of somebody else.
"""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata


def fault_of_chunks(about: TensorStorageMetadata) -> str:
    """What is wrong with the parts of a tensor; empty if each element is in one of them.

    Parts that are equal, as replicas are, count once. Parts that do not overlap, and have as many
    elements as the tensor, cover it.
    """
    boxes = {(tuple(c.offsets), tuple(c.sizes)): c for c in about.chunks if c.sizes.numel()}
    chunks = list(boxes.values())
    for chunk in chunks:
        if len(chunk.sizes) != len(about.size) or any(
            begin < 0 or begin + length > size
            for begin, length, size in zip(chunk.offsets, chunk.sizes, about.size, strict=False)
        ):
            return f"{_text(chunk)} is not in a tensor of {list(about.size)}"
    twice = _overlapping(chunks)
    if twice is not None:
        return f"{_text(twice[0])} and {_text(twice[1])} overlap"
    held = sum(chunk.sizes.numel() for chunk in chunks)
    if held != about.size.numel():
        return (
            f"its {len(chunks)} parts hold {held:,} of {about.size.numel():,} elements of "
            f"{list(about.size)}"
        )
    return ""


def _overlapping(
    chunks: list[ChunkStorageMetadata],
) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Two parts that share elements: a sweep along the first dim, so that of a thousand shards each
    is compared with the few that are beside it."""
    if not chunks or not chunks[0].sizes:  # a scalar has no place, and is there once
        return None
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda c: tuple(c.offsets)):
        active = [c for c in active if c.offsets[0] + c.sizes[0] > chunk.offsets[0]]
        for other in active:
            if all(
                a < b + b_length and b < a + a_length
                for a, a_length, b, b_length in zip(
                    chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return other, chunk
        active.append(chunk)
    return None


def _text(chunk: ChunkStorageMetadata) -> str:
    spans = zip(chunk.offsets, chunk.sizes, strict=False)
    return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in spans) + "]"
