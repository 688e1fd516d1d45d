"""Rows of a step, of a rank's micro-batch, and how many there are: two of three say the third.

    train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · world size

As DeepSpeed derives what is missing, and refuses what does not multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxzero.integrations.deepspeed.lines import Found

WHOLE, ROWS, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Batches:
    """How many rows, and in how many parts."""

    whole: int
    """Rows of a step, over all ranks."""
    rows: int
    """Rows of a micro-batch, on each rank."""
    micro_batches: int
    """Micro-batches of a step."""


def map_batches(found: Found, world_size: int) -> Batches:
    """Find all three; where they do not hold, refuse and go on with ones."""
    whole, rows, steps = (found.get(name) for name in (WHOLE, ROWS, STEPS))
    if whole is None and rows is None:
        for name in (WHOLE, ROWS):
            if name in found.lines and name in {line.key for line in found.refused}:
                return Batches(world_size, 1, 1)
        found.refuse(WHOLE, f"say it, or {ROWS}: no step has a size.")
        return Batches(world_size, 1, 1)
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    if whole is None:
        assert rows is not None
        steps = steps or 1
        whole = rows * steps * world_size
    elif rows is None:
        steps = steps or 1
        rows = whole // world_size // steps
    elif steps is None:
        steps = whole // rows // world_size
    if not rows or not steps or whole != rows * steps * world_size:
        product = f"{rows} rows · {steps} micro-batches · {ranks} = {rows * steps * world_size}"
        fits = whole // (rows * steps) if rows and steps and not whole % (rows * steps) else 0
        other = f" World size {fits} would fit." if fits else ""
        found.refuse(
            WHOLE if found.has(WHOLE) else ROWS,
            f"{product}, which is not {whole}. Change one of the three, or the ranks.{other}",
        )
        return Batches(world_size, 1, 1)
    found.mapped(WHOLE, f"{whole} rows a step, over {ranks}")
    found.mapped(ROWS, f"{rows} rows a micro-batch, on each rank")
    found.mapped(STEPS, f"compile_step(micro_batches={steps})")
    return Batches(whole, rows, steps)
