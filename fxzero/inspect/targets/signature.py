"""Inputs for a forward that nobody wrote any for: by the names of its arguments.

    transformers    what the model's class is called with in training, sizes from its config:
                    tokens, images, sound; and labels as its class (…ForCausalLM) means them
    other modules   the first argument as the first layer reads it (an embedding reads ids, a
                    convolution images), and targets as the last one writes them

A guess is tried before it is used, on tensors without values, and shown wherever it is used. What
cannot be guessed is asked for: `fxzero.inspect.targets.batches.parse`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxzero._compat import as_if_compiling
from fxzero.errors import ConfigError
from fxzero.inspect.targets.batch import Batch
from fxzero.inspect.targets.calls import raised_at

DEFAULT_SEQ_LEN = 2048
"""Tokens of a row, where the model can read as many."""
_IMAGE = 224
_TARGETS = ("labels", "targets", "target", "y")
_BY_HAND = "Say it by --inputs, as in --inputs 'ids=int64[B,S]<50257, x=float32[B,3,224,224]'."


def guessed(model: nn.Module, rows: int, seq_len: int | None) -> dict[str, Any]:
    """Keyword arguments to train a model with.

    Args:
        rows: of the batch.
        seq_len: tokens of each row; by default as many as the model can read, 2,048 at most.

    Raises:
        ConfigError: they cannot be guessed; the message names what cannot.
    """
    base = getattr(model, "get_base_model", None)  # of peft's wrappers, which pass on what comes
    read_by = base() if callable(base) else model
    kind = _Transformers if _is_transformers(read_by) else _Plain
    maker: _Maker = kind(read_by, rows, seq_len)
    inputs = maker.inputs()
    if seq_len is not None and not maker.reads_tokens:
        raise ConfigError(
            f"seq_len={seq_len} has no effect: {type(model).__name__} reads no rows of tokens"
        )
    _try(model, inputs)
    return inputs


def _is_transformers(model: nn.Module) -> bool:
    """Without importing transformers, which need not be there."""
    return any(
        kind.__module__.startswith("transformers.") and kind.__name__ == "PreTrainedModel"
        for kind in type(model).__mro__
    )


def _try(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """See that a forward runs.

    Raises:
        ConfigError: it does not; the message shows what was tried.
    """
    try:
        with torch.no_grad(), as_if_compiling():
            model(**inputs)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"no batch was given for {type(model).__name__}, and the one made by its forward's "
            f"arguments, {Batch((), inputs).text()}, raised {type(error).__name__} at "
            f"{raised_at(error)}: {reason[:400]}. {_BY_HAND}"
        ) from error


def _arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Of forward, but for ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(model.forward).parameters.items()
    return {name: p for name, p in found if p.kind not in variadic}


class _Maker:
    """Inputs for one model, on its device and in its dtype."""

    lengths: ClassVar[tuple[str, ...]]
    """How configurations name the most tokens of a row."""

    def __init__(self, model: Any, rows: int, seq_len: int | None) -> None:
        self.model = model
        self.rows = rows
        self.arguments = _arguments(model)
        self.config: Any = getattr(model, "config", None)
        self.reads_tokens = False
        self._seq_len = seq_len
        first = next(model.parameters(), torch.empty(0))
        self._device, self._dtype = first.device, first.dtype

    def inputs(self) -> dict[str, Any]:
        """What its forward is called with."""
        raise NotImplementedError

    @property
    def seq_len(self) -> int:
        """Tokens of a row; whoever asks reads rows of them."""
        self.reads_tokens = True
        if self._seq_len is not None:
            return self._seq_len
        sizes = [getattr(self.text_config, name, None) for name in self.lengths]
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        return min([*known, DEFAULT_SEQ_LEN])

    @property
    def text_config(self) -> Any:
        """Where it says what it can read."""
        return self.config

    def integers(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below one."""
        return torch.randint(high, shape, device=self._device)

    def floats(self, *shape: int) -> Tensor:
        """In the parameters' dtype."""
        return torch.randn(shape, device=self._device, dtype=self._dtype)

    def refusal(self, why: str) -> ConfigError:
        """The error that no inputs can be made."""
        return ConfigError(
            f"no batch can be made for {type(self.model).__name__}: {why}. {_BY_HAND} Or give the "
            "model an example_inputs(batch_size), or let the factory return (model, inputs)."
        )


class _Transformers(_Maker):
    """What a model of transformers is trained with."""

    lengths = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    def inputs(self) -> dict[str, Any]:
        main = self.model.main_input_name
        makers = {
            "input_ids": self._ids,
            "pixel_values": self._pixels,
            "input_values": self._wave,
            "input_features": self._spectrum,
        }
        if main not in makers:
            raise self.refusal(f"it reads {main}")
        found: dict[str, Any] = {main: makers[main]()}
        both = self._get("vision_config") is not None and self._get("image_token_id") is None
        if both and "pixel_values" in self.arguments:
            found["pixel_values"] = self._pixels()
        found |= self._labels()
        shifts = self._get("decoder_start_token_id") is not None and "labels" in found
        if self._get("is_encoder_decoder") and not shifts:
            found["decoder_input_ids"] = self._ids()
        if "use_cache" in self.arguments:
            found["use_cache"] = False
        return found

    def _labels(self) -> dict[str, Any]:
        kind = type(self.model).__name__
        integers = self.integers
        classes = getattr(self.config, "num_labels", 2)
        if "start_positions" in self.arguments:
            places = integers(self.seq_len, self.rows)
            return {"start_positions": places, "end_positions": places}
        if "return_loss" in self.arguments:
            return {"return_loss": True}
        if "labels" not in self.arguments:
            return {}
        if re.search(r"LMHead|ForCausalLM|ForMaskedLM|ForConditional|ForPreTraining$", kind):
            return {"labels": self._ids()}
        if re.search(r"For(Sequence|Image|Audio|Video)Classification", kind):
            return {"labels": integers(classes, self.rows)}
        if "TokenClassification" in kind:
            return {"labels": integers(classes, self.rows, self.seq_len)}
        if "SemanticSegmentation" in kind:
            return {"labels": integers(classes, self.rows, *self._image_size())}
        raise self.refusal(f"what labels of {kind} are is not known")

    def _ids(self) -> Tensor:
        return self.integers(self.text_config.vocab_size, self.rows, self.seq_len)

    def _pixels(self) -> Tensor:
        channels = self._get("num_channels", of_images=True) or 3
        return self.floats(self.rows, channels, *self._image_size())

    def _image_size(self) -> tuple[int, int]:
        size = self._get("image_size", of_images=True) or _IMAGE
        return tuple(size) if isinstance(size, (list, tuple)) else (size, size)

    def _wave(self) -> Tensor:
        return self.floats(self.rows, 16000)  # a second of sound

    def _spectrum(self) -> Tensor:
        bins = self._get("num_mel_bins") or 80
        frames = 2 * (self._get("max_source_positions") or 1500)  # a stride of two reads them
        return self.floats(self.rows, bins, frames)

    def _get(self, name: str, of_images: bool = False) -> Any:
        vision = getattr(self.config, "vision_config", None) if of_images else None
        return getattr(self.config if vision is None else vision, name, None)


class _Plain(_Maker):
    """What any other module is called with."""

    lengths = ("block_size", "max_seq_len", "context_length", "n_positions")

    @cached_property
    def first(self) -> nn.Module | None:
        """The layer that reads the input."""
        return next(self._layers(), None)

    def inputs(self) -> dict[str, Any]:
        needed = [name for name, p in self.arguments.items() if p.default is p.empty]
        targets = [name for name in self.arguments if name in _TARGETS]
        read = [name for name in needed if name not in targets]
        if len(read) != 1 or len(targets) > 1:
            what = ", ".join(needed) or "nothing that is needed"
            raise self.refusal(
                f"its forward takes {what}, of which more than one could be anything"
            )
        found = {read[0]: self._input()}
        return found | {name: self._target() for name in targets}

    def _layers(self) -> Iterator[nn.Module]:
        """Layers whose input's shape is known, in the order in which they were made."""
        kinds = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
        return (module for module in self.model.modules() if isinstance(module, kinds))

    def _input(self) -> Tensor:
        match self.first:
            case nn.Embedding(num_embeddings=count):
                return self.integers(count, self.rows, self.seq_len)
            case nn.Linear(in_features=width):
                return self.floats(self.rows, width)
            case nn.Conv1d(in_channels=channels):
                return self.floats(self.rows, channels, self.seq_len)
            case nn.Conv2d(in_channels=channels):
                return self.floats(self.rows, channels, _IMAGE, _IMAGE)
            case nn.Conv3d(in_channels=channels):
                return self.floats(self.rows, channels, 16, 112, 112)
            case nn.RNNBase(input_size=width, batch_first=True):
                return self.floats(self.rows, self.seq_len, width)
        raise self.refusal("no layer of it says what it reads")

    def _target(self) -> Tensor:
        """Ids like those that it reads, or a class: as many as its last linear layer has."""
        if isinstance(self.first, nn.Embedding):
            return self.integers(self.first.num_embeddings, self.rows, self.seq_len)
        last = [layer for layer in self._layers() if isinstance(layer, nn.Linear)]
        if not last:
            raise self.refusal("no layer of it says what its targets are")
        return self.integers(last[-1].out_features, self.rows)
