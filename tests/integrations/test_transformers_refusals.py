"""What FxZeroTrainer and FxZeroCallback refuse, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from fxzero.errors import ConfigError, ShardingError
from fxzero.integrations.transformers import (
    FxZeroCallback,
    FxZeroMixin,
    FxZeroPlugin,
    FxZeroTrainer,
)
from fxzero.integrations.transformers.arguments import check_model
from fxzero.sharding.shard import model_state
from tests.integrations.trainer_runs import CHEAP, as_torchrun_says, llama, rows_of


def _arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **given)


def _set(name: str, value: Any) -> Any:
    """An argument that TrainingArguments itself checks against what is installed here."""

    def make(folder: Path) -> TrainingArguments:
        args = _arguments(folder)
        setattr(args, name, value)
        return args

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_set("deepspeed", "ds.json"), "deepspeed="),
        (_set("fsdp", ["full_shard"]), "fsdp="),
        (_set("parallelism_config", object()), "parallelism_config="),
        (_set("fp16", True), "fp16=True"),
        (_set("bf16_full_eval", True), "bf16_full_eval=True"),
        (_set("auto_find_batch_size", True), "auto_find_batch_size=True"),
        (_set("use_liger_kernel", True), "use_liger_kernel=True"),
        (_set("_n_gpu", 2), "torchrun"),
        (_set("save_on_each_node", True), "save_on_each_node=True"),
        (lambda f: _arguments(f, torch_compile_backend="eager"), "torch_compile_backend='eager'"),
        (
            lambda f: _arguments(f, torch_compile_mode="max-autotune"),
            "torch_compile_mode='max-autotune'",
        ),
    ],
)
def test_an_argument_that_cannot_be_kept_is_refused(tmp_path: Path, make: Any, said: str) -> None:
    model = llama(0.0)
    with as_torchrun_says(), pytest.raises(ConfigError, match=said.replace("(", "\\(")):
        FxZeroTrainer(model=model, args=make(tmp_path))
    assert model_state(model) is None


@pytest.mark.parametrize("name", ["adamw_8bit", "galore_adamw", "lomo", "grokadamw"])
def test_an_optimizer_that_would_be_wrong_on_shards_is_refused(tmp_path: Path, name: str) -> None:
    with as_torchrun_says():
        trainer = FxZeroTrainer(
            model=llama(0.0),
            args=_arguments(tmp_path, optim=name, max_steps=1),
            train_dataset=rows_of("llama", 8),
            fxzero=FxZeroPlugin(options=CHEAP),
        )
        with pytest.raises(ConfigError, match=f"optim='{name}'"):
            trainer.train()


def test_dtypes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    plugin = FxZeroPlugin(param_dtype=torch.float16)
    with as_torchrun_says(), pytest.raises(ConfigError, match="say two things"):
        FxZeroTrainer(model=llama(0.0), args=_arguments(tmp_path, bf16=True), fxzero=plugin)


def test_a_precision_of_the_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under plain Trainer it is autocast; here nobody would see it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with as_torchrun_says(), pytest.raises(ConfigError, match="mixed_precision='bf16'"):
        FxZeroTrainer(model=llama(0.0), args=_arguments(tmp_path))


def test_a_compiler_of_the_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    with as_torchrun_says(), pytest.raises(ConfigError, match="dynamo_backend='EAGER'"):
        FxZeroTrainer(model=llama(0.0), args=_arguments(tmp_path))


def test_compiling_and_not_compiling_is_refused(tmp_path: Path) -> None:
    with as_torchrun_says():
        args = _arguments(tmp_path, torch_compile=True)  # notes it in the environment
        with pytest.raises(ConfigError, match="torch_compile=True"):
            FxZeroTrainer(model=llama(0.0), args=args, fxzero=FxZeroPlugin(compile=False))


def test_what_is_no_plugin_is_refused(tmp_path: Path) -> None:
    with as_torchrun_says(), pytest.raises(ConfigError, match="FxZeroPlugin"):
        FxZeroTrainer(model=llama(0.0), args=_arguments(tmp_path), fxzero=3)  # type: ignore[arg-type]


def test_a_model_that_others_have_laid_out_is_refused(tmp_path: Path) -> None:
    model = llama(0.0)
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    with as_torchrun_says(), pytest.raises(ShardingError, match="device_map="):
        FxZeroTrainer(model=model, args=_arguments(tmp_path))


@pytest.mark.parametrize("name", ["layerdrop", "encoder_layerdrop", "decoder_layerdrop"])
def test_layers_that_each_rank_leaves_out_by_itself_are_refused(name: str) -> None:
    model = llama(0.0)
    setattr(model.config, name, 0.1)
    check_model(model, zero=0)
    with pytest.raises(ShardingError, match=f"Set {name}=0.0"):
        check_model(model, zero=1)


def test_a_mixin_behind_its_trainer_is_refused() -> None:
    """Nothing of it would run, and plain DDP would train."""
    with pytest.raises(ConfigError, match=r"Write class Mine\(FxZeroMixin, Trainer\)"):

        class Mine(Trainer, FxZeroMixin): ...


def test_a_constructor_that_goes_round_the_mixin_is_refused(tmp_path: Path) -> None:
    class Mine(FxZeroTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Trainer.__init__(self, *args, **kwargs)

    with as_torchrun_says(), pytest.raises(ConfigError, match=r"Call super\(\).__init__"):
        Mine(model=llama(0.0), args=_arguments(tmp_path))


@pytest.mark.parametrize("change", ["another model", "adapters"])
def test_a_model_that_comes_after_the_trainer_is_refused(tmp_path: Path, change: str) -> None:
    """Who trains would be another than the line has said."""
    from peft import LoraConfig, get_peft_model

    with as_torchrun_says():
        trainer = FxZeroTrainer(
            model=llama(0.0),
            args=_arguments(tmp_path, max_steps=1),
            train_dataset=rows_of("llama", 8),
            fxzero=FxZeroPlugin(options=CHEAP),
        )
        config = LoraConfig(r=2, target_modules=["q_proj"])
        trainer.model = (
            llama(0.0) if change == "another model" else get_peft_model(trainer.model, config)
        )
        with pytest.raises(ShardingError, match="before the Trainer is made"):
            trainer.train()


def test_learned_prompts_are_refused(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(
        llama(0.0), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with as_torchrun_says(), pytest.raises(ShardingError, match="learns a prompt"):
        FxZeroTrainer(model=model, args=_arguments(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "save_strategy='steps'"),
        ({"save_strategy": "no", "bf16": True}, "bf16=True"),
        ({"save_strategy": "no", "optim": "galore_adamw"}, "optim='galore_adamw'"),
    ],
)
def test_a_callback_refuses_what_it_cannot_do(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    model = llama(0.0)
    with as_torchrun_says():
        args = _arguments(tmp_path, **given)  # notes bf16 in the environment
        with pytest.raises(ConfigError, match=said):
            Trainer(model=model, args=args, callbacks=[FxZeroCallback()])
    assert model_state(model) is None


def test_a_callback_refuses_a_model_that_it_has_not_seen(tmp_path: Path) -> None:
    with as_torchrun_says():
        trainer = Trainer(
            model_init=lambda: llama(0.0),
            args=_arguments(tmp_path, save_strategy="no", max_steps=1),
            train_dataset=rows_of("llama", 8),
            callbacks=[FxZeroCallback(FxZeroPlugin(options=CHEAP))],
        )
        with pytest.raises(ShardingError, match="model_init"):
            trainer.train()


def test_importing_fxzero_loads_no_trainer() -> None:
    import subprocess
    import sys

    code = "import fxzero, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_trainer_of_ones_own_takes_the_mixin(tmp_path: Path) -> None:
    """In one process: the same lines train without collectives, and one line says so."""

    class Mine(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return 2 * loss if isinstance(loss, torch.Tensor) else loss

    class Sharded(FxZeroMixin, Mine): ...

    weights = []
    for kind, given in ((Mine, {}), (Sharded, {"fxzero": FxZeroPlugin(options=CHEAP)})):
        with as_torchrun_says():
            transformers.set_seed(0)
            trainer = kind(
                model=llama(0.0),
                args=_arguments(tmp_path, max_steps=3, save_strategy="no"),
                train_dataset=rows_of("llama", 32),
                **given,
            )
            trainer.train()
            weights.append({k: v.detach() for k, v in trainer.model.state_dict().items()})
    plain, sharded = weights
    for name, value in plain.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-5, atol=1e-6)
