"""Every key of DeepSpeed's schema, published configurations, typos, versions, "auto": 0 ignored."""

from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fxzero
from fxzero.errors import ConfigError
from fxzero.integrations.deepspeed import FromDeepSpeed, Verdict, examine
from fxzero.integrations.deepspeed.kinds import Kind
from fxzero.integrations.deepspeed.schema import Key
from fxzero.integrations.deepspeed.schema_top import REMOVED, paths
from fxzero.integrations.deepspeed.schema_zero import REMOVED_ZERO
from tests.integrations.published_deepspeed import ACCELERATE, REFUSED, TRANSFORMERS

TRAINER: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 3e-5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 3e-7,
    "warmup_steps": 500,
    "num_training_steps": 1000,
    "hidden_size": 64,
}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
FULL: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {**NVME}, "offload_param": {**NVME}},
}
"""A configuration in which most of what is mapped can have an effect."""


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The same with one key more, or another value."""
    made = copy.deepcopy(config)
    *above, name = path.split(".")
    section = made
    for part in above:
        section = section.setdefault(part, {})
    section[name] = value
    return made


def base_for(path: str) -> dict[str, Any]:
    """A configuration in which a key can have an effect."""
    config = copy.deepcopy(FULL)
    if path.startswith("fp16"):
        config.pop("bf16")
        return config if path == "fp16.enabled" else put(config, "fp16.enabled", True)
    if path.startswith("bfloat16"):
        config.pop("bf16")
        return config if path == "bfloat16.enabled" else put(config, "bfloat16.enabled", True)
    if path.endswith("ratio") or "cpu_offload" in path:
        config["zero_optimization"] = {"stage": 3}
        if path.endswith("ratio"):
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if path == "zero_optimization.stage":
        config["zero_optimization"] = {"stage": 3}
    if path.endswith("device"):
        config["zero_optimization"] = {"stage": 3}
    if path.endswith("nvme_path"):
        part = "offload_param" if "optimizer" in path else "offload_optimizer"
        config["zero_optimization"].pop(part)
    if path == "allgather_size":
        config["zero_optimization"] = True
    if path == "data_types.param_dtype":
        config["bf16"]["enabled"] = False
    if path.startswith("aio"):
        config["aio"] = {}
    if path == "train_micro_batch_size_per_gpu":
        config.pop("train_batch_size")
    return config


EXAMPLES: dict[str, Any] = {
    "zero_optimization.stage": 1,
    "train_batch_size": 16,
    "optimizer.type": "SGD",
    "optimizer.params": {"lr": 0.5},
    "scheduler.type": "WarmupCosineLR",
    "scheduler.params": {"warmup_max_lr": 0.5},
    "bf16.enabled": False,
    "bf16.check_grad_overflow": False,
    "bfloat16.check_grad_overflow": False,
    "gradient_accumulation_steps": 4,
    "managed_gradient_accumulation": False,
    "gradient_allreduce_op": "sum",
    "zero_optimization.overlap_comm": False,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "communication_data_type": "fp32",
    "data_types.param_dtype": "fp32",
}
"""Values at which a key has an effect, where its kind does not tell."""
ZERO_IS_MEANT = ("prefetch_bucket_size", "max_reuse_distance")
STRING_CASES = ("zero_optimization.stage3_", "zero_optimization.")


def example(path: str, kind: Kind) -> Any:
    """A value of a kind that differs from the default."""
    if path in EXAMPLES:
        return EXAMPLES[path]
    if path.endswith(ZERO_IS_MEANT):
        return 0
    for value in (True, 4096, 0.5, "text", "cpu", "bf16", "warn", "python", "torch", "replica"):
        if not kind.problem(value):
            return value
    for value in ([0.5, 0.6], {"a": 1}, ["text"], None):
        if not kind.problem(value):
            return value
    raise AssertionError(f"{path}: no example of {kind.what}")


def settings(made: FromDeepSpeed | None) -> Any:
    """What a configuration comes to, without its lines."""
    assert made is not None
    return made.to_json()


KEYS = {path: entry for path, entry in paths().items() if isinstance(entry, Key)}
FEATURES = {path: entry for path, entry in paths().items() if isinstance(entry, Kind)}


def test_the_table_is_all_of_deepspeeds() -> None:
    """As many keys as its own classes and constants have; one that goes is a decision."""
    assert len(paths()) + len(REMOVED) + len(REMOVED_ZERO) == 337
    assert len(KEYS) > 150


@pytest.mark.parametrize("path", KEYS)
def test_every_key_one_by_one(path: str) -> None:
    """It changes what comes out if it is said to be mapped, and nothing if it is needless."""
    key = KEYS[path]
    base = base_for(path)
    value = example(path, key.kind)
    if path == "scheduler.type":
        base["scheduler"]["params"] = {"total_num_steps": 10}
    config = (
        put(base, path, value)
        if base.get("zero_optimization") is not True
        else {**base, path: value}
    )
    before = examine(base, deepspeed_version="0.19.8", world_size=1)
    after = examine(config, deepspeed_version="0.19.8", world_size=1)
    lines = {line.key: line for line in after.lines}
    if path in ("optimizer.params", "scheduler.params"):
        assert settings(after.result) != settings(before.result)
        return
    line = lines[path]
    if line.verdict is Verdict.REFUSED:
        assert key.verdict is Verdict.REFUSED, line
        assert after.result is None
        assert line.reason.endswith("."), "a sentence that says what to do"
        return
    assert line.verdict is key.verdict, line
    changed = settings(after.result) != settings(before.result) if before.result else True
    if path == "data_types.param_dtype" or path.endswith(
        ("param_persistence_threshold_", "min_loss_scale_")
    ):
        return
    assert changed == (key.verdict is Verdict.MAPPED), line


@pytest.mark.parametrize(
    "path", [path for path, key in KEYS.items() if key.verdict is Verdict.REFUSED]
)
def test_what_is_refused_asks_for_nothing_when_it_is_off(path: str) -> None:
    """As people write it: zero_quantized_weights=false."""
    key = KEYS[path]
    for value in key.off:
        made = fxzero.from_deepspeed(put(base_for(path), path, value), world_size=1)
        (line,) = [line for line in made.lines if line.key == path]
        assert line.verdict is Verdict.NEEDLESS


SWITCHES = {
    "tensorboard": "enabled",
    "wandb": "enabled",
    "csv_monitor": "enabled",
    "comet": "enabled",
    "torch_autocast": "enabled",
    "data_efficiency": "enabled",
    "autotuning": "enabled",
    "hybrid_engine": "enabled",
    "expert_parallel": "enabled",
    "tensor_parallel": "autotp_size",
}


@pytest.mark.parametrize("path", FEATURES)
def test_every_key_of_what_fxzero_has_not(path: str) -> None:
    """Off, it asks for nothing; on, all of it is refused; a profiler only prints."""
    section = path.partition(".")[0]
    value = example(path, FEATURES[path])
    switch = SWITCHES.get(section)
    if switch is None:
        on = put(put(FULL, f"{section}.enabled", True), path, value)
        lines = fxzero.from_deepspeed(on, world_size=1).lines
        assert {x.verdict for x in lines if x.key.startswith(section)} == {Verdict.NEEDLESS}
        return
    flag = f"{section}.{switch}"
    off_value, on_value = (0, 2) if switch == "autotp_size" else (False, True)
    off = put(put(FULL, path, value), flag, off_value)
    lines = fxzero.from_deepspeed(off, world_size=1).lines
    assert {x.verdict for x in lines if x.key.startswith(section)} == {Verdict.NEEDLESS}
    on = put(put(FULL, path, value), flag, on_value)
    with pytest.raises(ConfigError, match=re.escape(path)):
        fxzero.from_deepspeed(on, world_size=1)


@pytest.mark.parametrize("path", [*KEYS, *FEATURES])
def test_every_key_refuses_another_type(path: str) -> None:
    """DeepSpeed takes some of these and trains by something else."""
    kind = KEYS[path].kind if path in KEYS else FEATURES[path]
    wrong = next((v for v in ("no such", [{}], -1, {"a": 1}) if kind.problem(v)), None)
    if wrong is None:
        return  # anything is taken, as by DeepSpeed
    config = put(base_for(path) if path != "allgather_size" else FULL, path, wrong)
    found = examine(config, deepspeed_version="0.19.8", world_size=1)
    refused = {line.key for line in found.lines if line.verdict is Verdict.REFUSED}
    assert path in refused
    assert found.result is None


@pytest.mark.parametrize("name", REMOVED)
def test_removed_keys(name: str) -> None:
    """On they are refused; off they are, in the version that refuses them."""
    for off in (False, {"enabled": False}):
        made = (
            fxzero.from_deepspeed({**FULL, name: off} if off or name else FULL, world_size=1)
            if (isinstance(off, dict) or off in REMOVED[name].off)
            else None
        )
        if made is not None:
            assert {x.verdict for x in made.lines if x.key == name} == {Verdict.NEEDLESS}
            with pytest.raises(ConfigError, match=name):
                fxzero.from_deepspeed({**FULL, name: off}, deepspeed_version="0.19.8")
    with pytest.raises(ConfigError, match=name):
        fxzero.from_deepspeed({**FULL, name: {"enabled": True}}, world_size=1)


TYPOS = """
    train_batchsize train_micro_batch_size_per_gpus gradient_acumulation_steps gradient_cliping
    optimiser schedular zero_optimisation zero_optimzation activation_checkpoint bf_16 fp-16 adamw
    steps_per_prints wall_clock_break_down communication_dtype aio_config prescale_gradient
    dataloader_droplast tensor_board csv_monitors comm_logger flop_profiler train_batch_Size
    zero_optimization.stages zero_optimization.overlap_com zero_optimization.reduce_bucketsize
    zero_optimization.allgather_bucket_sizes zero_optimization.offload_params
    zero_optimization.offload_optimzer zero_optimization.stage3_max_live_params
    zero_optimization.stage3_prefetch_bucketsize zero_optimization.Stage
    zero_optimization.offload_param.devise zero_optimization.offload_param.path
    zero_optimization.offload_optimizer.pin_memmory fp16.enable fp16.loss_scaling bf16.enable
    optimizer.parameters optimizer.params.learning_rate optimizer.params.beta
    scheduler.params.warmup_steps scheduler.params.max_lr optimizer.name scheduler.kind
    aio.blocksize
    checkpoint.tag_validate data_types.grad_accum_type compile.deep_compile comms_logger.enable
    tensorboard.output data_efficiency.data_sampling.enable wandb.projects
""".split()


@pytest.mark.parametrize("path", TYPOS)
def test_typos(path: str) -> None:
    """At every level, with the key that was meant, or the few there are."""
    config = copy.deepcopy(FULL)
    config.pop("bf16" if path.startswith("fp16") else "fp16", None)
    found = examine(put(config, path, 1), world_size=1)
    (line,) = [line for line in found.lines if line.key == path]
    assert line.verdict is Verdict.REFUSED
    assert found.result is None
    assert re.search(r"did you mean '|there are |none of its", line.reason)


MEANT: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 1.0}, "did you mean 'gradient_clipping'"),
    ({"zero": {"stage": 3}}, "did you mean 'zero_optimization'"),
    ({"zero_stage": 3}, "did you mean 'stage' in 'zero_optimization'"),
    ({"fp16": {"fp16": True}}, "did you mean 'enabled'"),
    ({"optimizer": {"optimizer": "AdamW"}}, "there are legacy_fusion, params, type"),
    ({"compile": {"enabled": True}}, "fxzero compiles anyway"),
    ({"compile": {"backend": "inductor"}}, "fxzero compiles anyway"),
    ({"bfloat16": {"enabled": "auto"}}, "under the name bf16 alone"),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, 'say "none"'),
]


@pytest.mark.parametrize(("keys", "message"), MEANT)
def test_what_people_mean(keys: dict[str, Any], message: str) -> None:
    """By names, and values, that are near none."""
    with pytest.raises(ConfigError, match=message):
        fxzero.from_deepspeed({"train_batch_size": 8, "gradient_clipping": 1, **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"steps_per_print": float("inf")},
        *({"data_types": {"grad_accum_dtype": name}} for name in ("float32", "float", "half")),
        {"data_types": {"grad_accum_dtype": "bfloat16"}},
    ],
)
def test_what_deepspeed_takes_too(keys: dict[str, Any]) -> None:
    """Never to print, and torch's names of dtypes."""
    (line,) = examine({**FULL, **keys}, world_size=1).lines[-1:]
    assert line.verdict is Verdict.NEEDLESS


def test_a_hint_names_the_key() -> None:
    """Not any key."""
    with pytest.raises(ConfigError, match="did you mean 'reduce_bucket_size'") as raised:
        fxzero.from_deepspeed(put(FULL, "zero_optimization.reduce_bucketsize", 5), world_size=1)
    assert "leave_out" in str(raised.value)


@pytest.mark.parametrize("name", [*TRANSFORMERS, *(f"accelerate {n}" for n in ACCELERATE)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_published_configurations(name: str, dtype: str) -> None:
    """They are mapped, and nothing of them is without a line."""
    accelerate = name.removeprefix("accelerate ")
    config = ACCELERATE[accelerate] if name != accelerate else TRANSFORMERS[name]
    values = dict(TRAINER)
    auto_dtype = config.get("fp16", {}).get("enabled") == "auto"
    said = {"fp16": dtype == "fp16", "bf16": dtype == "bf16"}
    if auto_dtype or config.get("bf16", {}).get("enabled") == "auto":
        if not auto_dtype or "bf16" not in config:
            said = {"fp16": auto_dtype, "bf16": not auto_dtype}
        values |= said
    made = fxzero.from_deepspeed(config, world_size=1, deepspeed_version="0.19.2", **values)
    assert {line.key for line in made.lines} >= set(leaves(config))
    assert all(line.verdict is not Verdict.REFUSED for line in made.lines)
    assert made.zero == config["zero_optimization"]["stage"]
    assert (made.rows, made.micro_batches) == (2, 1)
    if config.get("fp16", {}).get("enabled") is True:
        assert made.param_dtype is torch.float16
    if made.make_optimizer is not None:
        assert made.make_optimizer.kind is torch.optim.AdamW
        assert made.make_optimizer.settings["lr"] == 3e-5
        assert made.make_optimizer.settings["weight_decay"] == 3e-7
    fxzero.Config.from_options(made.options)


def leaves(config: dict[str, Any], start: str = "") -> list[str]:
    """The paths of values."""
    found = []
    for key, value in config.items():
        path = f"{start}{key}"
        found += leaves(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_published_configurations_that_are_refused(name: str) -> None:
    """With the key that is."""
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        fxzero.from_deepspeed(config, world_size=1, **TRAINER)


def test_hidden_size_and_bytes() -> None:
    """transformers' formulas, in fxzero's unit."""
    made = fxzero.from_deepspeed(
        ACCELERATE["stage3"], world_size=1, **{**TRAINER, "hidden_size": 4096}
    )
    assert made.options["bucket"] == {"cap_bytes": 4096 * 4096 * 2, "min_bytes": 40960 * 2}
    assert made.options["prefetch"] == {"budget_bytes": 2 * 10**9}


def test_auto_says_what_to_pass() -> None:
    """For every key that transformers resolves, and that nobody does here."""
    with pytest.raises(ConfigError) as raised:
        fxzero.from_deepspeed(
            {**TRANSFORMERS["zero3"], "scheduler": ACCELERATE["stage1"]["scheduler"]}, world_size=1
        )
    for argument in (*TRAINER, "fp16", "bf16"):
        if argument not in ("per_device_train_batch_size",):
            assert f"{argument}=" in str(raised.value), argument


def test_training_arguments(tmp_path: Path) -> None:
    """The values of a TrainingArguments; those that differ from the file are refused."""
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        learning_rate=2e-4,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.7,
        warmup_steps=10,
        max_steps=100,
        bf16=True,
        use_cpu=True,
    )
    made = fxzero.from_deepspeed(
        {**TRANSFORMERS["zero2"], "scheduler": ACCELERATE["stage1"]["scheduler"]},
        args=args,
        world_size=2,
    )
    assert (made.train_batch_size, made.rows, made.micro_batches) == (24, 4, 3)
    assert made.clip_grad_norm == 0.7
    assert made.param_dtype is torch.bfloat16
    assert made.make_optimizer is not None
    assert made.make_optimizer.settings == {
        "lr": 2e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert made.make_scheduler is not None
    assert made.make_scheduler.settings == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 2e-4,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
    }
    with pytest.raises(ConfigError, match=r"optimizer.params.lr = 0.1: learning_rate says 0.0002"):
        fxzero.from_deepspeed(
            put(TRANSFORMERS["zero2"], "optimizer.params.lr", 0.1), args=args, world_size=2
        )


BATCHES: list[tuple[dict[str, int], int, tuple[int, int, int] | str]] = [
    ({"train_batch_size": 32}, 4, (32, 8, 1)),
    ({"train_micro_batch_size_per_gpu": 3}, 4, (12, 3, 1)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, (32, 4, 4)),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, (32, 4, 4)),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 2, (16, 4, 2)),
    (
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
        1,
        "World size 2 would fit",
    ),
    ({"train_batch_size": 7}, 2, "which is not 7"),
    ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, 1, "which is not 2"),
    ({"train_batch_size": 1, "gradient_accumulation_steps": 2}, 1, "which is not 1"),
    ({"gradient_accumulation_steps": 2}, 1, "no step has a size"),
    ({"train_batch_size": 0}, 1, "1 or more"),
]


@pytest.mark.parametrize(("sizes", "ranks", "expected"), BATCHES)
def test_batch_arithmetic(
    sizes: dict[str, int], ranks: int, expected: tuple[int, int, int] | str
) -> None:
    """As DeepSpeed derives it, and refuses it."""
    config = {"gradient_clipping": 0.0, **sizes}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            fxzero.from_deepspeed(config, world_size=ranks)
        return
    made = fxzero.from_deepspeed(config, world_size=ranks)
    assert (made.train_batch_size, made.rows, made.micro_batches) == expected
    assert made.clip_grad_norm is None


def test_versions() -> None:
    """Defaults that changed are asked for."""
    without = {"train_batch_size": 8}
    with pytest.raises(ConfigError, match=r"gradient_clipping = \(not given\).*deepspeed_version"):
        fxzero.from_deepspeed(without, world_size=1)
    assert fxzero.from_deepspeed(without, deepspeed_version="0.19.8").clip_grad_norm == 1.0
    assert fxzero.from_deepspeed(without, deepspeed_version="0.19.2").clip_grad_norm is None
    bf16 = {**without, "bf16": {"enabled": True}}
    new, old = (fxzero.from_deepspeed(bf16, deepspeed_version=v) for v in ("0.19.3", "0.19.2"))
    assert "stop_unless_finite" in new.options
    assert "stop_unless_finite" not in old.options
    warm = {**without, "gradient_clipping": 0, "scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(ConfigError, match="warmup_max_lr"):
        fxzero.from_deepspeed(warm, world_size=1)
    for version in ("0.15.1", "0.20.0", "1.0.0", "0.19", "newest", ""):
        with pytest.raises(ConfigError, match="deepspeed_version"):
            fxzero.from_deepspeed(without, deepspeed_version=version)


def test_the_window_of_a_loss_scale() -> None:
    """It ended a step earlier before 0.17, but at stage 0."""
    fp16 = {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": True}}
    for version, stage, differs in (
        ("0.16.9", 2, True),
        ("0.17.0", 2, False),
        ("0.16.9", 0, False),
    ):
        keys = {**fp16, "zero_optimization": {"stage": stage}}
        made = fxzero.from_deepspeed(keys, deepspeed_version=version, world_size=1)
        assert ("a step later" in reason_of(made, "fp16.enabled")) is differs


def test_low_precision_at_stage_0() -> None:
    """Has no hysteresis in DeepSpeed, and an update by zeros that is said, not made."""
    fp16 = {"enabled": True, "hysteresis": 4, "consecutive_hysteresis": True, "min_loss_scale": 2}
    keys = {**FULL, "bf16": {"enabled": False}, "fp16": fp16, "scheduler": {}}
    for stage, hysteresis in ((0, 1), (1, 4)):
        made = fxzero.from_deepspeed({**keys, "zero_optimization": {"stage": stage}}, world_size=1)
        assert made.precision.hysteresis == hysteresis
        assert made.precision.consecutive_hysteresis is (stage == 1)
        verdicts = {line.key: line.verdict for line in made.lines}
        wanted = Verdict.MAPPED if stage else Verdict.NEEDLESS
        assert verdicts["fp16.hysteresis"] is verdicts["fp16.consecutive_hysteresis"] is wanted
        assert ("counts a step more" in reason_of(made, "fp16.enabled")) is (stage == 0)
        assert ("skips on" in reason_of(made, "fp16.min_loss_scale")) is (stage == 0)
    sgd = {**keys, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 0}}
    made = fxzero.from_deepspeed(sgd, world_size=1)
    assert "counts a step more" not in reason_of(made, "fp16.enabled")


def test_no_parameters_may_live() -> None:
    """Asks for no prefetch."""
    keys = {"stage": 3, "stage3_max_live_parameters": 0}
    made = fxzero.from_deepspeed({**FULL, "zero_optimization": keys}, world_size=1)
    assert made.options["prefetch"] == {"distance": 0}


def reason_of(made: FromDeepSpeed, key: str) -> str:
    """What the line of a key says."""
    (line,) = [line for line in made.lines if line.key == key]
    return line.reason


def test_files(tmp_path: Path) -> None:
    """What is no configuration says so."""
    file = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match="no such file"):
        fxzero.from_deepspeed(file)
    for text, message in (
        ('{"train_batch_size": 8, "train_batch_size": 4}', "'train_batch_size' twice"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "'enabled' twice"),
        ('{"train_batch_size": 8,}', "is no JSON: .* line 1"),
        ("[1, 2]", "holds a list"),
        ('{"train_batch_size": 8, "gradient_clipping": NaN}', "gradient_clipping"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            fxzero.from_deepspeed(file)
    file.write_text("\ufeff" + json.dumps(FULL))  # as some editors begin a file
    assert fxzero.from_deepspeed(str(file)).zero == 3
    for said in (FULL, {**FULL, "train_batch_size": 8.5}):
        text = base64.urlsafe_b64encode(json.dumps(said).encode()).decode()
        if said is FULL:
            assert fxzero.from_deepspeed(text).zero == 3
        else:
            with pytest.raises(ConfigError, match="the configuration in base64 has a key"):
                fxzero.from_deepspeed(text)
    with pytest.raises(ConfigError, match="names no file"):
        fxzero.from_deepspeed("")
    with pytest.raises(ConfigError, match=r"place of a path: json\.loads it"):
        fxzero.from_deepspeed(json.dumps(FULL))
    with pytest.raises(ConfigError, match="path of a JSON file or a dict"):
        fxzero.from_deepspeed(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        fxzero.from_deepspeed(file, learning_rates=1.0)  # type: ignore[call-arg]


def test_the_configuration_stays_as_it_was() -> None:
    """Nobody's dict is filled in."""
    config = copy.deepcopy(TRANSFORMERS["zero3"])
    fxzero.from_deepspeed(config, world_size=1, fp16=False, bf16=True, **TRAINER)
    assert config == TRANSFORMERS["zero3"]


def test_leave_out() -> None:
    """What is refused can be given up by name, and by nothing else."""
    config = {**FULL, "tensorboard": {"enabled": True}, "optimizer": {"type": "Lamb", "params": {}}}
    with pytest.raises(ConfigError, match="2 keys"):
        fxzero.from_deepspeed(config, world_size=1)
    made = fxzero.from_deepspeed(config, world_size=1, leave_out=["tensorboard", "optimizer"])
    assert made.make_optimizer is None
    assert {line.key for line in made.lines if "left out" in line.reason} == {
        "tensorboard",
        "optimizer",
    }
    with pytest.raises(ConfigError, match="leave_out names 'wandb'"):
        fxzero.from_deepspeed(config, leave_out=["wandb"])


OPTIMIZERS: list[tuple[str, dict[str, Any], Any]] = [
    ("Adam", {}, (torch.optim.AdamW, {"weight_decay": 0.0})),
    ("adam", {"lr": 0.1}, (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0})),
    ("Adam", {"adam_w_mode": False}, (torch.optim.Adam, {"weight_decay": 0.0})),
    ("AdamW", {"adam_w_mode": False}, (torch.optim.AdamW, {"weight_decay": 0.0})),
    ("AdamW", {"torch_adam": True}, (torch.optim.AdamW, {})),
    ("Adam", {"torch_adam": True, "amsgrad": True}, (torch.optim.AdamW, {"amsgrad": True})),
    ("AdamW", {"bias_correction": True}, (torch.optim.AdamW, {"weight_decay": 0.0})),
    ("Adagrad", {"lr": 0.1}, (torch.optim.Adagrad, {"lr": 0.1})),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})),
    ("RMSprop", {"foreach": True}, (torch.optim.RMSprop, {})),
    ("NAdam", {"betas": [0.5, 0.6]}, (torch.optim.NAdam, {"betas": (0.5, 0.6)})),
    ("AdamW", {"bias_correction": False}, "always corrects"),
    ("AdamW", {"amsgrad": True}, "no AMSGrad"),
    ("AdamW", {"max_grad_norm": 1.0}, "Say gradient_clipping"),
    ("AdamW", {"momentum": 0.9}, "no such parameter"),
    ("AdamW", {"betas": [0.9]}, "two numbers"),
    ("AdamW", {"betas": [0.9, 1.5]}, "does not take it"),
    ("AdamW", {"lr": "1e-3"}, "must be a number"),
    ("AdamW", {"lr": "auto"}, "learning_rate="),
    ("AdamW", {"amsgrad": "auto"}, "resolved by nobody"),
    ("SGD", {"lr": 0.1, "momentum": "auto"}, '"auto" is resolved by nobody here: say a value'),
    ("auto", {}, '"auto" is resolved by nobody. Choose AdamW'),
    ("SGD", {"lr": -1}, "must be a number"),
    ("sgd", {"lr": 0.1}, "did you mean 'SGD'"),
    ("Lamb", {}, "torch has no Lamb"),
    ("Lion", {}, "torch has no Lion"),
    ("Muon", {}, "torch has no Muon"),
    ("OneBitAdam", {}, "torch has no 1-bit Adam"),
    ("LBFGS", {}, "several times a step"),
    ("AdamZ", {}, "no such optimizer"),
]


@pytest.mark.parametrize(("kind", "params", "expected"), OPTIMIZERS)
def test_optimizers(kind: str, params: dict[str, Any], expected: Any) -> None:
    """What DeepSpeed computes under a name, or a refusal that says why."""
    config = {**FULL, "optimizer": {"type": kind, "params": params}}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            fxzero.from_deepspeed(config, world_size=1)
        return
    made = fxzero.from_deepspeed(config, world_size=1).make_optimizer
    assert made is not None
    assert (made.kind, made.settings) == expected


SCHEDULES: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupDecayLR", {}, "total_num_steps = .*needs it"),
    ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr = .*needs it"),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 0}, "whole number of 1 or more"),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_num_steps": 1e3}, "whole number of 1 or more"),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_type": "cosine"}, "WarmupCosineLR"),
    ("WarmupLR", {"warmup_max_lr": 1, "warmup_type": "lin"}, "did you mean 'linear'"),
    ("WarmupLR", {"warmup_max_lr": 1, "total_num_steps": 9}, "no such parameter"),
    ("WarmupLR", {"warmup_max_lr": "auto"}, "learning_rate="),
    ("WarmupRL", {}, "did you mean 'WarmupLR'"),
    ("ReduceLROnPlateau", {}, "stepped with a metric"),
    ("LambdaLR", {}, "does not take it"),
    ("StepLR", {"step_sizes": 3}, "does not take it"),
]


@pytest.mark.parametrize(("kind", "params", "message"), SCHEDULES)
def test_schedules_that_cannot_be(kind: str, params: dict[str, Any], message: str) -> None:
    """With what to say instead."""
    with pytest.raises(ConfigError, match=message):
        fxzero.from_deepspeed({**FULL, "scheduler": {"type": kind, "params": params}}, world_size=1)


def test_rates_for_other_groups_than_there_are() -> None:
    """Are found with the optimizer."""
    params = {"warmup_max_lr": 1.0, "warmup_min_lr": [0.1, 0.2]}
    config = {**FULL, "scheduler": {"type": "WarmupLR", "params": params}}
    made = fxzero.from_deepspeed(config, world_size=1)
    assert made.make_scheduler is not None
    with pytest.raises(ConfigError, match="each of 2 parameter groups, and the optimizer has 1"):
        made.make_scheduler(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))


def test_a_schedule_of_torchs() -> None:
    """By its name, as in DeepSpeed."""
    config = {**FULL, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}
    made = fxzero.from_deepspeed(config, world_size=1).make_scheduler
    assert made is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(made(optimizer), torch.optim.lr_scheduler.StepLR)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": True}}, "bf16.enabled is true too"),
    ({"bfloat16": {"enabled": True}}, "bf16 is the same key"),
    ({"data_types": {"param_dtype": "fp16"}}, "Let them say the same"),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "stage 0 offload",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "at stage 3, not at 2",
    ),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "say a folder"),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "at stage 3 alone",
    ),
    (
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        "Leave one",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "prefetch_bucket_size": 5,
                "stage3_prefetch_bucket_size": 5,
            }
        },
        "is the same key",
    ),
    ({"zero_optimization": {"stage": True}}, "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "auto"}}, "0, 1, 2 or 3"),
    ({"zero_optimization": None}, "must be an object"),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
    ({"scheduler": {"params": {"a": 1}}}, "scheduler.type is missing"),
]


@pytest.mark.parametrize(("keys", "message"), CONTRADICTIONS)
def test_contradictions(keys: dict[str, Any], message: str) -> None:
    """Where two keys cannot both hold."""
    with pytest.raises(ConfigError, match=message):
        fxzero.from_deepspeed({**FULL, **keys}, world_size=1)


def test_more_than_120_configurations() -> None:
    """The number that was asked for."""
    published = 2 * (len(TRANSFORMERS) + len(ACCELERATE)) + len(REFUSED)
    assert published + len(KEYS) + len(FEATURES) + len(TYPOS) >= 120 + 40
    assert len(TYPOS) >= 40
