"""The values of a checkpoint, as one rank finds them.

{"scheduler": {"all": …}}              equal on all ranks that saved it
{"loader": {"ranks": [of 0, of 1]}}    each rank's own, for as many ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fxzero.checkpoint.state import GROUPS, KINDS, STATE_VALUES
from fxzero.checkpoint.values import decode, encode, places_of_kept
from fxzero.errors import CheckpointError


class SavedValues:
    """What is no tensor, by part.

    Args:
        path: of the file, for messages.
        data: what is in it; empty for a checkpoint of others, which has none.
        rank: of this process.
        num_ranks: how many there are now.

    Raises:
        CheckpointError: it is not what a run writes.
    """

    def __init__(self, path: Path, data: bytes, rank: int, num_ranks: int) -> None:
        self.path = path
        self._rank = rank
        self._num_ranks = num_ranks
        self._of_ranks: dict[str, list[Any]] = {}
        """By part, of each rank that saved it; one value, if all had the same."""
        self._is_shared: dict[str, bool] = {}
        try:
            for name, value in json.loads(data or b"{}").items():
                self._is_shared[name] = "all" in value
                self._of_ranks[name] = [value["all"]] if "all" in value else list(value["ranks"])
                for each in self._of_ranks[name]:
                    decode(each)
        except (ValueError, TypeError, KeyError, AttributeError, CheckpointError) as error:
            raise CheckpointError(
                f"{path} is not what a run writes ({type(error).__name__}: {error})"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._of_ranks

    def names(self) -> list[str]:
        """The parts that were saved, beside the optimizer."""
        return sorted(set(self._of_ranks) - {KINDS, GROUPS, STATE_VALUES})

    def num_ranks(self, name: str) -> int:
        """How many ranks had a value of their own; 1 if all had the same."""
        return len(self._of_ranks[name])

    def is_for_this_rank(self, name: str) -> bool:
        """Whether a part's value says what this rank has to have."""
        shared = self._is_shared.get(name, False)
        return name in self and (shared or self.num_ranks(name) == self._num_ranks)

    def _encoded(self, name: str) -> Any:
        return self._of_ranks[name][0 if self._is_shared[name] else self._rank]

    def get(self, name: str, kept: Mapping[str, Tensor] | None = None) -> Any:
        """A part's value for this rank; see `decode`."""
        return decode(self._encoded(name), kept)

    def had_by(self, name: str, rank: int) -> Any:
        """A part's value of a rank that saved it."""
        return decode(self._of_ranks[name][rank])

    def places_of_kept(self, name: str) -> list[str]:
        """Places of large tensors in a part's value."""
        return list(places_of_kept(self._encoded(name)))

    def of_states(self) -> dict[str, dict[str, Any]]:
        """What an optimizer keeps of each parameter that is no tensor: this rank's own, if as many
        ranks saved it, else what all that knew of it had.

        Raises:
            CheckpointError: they had other values, and are not here.
        """
        if STATE_VALUES not in self:
            return {}
        ranks = [decode(each) for each in self._of_ranks[STATE_VALUES]]
        own = self.get(STATE_VALUES) if self.is_for_this_rank(STATE_VALUES) else {}
        found: dict[str, dict[str, Any]] = {}
        for values in (own, *ranks):
            for name, keys in values.items():
                for key, value in keys.items():
                    known = found.setdefault(name, {}).setdefault(key, value)
                    if key in own.get(name, {}) or encode(known, key) == encode(value, key):
                        continue
                    raise CheckpointError(
                        f"{name}.{key} of the optimizer's state was another on each of "
                        f"{len(ranks)} ranks ({known} and {value}), and there are "
                        f"{self._num_ranks} now: {self.path} does not say what each should "
                        "have. Leave the optimizer as it is by leave=('optimizer',)."
                    )
        return found
