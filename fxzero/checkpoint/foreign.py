"""Checkpoints that `dcp.save` has written by itself: FSDP2's, say. Under which names things are.

{"model": …, "optim": …}           model.h.0.weight       optim.state.h.0.weight.exp_avg
{"app": AppState}                  app.model.h.0.weight   app.optim.state.h.0.weight.exp_avg
get_model_state_dict(model)        h.0.weight
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from fxzero.errors import CheckpointError


def prefix_of_model(path: Path, saved: Collection[str], names: Sequence[str]) -> str:
    """What is before the names of a model's tensors.

    Args:
        path: of the checkpoint, for messages.
        saved: names in it.
        names: the model's, plain.

    Raises:
        CheckpointError: it has the model not at all, or several times.
    """
    ends = [name.removesuffix(names[0]) for name in saved if name.endswith(names[0])]
    known = set(saved)
    found = [
        prefix
        for prefix in ends
        if prefix[-1:] in ("", ".") and all(prefix + name in known for name in names)
    ]
    if len(found) == 1:
        return found[0]
    raise CheckpointError(
        f"{path} has "
        + (f"this model under several names, {sorted(found)}" if found else "not this model")
        + f": looked for {names[0]} and {len(names) - 1} others among {len(saved)} names, such as "
        f"{', '.join(itertools.islice(sorted(saved), 3))}. Say prefix='app.model.', or whatever is "
        "before the names."
    )


def prefix_of_optimizer(path: Path, saved: Collection[str], names: Sequence[str]) -> str:
    """What is before the names of parameters whose states an optimizer keeps.

    Raises:
        CheckpointError: there are none, or several of one parameter.
    """
    found: list[str] = []
    for name in names:  # one that was never updated has no state
        middle = f"state.{name}."
        found = sorted({n.partition(middle)[0] + "state." for n in saved if middle in n})
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise CheckpointError(
        f"{path} has "
        + (f"several states of {names[0]}, under {found}" if found else "no optimizer state")
        + ". Leave the optimizer as it is by leave=('optimizer',)."
    )
