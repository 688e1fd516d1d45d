"""Which stages of a pipeline hold a model's parameters, found from a micro-batch.

    fxzero.shard(model, mesh=mesh, example_inputs=(ids,))     stages that take equally long

A copy of the model without values is captured as one step on one rank, and cut as `fxzero inspect
--mesh` cuts it (`fxzero.schedule.stages`). Every rank does so by itself, and finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxzero import _compat
from fxzero._compat import pytree
from fxzero.compiler.config import Config
from fxzero.compiler.memory_budget import NO_BUDGET, MemoryBudget
from fxzero.cost.settings import device_of
from fxzero.errors import CaptureError, ConfigError, ShardingError
from fxzero.inspect.capture import scalar_of
from fxzero.inspect.pipeline import collecting_micro_steps
from fxzero.pipeline.schedules import example_table, places_of_stages
from fxzero.regions.region import regions_to_look_at
from fxzero.schedule.stages import Limit, holders_of, states_of
from fxzero.sharding.pipeline import StagesWanted
from fxzero.sharding.precision import Precision
from fxzero.sharding.shard import shard_alone
from fxzero.step.train_step import TrainStep

MICRO_STEPS_PER_STAGE = 4
"""For how many micro-batches stages are made, which is not known when a model is sharded: as many
as keep the idle share of 1F1B below a fifth."""


def find_holders(
    model: nn.Module, example_inputs: Any, wanted: StagesWanted
) -> dict[str, tuple[int, ...]]:
    """By a parameter's name, the stages that hold it: such that all stages take equally long.

    Args:
        example_inputs: the model's arguments for one micro-batch: a tensor, a tuple, or a mapping
            of keyword arguments.

    Raises:
        ConfigError: there are fewer places to cut at than stages, or none fit the budget.
        CaptureError: the forward cannot be traced as one graph.
    """
    num_stages = len(places_of_stages(wanted.schedule, wanted.num_ranks))
    budget = MemoryBudget.parse(wanted.memory_budget or NO_BUDGET)
    args, kwargs = _arguments(example_inputs)
    _compat.reset_dynamo()
    try:
        with _compat.fake_copies() as fake, collecting_micro_steps() as seen:
            copy = fake(model)
            args, kwargs = fake(args), fake(kwargs)
            shard_alone(copy)
            step = TrainStep(
                copy,
                torch.optim.SGD(copy.parameters(), lr=0.0, fused=True),
                None,
                micro_batches=1,
                clip_grad_norm=None,
                precision=Precision(),
                scheduler=None,
                config=Config(strict=True),
                find_loss=scalar_of,
                runs=False,
            )
            with regions_to_look_at():
                step(*args, **kwargs)
    except (CaptureError, ConfigError) as error:
        raise CaptureError(
            "stages of a pipeline are found from one graph of the model's forward and backward, "
            f"and example_inputs= gave none:\n{error}\nPass stages={{'h.0': 0, …}} instead, or "
            "rewrite what it names."
        ) from error
    finally:
        _compat.reset_dynamo()
    ((graph, costs),) = seen
    micro_steps, limit = MICRO_STEPS_PER_STAGE * num_stages, None
    if budget is not None:
        limit = Limit.of(
            example_table(wanted.schedule, wanted.num_ranks, micro_steps),
            budget.bytes_of(lambda: Config().cost.device_bytes(device_of(graph))),
            states_of(wanted.zero, wanted.num_shards),
        )
    found = holders_of(
        graph,
        costs,
        num_stages,
        micro_steps,
        limit=limit,
        ranks_per_stage=wanted.ranks_per_stage,
    )
    empty = set(range(num_stages)).difference(*found.values())
    if empty:
        raise ConfigError(
            f"{num_stages} stages that take equally long leave stage {min(empty)} without a "
            "parameter: the model is too small, or most of its time is in one operator. Take fewer "
            "stages, or pass stages={'h.0': 0, …}."
        )
    return {name: found.get(name, (0,)) for name, _ in model.named_parameters()}


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the forward is called with."""
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    else:
        is_several = isinstance(example_inputs, (tuple, list))
        args, kwargs = tuple(example_inputs) if is_several else (example_inputs,), {}
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise ShardingError(
            f"example_inputs={example_inputs!r} holds no tensor. Pass what the model's forward is "
            "called with for one micro-batch: a tuple, or a mapping of keyword arguments."
        )
    return args, kwargs
