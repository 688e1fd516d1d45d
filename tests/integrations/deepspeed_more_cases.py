"""More that DeepSpeed and fxzero train alike: every key that is taken, and what others publish.

    key reduce_bucket_size         one case a key, of those that are mapped or called needless
    transformers zero2, fp32       one case a published file and a dtype; "auto" as transformers
                                   resolves it: here by hand, by fxzero from the same arguments

Three losses each, on two ranks. Without fp16 and NVMe, which DeepSpeed does not do on a CPU.
"""

from __future__ import annotations

import copy
from typing import Any

from fxzero.integrations.deepspeed import Verdict
from tests.integrations.deepspeed_cases import BASE, ROWS, WIDTH
from tests.integrations.published_deepspeed import ACCELERATE, TRANSFORMERS
from tests.integrations.test_deepspeed_config import KEYS, example, put

STEPS = 3
"""The third loss is that behind two updates."""
CPU = {"device": "cpu"}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": ROWS // 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 0.02,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "num_training_steps": 10,
    "hidden_size": WIDTH,
}
"""A Trainer's, with which "auto" is resolved."""
_AUTO: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "train_batch_size": ROWS,
    "train_micro_batch_size_per_gpu": ROWS // 4,
    "lr": 0.02,
    "betas": [0.8, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.1,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.02,
    "warmup_num_steps": 3,
    "total_num_steps": 10,
    "reduce_bucket_size": WIDTH**2,
    "stage3_prefetch_bucket_size": int(0.9 * WIDTH**2),
    "stage3_param_persistence_threshold": 10 * WIDTH,
    "stage3_gather_16bit_weights_on_model_save": False,
}
"""What each key that is "auto" comes to by them (transformers.integrations.deepspeed)."""
_VALUES: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.25,
    "optimizer.params": {"lr": 0.5},
    "scheduler.type": "WarmupCosineLR",
    "scheduler.params": {"warmup_max_lr": 0.5},
    "optimizer.type": "SGD",
}
_STAGE_2 = ("allgather_bucket_size", "round_robin", "allgather_partitions", "reduce_scatter")


def _of_key(path: str) -> dict[str, Any]:
    """A small configuration in which a key can have an effect, with it."""
    config = copy.deepcopy(BASE)
    stage = 2 if any(word in path for word in _STAGE_2) else 3
    config["zero_optimization"] = {"stage": stage}
    if "offload_optimizer." in path and not path.endswith("device"):
        config["zero_optimization"]["offload_optimizer"] = dict(CPU)
    if "offload_param." in path and not path.endswith("device"):
        config["zero_optimization"]["offload_param"] = dict(CPU)
    if path.startswith(("bf16.", "data_types")):
        config["bf16"] = {"enabled": True}
    if path.startswith("bfloat16.") and not path.endswith("enabled"):
        config["bfloat16"] = {"enabled": True}
    if path.startswith("scheduler"):
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05}}
    if path == "scheduler.type":
        config["scheduler"]["params"] = {"total_num_steps": 10}
    if path == "train_micro_batch_size_per_gpu":
        config.pop("train_batch_size")
    if path == "optimizer.type":
        config["optimizer"]["params"] = {"lr": 0.05}
    if path.startswith("allgather_size"):
        return {**config, "zero_optimization": True, path: 4096}
    return put(config, path, _VALUES.get(path, example(path, KEYS[path].kind)))


def _keys() -> dict[str, dict[str, Any]]:
    found = {}
    for path, key in KEYS.items():
        unable = path.startswith(("fp16", "aio")) or path.endswith("nvme_path")
        if key.verdict is not Verdict.REFUSED and not unable:
            config = _of_key(path)
            found[f"key {path}"] = {"config": config, "resolved": config, "arguments": {}}
    return found


def _resolved(section: Any, name: str = "") -> Any:
    if isinstance(section, dict):
        return {key: _resolved(value, key) for key, value in section.items()}
    return _AUTO[name] if section == "auto" else section


def _published() -> dict[str, dict[str, Any]]:
    files = {f"transformers {name}": config for name, config in TRANSFORMERS.items()}
    files |= {f"accelerate {name}": config for name, config in ACCELERATE.items()}
    found = {}
    for name, config in files.items():
        if config.get("fp16", {}).get("enabled") is True or "nvme" in str(config):
            continue
        for dtype in ("fp32", "bf16"):
            if dtype == "bf16" and config.get("bf16", {}).get("enabled") != "auto":
                continue
            plain = copy.deepcopy(config)
            for section in ("fp16", "bf16"):
                if plain.get(section, {}).get("enabled") == "auto":
                    plain[section]["enabled"] = section == dtype
            arguments = {**ARGUMENTS, "fp16": False, "bf16": dtype == "bf16"}
            if isinstance(config.get("train_batch_size"), int):
                # Theirs counts the rows that their own test has.
                arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
            found[f"{name}, {dtype}"] = {
                "config": config,
                "resolved": _resolved(plain),
                "arguments": arguments,
            }
    return found


MORE = {**_keys(), **_published()}
