"""Whole weights, gathered tensor by tensor to the rank that writes them.

Every rank takes part; one whole tensor is held at a time, and all of them on the host of the rank
that writes. Tensors that have several names stay one, so that whoever writes sees that they are
tied.

    model.save_pretrained("folder")     on all ranks: whole weights, by rank 0
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fxzero.checkpoint.ranks import all_ranks
from fxzero.errors import ConfigError
from fxzero.integrations.transformers import adapters
from fxzero.integrations.whole import whole_weights


def weights_to_save(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Whole weights as ``model.save_pretrained(state_dict=…)`` takes them: of a model of peft, the
    adapters'. A collective.

    Args:
        keep: see `whole_weights`.
    """
    if not adapters.is_peft(model):
        return whole_weights(model, keep=keep)
    ranks = all_ranks()  # peft may ask the hub about the base model: rank 0 alone
    names = ranks.from_first(adapters.adapter_names(model) if ranks.rank == 0 else None)
    return whole_weights(model, keep=keep, names=names)


def save_whole(model: nn.Module, *, by_callback: bool = False) -> None:
    """Let a sharded model's own ``save_pretrained`` write whole weights, called on all ranks; and
    those of models in it, of which one may be what is left of it: peft's ``merge_and_unload``.

    Args:
        by_callback: whether the Trainer is not ours, and calls it on one rank alone.
    """
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            _save_whole(part, by_callback)


def _save_whole(model: Any, by_callback: bool) -> None:
    plain = model.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and kwargs.get("state_dict") is None:
            if by_callback and "state_dict" in kwargs:  # None, as Trainer says
                raise ConfigError(
                    "trainer.save_model() writes on one rank alone, and others have parts of the "
                    "weights. Call trainer.model.save_pretrained(folder) on all ranks, or use "
                    "FxZeroMixin instead of FxZeroCallback."
                )
            writes = all_ranks().rank == 0
            kwargs["state_dict"] = weights_to_save(model, keep=writes)
            if not writes:
                return None
        return plain(save_directory, *args, **kwargs)

    model.save_pretrained = save_pretrained
