"""Models of transformers by their configuration: no weights, no network, and no code of theirs.

hf:llama                  a kind of model, in the size that its configuration has by default
hf:path/to/config.json    a configuration, or the folder of one
hf:org/name               one that has been downloaded before: only its config.json is read
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxzero._compat import is_fake
from fxzero.errors import ConfigError, nearest
from fxzero.inspect.targets.calls import asked
from fxzero.inspect.targets.presets import Preset

PREFIX = "hf:"


def model_of(config: Any) -> nn.Module:
    """The model of a configuration, with the head that it was trained with, in train mode; or with
    one that its kind is trained with, where the configuration names none.

    Where tensors have no values none are set: some ways to draw them read what they have drawn.

    Raises:
        ConfigError: it has a negative number of layers.
    """
    import transformers

    for name in _LAYERS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count < 0:  # Python repeats nothing so often, without a word
            raise ConfigError(
                f"{type(config).__name__} has {name}={count}, which no model has: write how many "
                "layers there are."
            )
    named = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, named, None) if isinstance(named, str) else None
    with without_values() if is_fake(torch.empty(0)) else contextlib.nullcontext():
        if kind is not None:
            made = asked(lambda: kind(config), f"{named}(config)")
        else:
            auto = _head_of(transformers, config)
            made = asked(lambda: auto.from_config(config), f"{auto.__name__}.from_config(config)")
    made.tie_weights()  # which is part of what was left out
    model: nn.Module = made
    return model.train()


_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
"""Of a configuration, what says how many times something is made."""
_HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification")
_HEADS_OF_BOTH = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
"""Of an encoder with a decoder, whose decoder alone would be a causal language model too."""


def _head_of(transformers: Any, config: Any) -> Any:
    both = bool(getattr(config, "is_encoder_decoder", False))
    for name in (*(_HEADS_OF_BOTH if both else ()), *_HEADS):
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModel


def without_values() -> contextlib.AbstractContextManager[None]:
    """What keeps transformers from initializing a model."""
    place = "transformers.initialization"
    if importlib.util.find_spec(place) is None:  # before transformers 5
        place = "transformers.modeling_utils"
    found: contextlib.AbstractContextManager[None] = importlib.import_module(
        place
    ).no_init_weights()
    return found


def of_preset(preset: Preset) -> nn.Module:
    """A model that is meant by a name."""
    transformers = imported()
    config = getattr(transformers, preset.config)(**preset.settings)
    config.architectures = [preset.model]
    return model_of(config)


def config_of(name: str) -> Any:
    """The configuration that is meant by what follows ``hf:``.

    Raises:
        ConfigError: there is none, here and now; the message says how to get one.
    """
    transformers = imported()
    path = Path(name)
    if name.endswith(".json") or path.is_dir():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{PREFIX}{name}: there is no file {str(file)!r} in {Path.cwd()}")
        return _read(transformers, str(file))
    kinds = transformers.CONFIG_MAPPING
    if name in kinds:
        return asked(lambda: kinds[name](), f"{kinds[name].__name__}()")
    if name.count("/") != 1:
        raise ConfigError(
            f"{PREFIX}{name}: transformers has no kind of model {name!r}: {nearest(name, kinds)}. "
            "Or name a config.json, its folder, or org/name of one that was downloaded."
        )
    return _read(transformers, name)


def imported() -> Any:
    """transformers.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ConfigError(
            "this model is one of transformers, which is not installed: pip install 'fxzero[hf]'"
        ) from None
    return transformers


def _read(transformers: Any, name: str) -> Any:
    # Code that came with a configuration is not run, and nobody is asked about it.
    try:
        return transformers.AutoConfig.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except OSError as error:
        if Path(name).exists():
            raise _unreadable(name, error) from None
        raise ConfigError(
            f"{PREFIX}{name} was not downloaded, and nothing is fetched here. Get its shape alone, "
            f"no weights: hf download {name} config.json"
        ) from None
    except Exception as error:
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())
    return ConfigError(f"{PREFIX}{name} is no configuration that can be read: {reason}")


def compute_dtype(config: Any) -> torch.dtype | None:
    """What a configuration says its model computes in, where that is less than float32."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return found if found in (torch.bfloat16, torch.float16) else None
