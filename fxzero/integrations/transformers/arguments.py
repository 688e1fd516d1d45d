"""Which of Trainer's arguments fxzero can keep, looked at before anything is made.

kept as they are     accumulation, clipping, schedules, evaluation, saving, logging, loss counts
said to fxzero       bf16 → param_dtype, torch_compile → its own compiler
refused              another engine, another wrap, what would be wrong on shards without a word
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxzero.errors import ConfigError, ShardingError
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.transformers import adapters
from fxzero.sharding.shard import model_state, param_specs

ON_SHARDS = ("adafactor", "adagrad", "adamw_torch", "adamw_torch_fused", "rmsprop", "sgd")
"""Values of ``optim=`` whose updates are right on shards: elementwise, or through DTensor."""
_HOOKED = ("lomo", "adalomo", "layerwise")
"""Parts of names of optimizers that update in hooks of backward, before gradients are reduced."""


def check_arguments(args: Any, plugin: FxZeroPlugin) -> None:
    """Refuse arguments that fxzero cannot keep.

    Raises:
        ConfigError: one of them, with what does the same here.
    """
    _refuse_engines(args)
    _refuse_precision(args, plugin)
    _refuse_compilers(args, plugin)
    _leave_graphs_whole(args)
    refused = {
        "auto_find_batch_size": "a rank whose memory ends would begin anew alone, and the others "
        "wait for it. Set per_device_train_batch_size, and options={'memory_budget': …} for what "
        "a rank may hold",
        "use_liger_kernel": "it replaces forwards of modules that are sharded already. fxzero's "
        "pass lower_kernels does the same for what it finds; or patch the model by Liger's own "
        "call before the Trainer gets it",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise ConfigError(f"{name}=True and fxzero: {why}.")
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, and Trainer would copy the model to each "
            "(nn.DataParallel). Start a process for each: torchrun --nproc-per-node …"
        )
    if args.world_size > 1 and plugin.zero and not _even_batches(args):
        raise ConfigError(
            "accelerator_config even_batches=False gives ranks different numbers of batches, and "
            f"at zero={plugin.zero} every rank is needed for every batch. Leave it at True."
        )
    if getattr(args, "save_on_each_node", False) and not args.save_only_model:
        raise ConfigError(
            "save_on_each_node=True: a checkpoint of fxzero is one folder that all hosts share, to "
            "which each rank writes its shards. Give output_dir on a shared file system, or save "
            "weights alone (save_only_model=True)."
        )


def check_launched(args: Any, accelerator: Any) -> None:
    """Refuse what `accelerate launch` was told, and the Trainer was not: plain Trainer does it, and
    here nobody would.

    Args:
        accelerator: the Trainer's.

    Raises:
        ConfigError: a precision, or a compiler.
    """
    mixed, said = accelerator.mixed_precision, "bf16" if args.bf16 else "no"
    if mixed != said:
        raise ConfigError(
            f"accelerate computes in mixed_precision={mixed!r}, by its launcher or by "
            f"ACCELERATE_MIXED_PRECISION, and TrainingArguments say bf16={args.bf16}. Say "
            "bf16=True there, or nothing to the launcher."
        )
    backend = str(accelerator.state.dynamo_plugin.backend.value)
    if backend != "NO" and not getattr(args, "torch_compile", False):
        raise ConfigError(
            f"accelerate compiles with dynamo_backend={backend!r}, by its launcher or by "
            "ACCELERATE_DYNAMO_BACKEND, and fxzero compiles already. Leave it out."
        )


def check_optimizer_name(args: Any, zero: int) -> None:
    """Refuse an ``optim=`` whose update would be wrong on shards.

    Raises:
        ConfigError: it would be, or nobody has tried.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in _HOOKED):
        raise ConfigError(
            f"optim={name!r} updates parameters while backward runs, before their gradients are "
            "reduced over the ranks. Choose one of " + ", ".join(ON_SHARDS) + "."
        )
    if zero and name not in ON_SHARDS:
        raise ConfigError(
            f"optim={name!r} at zero={zero}: its kernels read a parameter's memory, of which each "
            "rank has a part, or look at whole matrices. Choose one of "
            f"{', '.join(ON_SHARDS)}; zero=0 keeps whole parameters; or pass an optimizer of "
            "your own that works on DTensors, by optimizers= or optimizer_cls_and_kwargs=."
        )


def check_model(model: nn.Module, zero: int) -> None:
    """Refuse a model that another tool has laid out, that learns prompts, or that leaves out other
    layers on each rank.

    Args:
        zero: the stage over several ranks; 0 for one.

    Raises:
        ShardingError: it was, or does.
    """
    config = getattr(model, "config", None)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if zero and getattr(config, name, 0):
            raise ShardingError(
                f"the model's config says {name}={getattr(config, name)}: each rank would leave "
                f"out other layers, and at zero={zero} all ranks are needed for each layer. "
                f"Set {name}=0.0, or zero=0."
            )
    if getattr(model, "hf_device_map", None) is not None:
        raise ShardingError(
            "the model was loaded with device_map=, which places its layers by itself. Load it "
            "without: fxzero takes each rank's part of it."
        )
    adapters.refuse_prompts(model)
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise ShardingError(
            "the model is quantized: its weights are packed, and rows of them are no shards. "
            "Load it in bfloat16 (dtype=torch.bfloat16)."
        )


def check_still_sharded(model: nn.Module, wrapped: nn.Module) -> None:
    """Refuse to train another model than the one that was sharded.

    Args:
        model: the Trainer's.
        wrapped: what the Trainer calls instead.

    Raises:
        ShardingError: it was replaced, or has got parameters that nobody would reduce.
    """
    what = "Change a model before the Trainer is made, which shards it: get_peft_model, too."
    if model_state(model) is None or wrapped is not model:
        raise ShardingError(f"trainer.model is not the model that fxzero has sharded. {what}")
    known = {id(s.parameter()) for s in param_specs(model).values() if s.parameter is not None}
    named = model.named_parameters()
    new = [name for name, p in named if p.requires_grad and id(p) not in known]
    if new:
        raise ShardingError(
            f"trainer.model has got parameters since fxzero has sharded it: {', '.join(new[:4])}. "
            f"No rank would reduce their gradients. {what}"
        )


def compute_dtype(args: Any, plugin: FxZeroPlugin) -> torch.dtype | None:
    """What parameters are cast to before they are gathered: the plugin's word, else ``bf16=``."""
    if plugin.param_dtype is not None:
        return plugin.param_dtype
    return torch.bfloat16 if args.bf16 else None


def _refuse_engines(args: Any) -> None:
    engines = {
        "deepspeed": "DeepSpeed shards by itself. Leave out deepspeed=, and say its ZeRO stage to "
        "FxZeroPlugin(zero=…)",
        "fsdp": "FSDP shards by itself. Leave out fsdp=: full_shard is FxZeroPlugin(zero=3), "
        "shard_grad_op zero=2",
        "parallelism_config": "fxzero shards over all ranks, or over FxZeroPlugin(mesh=…). Leave "
        "out parallelism_config=",
    }
    for name, why in engines.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name}= was given beside fxzero: {why}.")


def _refuse_precision(args: Any, plugin: FxZeroPlugin) -> None:
    if args.fp16:
        raise ConfigError(
            "fp16=True scales the loss by accelerate's GradScaler, which looks for infinite "
            "gradients on each rank by itself. Use bf16=True, or the whole step with a loss scale: "
            "fxzero.compile_step(…, precision='fp16')."
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            raise ConfigError(
                f"{name}=True converts the parameters themselves, which are shards here. Use "
                "bf16=True, which computes in bfloat16 in evaluation too."
            )
    if args.bf16 and plugin.param_dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"bf16=True and FxZeroPlugin(param_dtype={plugin.param_dtype}) say two things. Leave "
            "out one of them."
        )


def _refuse_compilers(args: Any, plugin: FxZeroPlugin) -> None:
    if not getattr(args, "torch_compile", False):
        return
    if not plugin.compile:
        raise ConfigError("torch_compile=True and FxZeroPlugin(compile=False): leave out one.")
    backend = args.torch_compile_backend
    if backend not in (None, "inductor", "fxzero") or args.torch_compile_mode is not None:
        raise ConfigError(
            f"torch_compile_backend={backend!r}, torch_compile_mode={args.torch_compile_mode!r}: "
            "under fxzero the model is compiled by fxzero, and its options are "
            "FxZeroPlugin(options=…). Leave out both."
        )


def _leave_graphs_whole(args: Any) -> None:
    """Let transformers checkpoint activations in the way that a compiler can read."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if not getattr(args, name, False):
            continue
        given = getattr(args, f"{name}_kwargs", None) or {}
        if given.get("use_reentrant"):
            raise ConfigError(
                f"{name}_kwargs={given}: reentrant checkpoints run forward inside of backward, "
                "where no compiler sees it. Leave out use_reentrant; or leave out "
                f"{name}, and let options={{'memory_budget': …}} choose what is repeated."
            )
        setattr(args, f"{name}_kwargs", {**given, "use_reentrant": False})


def _even_batches(args: Any) -> bool:
    config = args.accelerator_config
    return bool(getattr(config, "even_batches", True))
