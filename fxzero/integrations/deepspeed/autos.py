"""What ``"auto"`` stands for: transformers fills it in from TrainingArguments, and so does this.

    "optimizer": {"params": {"lr": "auto"}}   →   learning_rate, of a TrainingArguments or a keyword

Buckets follow from the model's hidden size h, as there: h·h elements to reduce at a time, 0.9 h·h
to fetch ahead, and parameters below 10 h stay. A value that stands in both places must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from fxzero.errors import ConfigError, nearest
from fxzero.integrations.deepspeed.lines import json_text


class TrainerValues(TypedDict, total=False):
    """What an ``"auto"`` may stand for, by the names that TrainingArguments has."""

    per_device_train_batch_size: int
    """Rows of a micro-batch, on each rank."""
    gradient_accumulation_steps: int
    max_grad_norm: float
    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    warmup_steps: int
    num_training_steps: int
    """Optimizer steps of the whole training."""
    fp16: bool
    bf16: bool
    hidden_size: int
    """The model's, for the sizes of buckets."""


ZERO = "zero_optimization"


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments, of which every name is known; None says nothing.

    Raises:
        ConfigError: one is not.
    """
    known = TrainerValues.__annotations__
    for name in values:
        if name not in known:
            raise ConfigError(f"from_deepspeed has no argument {name!r}: {nearest(name, known)}")
    return {name: value for name, value in values.items() if value is not None}


def of_arguments(args: Any, num_training_steps: int | None) -> dict[str, Any]:
    """The values of a ``transformers.TrainingArguments``.

    Raises:
        ConfigError: it is none.
    """
    needed = ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate")
    if not all(hasattr(args, name) for name in needed):
        raise ConfigError(
            f"args={type(args).__name__} is no TrainingArguments: it has no "
            f"{next(name for name in needed if not hasattr(args, name))}"
        )
    steps = num_training_steps
    if steps is None and getattr(args, "max_steps", -1) > 0:
        steps = args.max_steps
    values = {
        name: getattr(args, name)
        for name in (
            *needed,
            "max_grad_norm",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "weight_decay",
        )
    }
    values["fp16"] = bool(args.fp16 or getattr(args, "fp16_full_eval", False))
    values["bf16"] = bool(args.bf16 or getattr(args, "bf16_full_eval", False))
    if steps is not None:
        values["num_training_steps"] = steps
        values["warmup_steps"] = args.get_warmup_steps(steps)
    return values


def hidden_size_of(model: Any) -> int | None:
    """The hidden size that a transformers model's configuration says; the largest of several."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        size, sizes = getattr(part, "hidden_size", None), getattr(part, "hidden_sizes", None)
        if isinstance(size, int) or sizes:
            return int(size) if isinstance(size, int) else int(max(sizes or ()))
    return None


def meanings(values: Mapping[str, Any], world_size: int) -> dict[str, tuple[Any, str]]:
    """What each path means, and the argument that it takes; None where nobody has said that."""
    said = values.get
    rows, steps = said("per_device_train_batch_size"), said("gradient_accumulation_steps")
    whole = rows * steps * world_size if rows is not None and steps is not None else None
    both = "per_device_train_batch_size= and gradient_accumulation_steps="
    betas = None
    if said("adam_beta1") is not None and said("adam_beta2") is not None:
        betas = [said("adam_beta1"), said("adam_beta2")]
    warmup = said("warmup_steps")
    return {
        "train_batch_size": (whole, both),
        "train_micro_batch_size_per_gpu": (rows, "per_device_train_batch_size="),
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps="),
        "gradient_clipping": (said("max_grad_norm"), "max_grad_norm="),
        "optimizer.params.lr": (said("learning_rate"), "learning_rate="),
        "optimizer.params.betas": (betas, "adam_beta1= and adam_beta2="),
        "optimizer.params.eps": (said("adam_epsilon"), "adam_epsilon="),
        "optimizer.params.weight_decay": (said("weight_decay"), "weight_decay="),
        "scheduler.params.warmup_min_lr": (0, ""),
        "scheduler.params.warmup_max_lr": (said("learning_rate"), "learning_rate="),
        "scheduler.params.total_num_steps": (said("num_training_steps"), "num_training_steps="),
        "scheduler.params.warmup_num_steps": (
            None if warmup is None else max(1, warmup),
            "warmup_steps=",
        ),
        "fp16.enabled": (said("fp16"), "fp16="),
        "bf16.enabled": (said("bf16"), "bf16="),
    }


def of_hidden_size(config: Mapping[str, Any], hidden: int | None) -> dict[str, tuple[Any, str]]:
    """What sizes of buckets mean; two of them only at stage 3."""
    argument = "hidden_size=, or model= with a configuration that has one"
    sizes = {"reduce_bucket_size": None if hidden is None else hidden * hidden}
    zero = config.get(ZERO)
    if isinstance(zero, Mapping) and zero.get("stage") == 3:
        sizes["stage3_prefetch_bucket_size"] = (
            None if hidden is None else int(0.9 * hidden * hidden)
        )
        sizes["stage3_param_persistence_threshold"] = None if hidden is None else 10 * hidden
    return {f"{ZERO}.{name}": (size, argument) for name, size in sizes.items()}


def resolve(
    config: dict[str, Any], values: Mapping[str, Any], hidden: int | None, world_size: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Fill in what is "auto", in place.

    Returns:
        How it was resolved, by path; and why it was not, or contradicts what is there.
    """
    resolved: dict[str, str] = {}
    problems: dict[str, str] = {}
    for path, (value, argument) in meanings(values, world_size).items():
        section, name = _section_of(config, path)
        if section is None or name not in section:
            continue
        if section[name] == "auto":
            if value is None:
                problems[path] = f'nobody says what "auto" is: pass {argument}'
            else:
                section[name] = value
                resolved[path] = argument
        elif value is not None and argument and not _same(section[name], value):
            problems[path] = (
                f"{argument.replace('=', '')} says {json_text(value)}. Say the same, or "
                '"auto" there.'
            )
    for path, (value, argument) in of_hidden_size(config, hidden).items():
        section, name = _section_of(config, path)
        if section is None or section.get(name) != "auto":
            continue
        if value is None:
            problems[path] = f'nobody says what "auto" is: pass {argument}'
        else:
            section[name] = value
            resolved[path] = f"hidden_size={hidden}"
    return resolved, problems


def _section_of(config: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    *above, name = path.split(".")
    section: Any = config
    for part in above:
        section = section.get(part) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else None), name


def value_at(config: dict[str, Any], path: str) -> Any:
    """What a configuration has at a path; None for nothing."""
    section, name = _section_of(config, path)
    return None if section is None else section.get(name)


def _same(one: Any, other: Any) -> bool:
    if one is None:
        return True
    if isinstance(one, (list, tuple)):
        return list(one) == list(other) if isinstance(other, (list, tuple)) else False
    return bool(one == other)
