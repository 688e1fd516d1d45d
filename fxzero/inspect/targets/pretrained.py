"""Factories that load weights: here tensors have none, so the model is made and nothing is loaded.

    AutoModelForCausalLM.from_pretrained("folder", dtype=torch.bfloat16)     the model of its config

What is no matter of weights is as there: the configuration and changes of it, the dtype, the kind
of attention, eval mode.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxzero.errors import ConfigError
from fxzero.inspect.targets.transformers_models import without_values

_MODULE = "transformers.modeling_utils"
_OF_HUB = ("cache_dir", "revision", "subfolder")
_OF_WEIGHTS = (
    *("_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "adapter_kwargs"),
    *("code_revision", "device_map", "force_download", "ignore_mismatched_sizes", "key_mapping"),
    *("local_files_only", "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers"),
    *("offload_folder", "offload_state_dict", "proxies", "token", "trust_remote_code"),
    *("use_safetensors", "variant", "weights_only"),
)
"""Arguments that say where weights are, and how they come into memory."""
_REFUSED = (
    *("distributed_config", "from_flax", "from_tf", "gguf_file"),
    *("quantization_config", "state_dict", "tp_plan", "tp_size"),
)
"""Arguments by which it is no model of the configuration alone."""


@contextlib.contextmanager
def weights_left_out() -> Iterator[None]:
    """Within it `from_pretrained` of transformers' models reads configurations alone, also where
    transformers is first imported meanwhile."""
    with contextlib.ExitStack() as stack:

        def leave_out(module: Any) -> None:
            model = module.PreTrainedModel
            stack.callback(setattr, model, "from_pretrained", vars(model)["from_pretrained"])
            model.from_pretrained = classmethod(_of_configuration)
            resize = model.resize_token_embeddings
            stack.callback(setattr, model, "resize_token_embeddings", resize)
            # New rows are drawn around the mean of the others, which have no values.
            model.resize_token_embeddings = lambda self, *args, **given: resize(
                self, *args, **{**given, "mean_resizing": False}
            )

        if _MODULE in sys.modules:
            leave_out(sys.modules[_MODULE])
        else:
            finder = _OnImport(leave_out)
            sys.meta_path.insert(0, finder)
            stack.callback(finder.end)
        yield


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls something with the module that has models' base class, once it is imported."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self.then = then

    def end(self) -> None:
        """Look no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Import's question: answered by others, who are told to call back."""
        if fullname != _MODULE:
            return None
        self.end()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _of_configuration(kind: Any, /, name: Any, *args: Any, config: Any = None, **given: Any) -> Any:
    """What a model class has in the place of its `from_pretrained`."""
    import transformers

    refused = [key for key in _REFUSED if given.get(key)]
    if refused:
        raise ConfigError(
            f"{kind.__name__}.from_pretrained({name!r}, {refused[0]}=…): no weights are loaded "
            f"here, and {refused[0]} says what they are like. Make the model of its configuration."
        )
    _refuse_adapter(kind, name, given.get("adapter_kwargs") or {})
    wants_info = given.pop("output_loading_info", False)
    hub = {key: given.pop(key) for key in _OF_HUB if key in given}
    given = {key: value for key, value in given.items() if key not in {*_OF_WEIGHTS, *_REFUSED}}
    own: dict[str, Any] = {k: given.pop(k) for k in ("dtype", "torch_dtype") if k in given}
    kernels = [key for key in given if key.endswith("_implementation")]
    own |= {key: given.pop(key) for key in kernels}
    if isinstance(config, transformers.PretrainedConfig):
        config = copy.deepcopy(config)
    else:
        config, given = kind.config_class.from_pretrained(
            name if config is None else config,
            return_unused_kwargs=True,
            local_files_only=True,
            **hub,
            **given,
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{name!r} has quantized weights, which are not looked at here: of what dtypes and "
            "shapes they are, only they say."
        )
    dtype = own.pop("torch_dtype", None)
    dtype = own.pop("dtype", dtype)
    is_before_5 = int(transformers.__version__.partition(".")[0]) < 5
    if dtype is None and not is_before_5:
        dtype = "auto"
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, dict):
        raise ConfigError(
            f"{kind.__name__}.from_pretrained({name!r}, dtype={dtype}): one dtype is known here. "
            "Convert the parts behind it, or name one."
        )
    with without_values():
        made: nn.Module = kind._from_config(config, *args, dtype=dtype, **own, **given)
    made.tie_weights()  # type: ignore[operator]
    for parameter_name, parameter in made.named_parameters():
        if parameter.is_floating_point() and _is_kept(made, parameter_name, parameter.dtype):
            parameter.data = parameter.data.float()
        if not is_before_5:  # what is loaded takes the place of what a constructor had frozen
            parameter.requires_grad_(parameter.is_floating_point())
    made.eval()
    return (made, {key: set() for key in _INFO}) if wants_info else made


_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
"""What loading tells of weights: nothing is amiss."""


def _refuse_adapter(kind: Any, name: Any, of_adapter: Mapping[str, Any]) -> None:
    """Refuse a folder of adapters, of which peft and transformers would make another model.

    Raises:
        ConfigError: it is one.
    """
    is_one = isinstance(name, str | os.PathLike) and (Path(name) / "adapter_config.json").is_file()
    if is_one or "_adapter_model_path" in of_adapter:
        raise ConfigError(
            f"{kind.__name__}.from_pretrained({str(name)!r}) would add saved adapters, whose "
            "weights are not read here. Make the base model, and add new ones of the same shape: "
            "peft.get_peft_model(base, peft.LoraConfig(…))."
        )


def _is_kept(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether a parameter is loaded in float32 whatever the model's dtype is."""
    kept: set[str] = set()
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)
