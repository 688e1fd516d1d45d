"""What a configuration is mapped to trains, by both doors, and both say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from examples.deepspeed_json import DECIDED
from examples.deepspeed_json import _refuse_both as refuse_both
from fxzero.errors import CheckpointError, ConfigError
from fxzero.integrations.deepspeed import DeepSpeedSchedule
from tests.integrations.deepspeed_cases import BASE, Net, batch, loss_fn, loss_of_step
from tests.parity.harness import Pools

EAGER = {"lower_regions": {"backend": "eager"}, "strict": True}
KINDS: dict[str, dict[str, Any]] = {
    "no overlap": {"zero_optimization": {"stage": 2, "overlap_comm": False}},
    "no prefetch": {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}},
    "no reuse": {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}},
    "few live": {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10}},
    "old form": {"zero_optimization": True, "allgather_size": 100},
    "parameters alone": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "a part": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}
    },
    "saved values": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "bf16 reduced": {"communication_data_type": "bf16", "zero_optimization": {"stage": 2}},
    "none live": {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "NAdam": {"optimizer": {"type": "NAdam", "params": {"lr": 0.01}}},
    "StepLR": {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}},
}
WHOLE_STEPS = ("a part", "saved values", "on disk")


def read(keys: dict[str, Any]) -> Any:
    """A configuration of one rank."""
    return fxzero.from_deepspeed({**BASE, **keys}, world_size=1)


def by_step(keys: dict[str, Any], steps: int = 2, **options: Any) -> list[float]:
    """Losses of whole steps, and that of another batch behind them."""
    torch.compiler.reset()
    net = Net()
    step = read(keys).compile_step(net, loss_fn=loss_fn, options={**EAGER, **options})
    return [step(*batch(number, 0, 1)).loss.item() for number in range(steps)]


def by_engine(keys: dict[str, Any], steps: int = 2, options: Any = EAGER) -> list[float]:
    """The same by DeepSpeed's three calls."""
    torch.compiler.reset()
    made, net = read(keys), Net()
    engine = made.engine(net, options=options)
    losses = []
    for number in range(steps):
        losses.append(loss_of_step(engine, *batch(number, 0, 1), 2))
    assert engine.global_steps == steps
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_both_doors(kind: str) -> None:
    """Two steps; the second loss shows the first update."""
    keys = KINDS[kind]
    losses = by_step(keys)
    assert abs(losses[1] - by_step({**keys, "optimizer": SLOW})[1]) > 1e-3, "nothing was updated"
    if kind in WHOLE_STEPS:
        with pytest.raises(ConfigError, match="use compile_step"):
            by_engine(keys)
        return
    close = 2e-3 if "fp16" in keys else 1e-5
    assert by_engine(keys) == pytest.approx(losses, rel=close)


SLOW = {"type": "AdamW", "params": {"lr": 0.0}}


def test_on_disk(tmp_path: Path) -> None:
    """What is on NVMe there is on disk here, and says the same as in memory."""
    device = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": device, "offload_param": {**device, "max_in_cpu": 0}}
    keys = {"zero_optimization": zero, "aio": {"block_size": 5000, "queue_depth": 2}}
    made = read(keys)
    assert made.options["disk"] == {"paths": [str(tmp_path)], "depth": 2, "chunk_bytes": 8192}
    assert made.options["host_budget"] == "least"
    assert by_step(keys) == pytest.approx(by_step({}), rel=1e-5)
    with pytest.raises(ConfigError, match="on disk"):
        by_engine(keys)


def test_default_settings() -> None:
    """Compiled by Inductor, as it comes."""
    zero = {"zero_optimization": {"stage": 2}}
    assert by_engine(zero, options=None) == pytest.approx(by_step({}), rel=1e-5)


def test_fp16_skips_what_overflows() -> None:
    """The scale falls, nothing else changes, and the schedule waits."""
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
    }
    torch.compiler.reset()
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    engine = read({**keys, "gradient_accumulation_steps": 1}).engine(net, options=EAGER)
    assert engine.loss_scale is not None
    scale = engine.loss_scale.value
    inputs, targets = batch(0, 0, 1)
    engine.backward(loss_fn(engine(inputs), targets))
    engine.step()
    assert (engine.skipped_steps, engine.loss_scale.value) == (1, scale / 2)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert engine.lr_scheduler is not None
    assert engine.lr_scheduler.last_epoch == 0


def test_bf16_skips_what_is_not_finite() -> None:
    """check_grad_overflow: the engine skips, a whole step stops and says where."""
    keys = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 1}
    inputs, targets = batch(0, 0, 1)
    inputs[0, 0] = float("inf")
    torch.compiler.reset()
    engine = read(keys).engine(Net(), options=EAGER)
    engine.backward(loss_fn(engine(inputs), targets))
    engine.step()
    assert engine.skipped_steps == 1
    torch.compiler.reset()
    step = read(keys).compile_step(Net(), loss_fn=loss_fn, options=EAGER)
    with pytest.raises(fxzero.NonFiniteGradientError):
        step(inputs, targets)


def test_what_contradicts_the_file() -> None:
    """An optimizer beside the file's, a model that is sharded otherwise, no optimizer at all."""
    made, net = read({}), Net()
    with pytest.raises(ConfigError, match=r"leave_out=\['optimizer'\]"):
        made.compile_step(net, torch.optim.SGD(net.parameters()), loss_fn)
    with pytest.raises(ConfigError, match="zero=3"):
        made.compile_step(fxzero.shard(Net(), zero=3), loss_fn=loss_fn)
    without = fxzero.from_deepspeed(BASE, world_size=1, leave_out=["optimizer"])
    with pytest.raises(ConfigError, match="has no optimizer"):
        without.engine(Net())
    net = Net()
    fxzero.shard(net)
    engine = without.engine(net, torch.optim.SGD(net.parameters(), lr=0.1), options=EAGER)
    assert engine.get_lr() == [0.1]


class Spare(Net):
    """With a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_has_no_gradient_decays(stage: int) -> None:
    """DeepSpeed updates it by zeros; a whole step leaves it, as torch's optimizers do."""
    torch.compiler.reset()
    made = read({"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1})
    for door in ("engine", "step"):
        net = Spare()
        before = net.spare.weight.detach().clone()
        if door == "engine":
            engine = made.engine(net, options=EAGER)
            inputs, targets = batch(0, 0, 1)
            engine.backward(loss_fn(engine(inputs), targets))
            engine.step()
        else:
            made.compile_step(net, loss_fn=loss_fn, options=EAGER)(*batch(0, 0, 1))
        decay = 1 - 0.02 * 0.1 if door == "engine" else 1.0
        torch.testing.assert_close(net.spare.weight.detach(), before * decay)


def steps_of(engine: Any, numbers: range) -> list[float]:
    """Train some steps, and return their losses."""
    return [loss_of_step(engine, *batch(number, 0, 1), 2) for number in numbers]


@pytest.mark.parametrize("tag", [None, "best"])
def test_checkpoints_of_an_engine(tmp_path: Path, tag: str | None) -> None:
    """Another engine goes on from one, counters, scale and schedule too."""
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    torch.compiler.reset()
    first, second, third = (read(keys).engine(Net(), options=EAGER) for _ in range(3))
    assert second.load_checkpoint(tmp_path) == (None, None)
    steps_of(first, range(2))
    assert first.save_checkpoint(tmp_path, tag, {"epoch": 3})
    path, client = second.load_checkpoint(tmp_path)
    assert client == {"epoch": 3}
    assert str(path).startswith(str(tmp_path / (tag or "step")))
    assert (second.global_steps, second.global_samples, second.micro_steps) == (2, 16, 4)
    assert second.cur_scale == first.cur_scale != 2.0**8
    assert steps_of(second, range(2, 4)) == steps_of(first, range(2, 4))
    assert third.load_checkpoint(tmp_path, load_module_only=True)[1] == {}
    assert (third.global_steps, third.cur_scale) == (0, 2.0**8)
    with pytest.raises(ConfigError, match="load_module_strict"):
        third.load_checkpoint(tmp_path, load_module_strict=False)
    with pytest.raises(ConfigError, match="exclude_frozen_parameters"):
        third.save_checkpoint(tmp_path, exclude_frozen_parameters=True)


def saved_twice(folder: str) -> tuple[str, str]:
    """Job: what is loaded of two tags, and what is said of a name that nobody can read."""
    torch.compiler.reset()
    made = fxzero.from_deepspeed({**BASE, "zero_optimization": {"stage": 2}})
    engine = made.engine(Net(), options=EAGER)
    for tag in ("a", "b"):
        engine.save_checkpoint(folder, tag)
    path, _ = engine.load_checkpoint(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest").write_bytes(b"\xff")
    with pytest.raises(CheckpointError) as failed:
        engine.load_checkpoint(folder)
    return str(path), str(failed.value)


def test_all_ranks_load_what_rank_0_reads_of_the_last(ranks: Pools, tmp_path: Path) -> None:
    for path, said in ranks(2).run(saved_twice, str(tmp_path)):
        assert path.startswith(str(tmp_path / "b"))
        assert "latest cannot be read" in said


def test_what_loops_ask_an_engine() -> None:
    """By DeepSpeed's names; what the model has too, and what is done otherwise."""
    torch.compiler.reset()
    net = Net()
    engine = read({}).engine(net, options=EAGER)
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.gradient_clipping(),
        engine.zero_optimization_stage(),
    )
    assert sizes == (8, 4, 2, 0.5, 0)
    assert (engine.global_rank, engine.world_size, engine.cur_scale) == (0, 1, 1.0)
    assert (engine.get_lr(), engine.get_mom()) == ([0.02], [(0.9, 0.999)])
    assert engine.state_dict().keys() == dict(engine.named_parameters()).keys()
    assert engine.first is net.first
    assert engine.to(engine.device).eval().training is False
    assert engine.train().training
    inputs, targets = batch(0, 0, 1)
    loss = loss_fn(engine.forward(inputs), targets)
    with engine.no_sync(), pytest.raises(ConfigError, match="step behind it"):
        engine.step()
    half = engine.backward(loss, retain_graph=True)
    assert torch.equal(engine.backward(loss, scale_wrt_gas=False), 2 * half)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.parameters())
    assert not engine.was_step_applied()
    steps_of(engine, range(1))
    assert engine.was_step_applied()
    engine.compile(backend="inductor")
    for name, message in (
        ("save_16bit_model", r"fxzero\.checkpoint\.export"),
        ("half", "bf16.enabled"),
        ("no_such", "no 'no_such', nor has its Net"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(engine, name)
    with pytest.raises(ConfigError, match="is sharded, on cpu"):
        engine.to(torch.bfloat16)
    other = read({"zero_optimization": {"stage": 2}}).engine(Net(), options=EAGER)
    with pytest.raises(ConfigError, match="at stage 2"), other.no_sync():
        pass


def test_a_schedule_goes_on_from_its_state() -> None:
    """A checkpoint holds where it is; the rule comes from the file."""
    keys = {
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3},
        }
    }
    make = read(keys).make_scheduler
    optimizers = [torch.optim.AdamW([nn.Parameter(torch.zeros(1))]) for _ in range(2)]
    one, other = (make(optimizer) for optimizer in optimizers)
    assert isinstance(one, DeepSpeedSchedule)
    for _ in range(2):
        optimizers[0].step()
        one.step()
    assert "rule" not in one.state_dict()
    other.load_state_dict(one.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for scheduler, optimizer in zip((one, other), optimizers, strict=True):
        optimizer.step()
        scheduler.step()
    assert one.get_last_lr() == other.get_last_lr()
    assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


def test_a_plugin_says_the_same() -> None:
    """For Trainer, Accelerate and Lightning."""
    made = read({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    plugin = made.plugin()
    assert (plugin.zero, plugin.offload) == (2, True)
    assert "memory" not in (plugin.options or {})


@pytest.mark.parametrize("name", DECIDED)
def test_the_example_refuses_what_the_file_decides(name: str) -> None:
    """On its command line."""
    from examples.failures import SettingsError

    class Said:
        deepspeed = "ds.json"

        class mesh:  # noqa: N801
            pipeline = 1

    with pytest.raises(SettingsError, match="decides that"):
        refuse_both(Said, read({}), [f"{name}=1"])  # type: ignore[arg-type]
    refuse_both(Said, read({}), ["trainer.steps=3", "fxzero.strict=true"])  # type: ignore[arg-type]


def test_a_tools_own_loop_does_not_scale_the_loss() -> None:
    """Gradients too small for fp16 would be zeros, without a word."""
    said = {"train_batch_size": 2, "gradient_clipping": 1.0, "fp16": {"enabled": True}}
    made = fxzero.from_deepspeed(said, world_size=1)
    with pytest.raises(fxzero.ConfigError, match=r"trains in fp16, .* Say bf16"):
        made.plugin()


def test_a_tools_own_loop_does_not_look_at_gradients() -> None:
    """Asked for that is refused; where it is DeepSpeed's default it is said."""
    said = {"train_batch_size": 2, "gradient_clipping": 1.0}
    for bf16, version in (({}, "0.19.8"), ({"check_grad_overflow": True}, None)):
        keys = {**said, "bf16": {"enabled": True, **bf16}}
        made = fxzero.from_deepspeed(keys, deepspeed_version=version, world_size=1)
        if bf16:
            with pytest.raises(ConfigError, match=r"overflow: true, .*\(whole_step=True\)"):
                made.plugin()
        else:
            with pytest.warns(fxzero.FxZeroWarning, match="check_grad_overflow on by default"):
                made.plugin()
        assert (made.plugin(whole_step=True).options or {})["stop_unless_finite"] is True
    quiet = {**said, "bf16": {"enabled": True, "check_grad_overflow": False}}
    fxzero.from_deepspeed(quiet, world_size=1).plugin()
