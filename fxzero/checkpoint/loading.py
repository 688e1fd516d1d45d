"""Loading: the newest checkpoint that is whole, into whatever layout the run has now.

    DIR/step-300   __1_0.distcp is shorter than it was     skipped, and said
    DIR/step-200   whole                                   ──► copies ──► model, optimizer, parts

All ranks read, check and copy first; if one of them meets a byte that was changed, all go on to the
checkpoint before. Only when everything has been read is anything changed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fxzero.checkpoint.folder import is_of_others, is_ours, published
from fxzero.checkpoint.found import Found
from fxzero.checkpoint.ranks import Ranks, all_ranks
from fxzero.checkpoint.saving import wait_for_running
from fxzero.checkpoint.state import TrainState
from fxzero.checkpoint.undo import Before, only_copies
from fxzero.checkpoint.wholeness import NotWholeError
from fxzero.errors import CheckpointError, nearest

log = logging.getLogger("fxzero")


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from."""

    step: int
    """How many steps were trained; 0 of a checkpoint of others, which does not say."""
    path: Path
    skipped: tuple[str, ...]
    """Newer checkpoints that were not whole, each with what is wrong."""
    left: tuple[str, ...]
    """Parts of the run that stay as they were, each with the reason."""


def load(
    state: TrainState,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    leave: Collection[str] | str = (),
    prefix: str | None = None,
) -> Loaded | None:
    """Load a run. All ranks call it.

        loaded = fxzero.checkpoint.load(state, "checkpoints")
        first = loaded.step if loaded is not None else 0

    World size, ZeRO stage, mesh, door and dtypes may be others than those that saved it; the
    generators of ranks that did not exist then are left as they are.

    Args:
        state: what to load into. Nothing of it is changed unless everything could be read.
        folder: where `save` has put checkpoints; or one checkpoint, of ours or of
            `torch.distributed.checkpoint.save`.
        step: load the one that was saved under this number, and no other.
        leave: parts of the run to leave as they are: ``"optimizer"``, ``"scheduler"``,
            ``"loader"``, ``"rng"``, …
        prefix: in a checkpoint of others, what is before the model's names (``"app.model."``),
            where that is not clear.

    Returns:
        What was loaded; None if the folder has no checkpoint at all.

    Raises:
        CheckpointError: no checkpoint is whole; it is of another model; a part of the run is not
            in it.
    """
    wait_for_running()
    with _without_collector():
        return _load(state, folder, step, leave, prefix)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python not look for garbage: of the thousands of objects that say what is where it makes
    none, and walks through all that imports have left, 0.2 s a time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(
    state: TrainState,
    folder: str | os.PathLike[str],
    step: int | None,
    leave: Collection[str] | str,
    prefix: str | None,
) -> Loaded | None:
    ranks = all_ranks()
    leave = (leave,) if isinstance(leave, str) else tuple(leave)
    parts = {"optimizer", *state.parts}
    for name in leave:
        if name not in parts:
            raise CheckpointError(f"leave={name!r}: {nearest(name, parts)}")
    folder = Path(folder)
    skipped: list[str] = []
    candidates = _candidates(folder, step, ranks)
    # Nobody else's code may refuse anything, or see in which order it is done.
    copies = all(ranks.gather(only_copies(state)))
    before = _before(state, ranks, with_model=not copies) if candidates else None
    for path in candidates:
        found = _read(path, state, ranks, leave, prefix, before)
        if isinstance(found, NotWholeError):
            skipped.append(str(found))
            continue
        if step not in (None, found.step):
            raise CheckpointError(f"{path} is the checkpoint of step {found.step}, not {step}")
        _apply(found, before, ranks, model_last=copies)
        if skipped:
            log.warning("checkpoints were skipped: %s", "; ".join(skipped))
        log.info("going on from %s", path)
        return Loaded(found.step, path, tuple(skipped), tuple(found.left))
    if skipped:
        raise CheckpointError(
            f"{folder} has no checkpoint that is whole:\n  " + "\n  ".join(skipped) + "\nNothing "
            "was loaded. Bring one of them back from a copy, or begin anew in another folder."
        )
    if step is not None:
        steps = ranks.from_first([found.step for found in published(folder)])
        raise CheckpointError(f"{folder} has no checkpoint {step}. It has {steps or 'none'}.")
    return None


def _candidates(folder: Path, step: int | None, ranks: Ranks) -> list[Path]:
    """Checkpoints to try, the best first, as rank 0 sees them. A collective.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    error: Exception | None = None
    paths: list[Path] = []
    if ranks.rank == 0:
        try:
            if is_ours(folder) or is_of_others(folder):
                paths = [folder]
            else:
                found = [item for item in published(folder) if step in (None, item.step)]
                paths = [item.path for item in reversed(found)]
        except OSError as met:
            error = CheckpointError(
                f"{folder} is no folder of checkpoints that can be read: {met.strerror}"
            )
    ranks.agree(error)
    return ranks.from_first(paths)


def _read(
    path: Path,
    state: TrainState,
    ranks: Ranks,
    leave: Collection[str],
    prefix: str | None,
    before: Before | None,
) -> Found | NotWholeError:
    """Read a checkpoint, on all ranks. A collective.

    Returns:
        What was read; or, on every rank, that it is not whole for one of them.

    Raises:
        CheckpointError: it is of something else.
    """
    found: Found | None = None
    error: Exception | None = None
    try:
        found = Found(path, state, ranks, leave, prefix)
        found.read(None if before is None else before.copy)
    except Exception as met:
        error = met
    try:
        broken = ranks.gather(str(error) if isinstance(error, NotWholeError) else None)
        ranks.agree(None if isinstance(error, NotWholeError) else error)
    finally:
        error = None  # it holds this frame, and with it all that was read for nothing
    said = [text for text in broken if text is not None]
    if said:
        return NotWholeError(said[0])
    assert found is not None
    return found


_AS_IT_WAS = "Nothing was changed."
_CHANGED = (
    "Some tensors of the model or the optimizer have changed: one rank alone keeps no copies of "
    "them, and several where there is room. The other parts are as they were."
)


def _before(state: TrainState, ranks: Ranks, *, with_model: bool) -> Before | None:
    """Copies to go back to, where other ranks may fail and there is room."""
    if ranks.size == 1:
        return None
    try:
        return Before(state, ranks.size, with_model=with_model)
    except Exception:  # no reason not to load
        return None


def _apply(found: Found, before: Before | None, ranks: Ranks, *, model_last: bool) -> None:
    """Let the run go on from a checkpoint, if all ranks can. A collective.

    Raises:
        CheckpointError: on every rank, if one cannot: which part does not take its state.
    """
    if before is not None:
        before.wait()
    # An optimizer of somebody's own may read what its parameters have become.
    of_tensors = [found.apply_model, found.apply_optimizer]
    for apply in (found.apply_parts, *(reversed(of_tensors) if model_last else of_tensors)):
        error: Exception | None = None
        try:
            apply()
        except CheckpointError as met:
            error = met
        except Exception as met:
            error = CheckpointError(
                f"{found.path} was read whole, and the model or its optimizer does not take it: "
                f"{type(met).__name__}: {met}."
            )
            error.__cause__ = met
        try:
            ranks.agree(error)
        except CheckpointError as error:
            found.take_back()
            whole = apply == found.apply_parts or (before is not None and before.restore())
            raise CheckpointError(f"{error} {_AS_IT_WAS if whole else _CHANGED}") from error
