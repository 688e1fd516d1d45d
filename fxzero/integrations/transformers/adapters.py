"""peft: adapters are trained and saved, and the model below them is neither.

checkpoint-100/adapter_model.safetensors   as peft writes it: PeftModel.from_pretrained reads it
checkpoint-100/fxzero/                     the adapters' shards and their optimizer's state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxzero.errors import ShardingError


def is_peft(model: nn.Module) -> bool:
    """Whether a model is peft's, without importing peft for it."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def refuse_prompts(model: nn.Module) -> None:
    """Refuse adapters that peft computes with outside of a forward.

    Raises:
        ShardingError: prompts are learned.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ShardingError(
                f"adapter {name!r} ({config.peft_type}) learns a prompt, which peft reads outside "
                "of the model's forward when it saves. Use LoRA, or zero=0 in a single process."
            )


class Trained(nn.Module):
    """A view of a model that has the trained parameters, and buffers, alone.

    It is what `fxzero.TrainState` saves: the frozen model is loaded from where it came from.
    """

    whole: nn.Module

    def __init__(self, whole: nn.Module) -> None:
        """Look at a model."""
        super().__init__()
        vars(self)["whole"] = whole  # no sub-module: names stay

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those of the model."""
        yield from (m for _, m in self.whole.named_modules(remove_duplicate=remove_duplicate))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained ones, by the model's names."""
        for name, parameter in self.whole.named_parameters(*args, **kwargs):
            if parameter.requires_grad:
                yield name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the model."""
        yield from self.whole.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The trained part of the model's."""
        named = self.whole.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        whole = self.whole.state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name not in frozen}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the trained part."""
        return self.whole.load_state_dict(dict(state_dict), strict=False)


def adapter_names(model: Any) -> set[str]:
    """The entries of a peft model's state dict that its ``save_pretrained`` writes.

    peft is given a state dict of marks, and what it takes of them is looked up.
    """
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    names_of = {id(mark): name for name, mark in marks.items()}
    found: set[str] = set()
    for adapter in model.peft_config:
        taken = get_peft_model_state_dict(model, state_dict=dict(marks), adapter_name=adapter)
        if any(id(mark) not in names_of for mark in taken.values()):
            return set(marks)  # peft has made something of them: it gets everything
        found |= {names_of[id(mark)] for mark in taken.values()}
    return found
