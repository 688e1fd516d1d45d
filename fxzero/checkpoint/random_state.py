"""The generators that training draws from, of one rank: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RandomState:
    """All default generators of this process: of the CPU, and of the GPU that is current."""

    def state_dict(self) -> dict[str, Any]:
        """Their states, as they are now. NumPy's if somebody has imported it."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let them go on from there. One that was not saved, or is not here, stays as it is."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
