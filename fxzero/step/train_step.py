"""`fxzero.compile_step`: forward, loss, backward, clipping and update, compiled as one graph."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxzero import _compat
from fxzero._compat import pytree
from fxzero.checkpoint.state import TrainState
from fxzero.compiler import dump_folder
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import step_passes
from fxzero.errors import BatchError, CaptureError, ConfigError, FxZeroError, FxZeroWarning
from fxzero.ranks.agree import give_up
from fxzero.runtime.checked_saves import check_saves
from fxzero.runtime.delayed import use_gradients, watch_state_dicts
from fxzero.runtime.disk_arena import disk_arena_of
from fxzero.runtime.optimizers import OptimizerLayout, create_state, kernels_of
from fxzero.runtime.residents import release
from fxzero.sharding.before_step import before_step, refuse_strangers
from fxzero.sharding.buffers import sync_buffers
from fxzero.sharding.gradients import hooks_of_users
from fxzero.sharding.identity import as_now
from fxzero.sharding.params import GradSync, ModelState, ParamSpec, register
from fxzero.sharding.precision import LossScale, Precision, set_precision
from fxzero.sharding.shard import model_state, param_specs, shard
from fxzero.step.binding import Binder
from fxzero.step.capture import WITHOUT_CHECKPOINTS, SeveralGraphsError, compile_graph
from fxzero.step.checks import (
    check_divides,
    check_micro_batches,
    check_scheduler,
    check_splits,
    held_as_sharded,
    optimized_parameters,
    refuse_beside_pipeline,
    refuse_ignored,
    refuse_other_batch,
    refuse_without_group_for_state,
)
from fxzero.step.loop import LoopStep
from fxzero.step.loss import loss_function, unwrapped

log = logging.getLogger("fxzero")


@dataclass(frozen=True)
class StepOutput:
    """What one training step did."""

    loss: Tensor
    """This rank's mean loss over the micro-batches; 0-d, without gradient."""
    grad_norm: Tensor | None
    """2-norm of all gradients before clipping, equal on all ranks; 0-d. None unless the step has a
    ``clip_grad_norm``, scales its loss, or stops at gradients that are not finite."""
    learning_rates: tuple[float, ...]
    """What this step updated each parameter group with."""
    skipped: bool
    """Whether gradients overflowed in fp16, so that nothing was changed."""

    @property
    def learning_rate(self) -> float:
        """The first parameter group's learning rate."""
        return self.learning_rates[0]


def compile_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    precision: Precision | str | torch.dtype | None = None,
    scheduler: LRScheduler | None = None,
    options: Mapping[str, Any] | Config | None = None,
) -> TrainStep:
    """Make one call of a whole training step.

        step = fxzero.compile_step(model, optimizer, loss_fn)
        for inputs, targets in loader:
            loss = step(inputs, targets).loss

    Parameters, buffers and optimizer state stay the model's and the optimizer's own tensors:
    stop after any step, save, train on with an ordinary loop, come back.

    Args:
        model: any module; one that `fxzero.shard` has not seen is sharded with ``zero=0``. With
            ``shard(offload=True)`` the step is one of ``memory="all_host"``, unless `options` say
            otherwise.
        optimizer: over the model's parameters. SGD, Adam, AdamW and Adagrad are updated by
            torch's fused kernels, bucket by bucket (on CUDA with ``fused=True``); another
            optimizer runs its own ``step()`` at the end.
        loss_fn: ``loss_fn(model(*batch[:-1]), batch[-1])``; without it the model returns
            its loss, or something that has one: an attribute or a key ``loss``, or a tuple
            that begins with it.
        micro_batches: into how many parts each tensor of a batch is split along dim 0.
            Gradients are those of the mean of the parts' losses. What the forward does to
            Python objects happens once a step, what it does to buffers in every part.
        clip_grad_norm: the largest 2-norm of the gradients of all parameters that the
            optimizer has; ``math.inf`` takes the norm for `StepOutput`, and clips nothing.
        precision: ``"bf16"``, ``"fp16"`` (with loss scaling), a dtype, or a `Precision`. The
            default is what `fxzero.shard` was told.
        scheduler: a learning-rate scheduler to step after every step that was not skipped.
        options: settings of `fxzero.Config`.

    Raises:
        ConfigError: a setting that does not exist or does not fit; an optimizer over other
            parameters than the model's.
        CaptureError: an optimizer that cannot be part of a step.
    """
    return TrainStep(
        model,
        optimizer,
        loss_fn,
        micro_batches=micro_batches,
        clip_grad_norm=clip_grad_norm,
        precision=Precision.of(precision),
        scheduler=scheduler,
        config=Config.from_options(options),
    )


class TrainStep:
    """A compiled training step: call it with a batch. See `compile_step`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        *,
        micro_batches: int,
        clip_grad_norm: float | None,
        precision: Precision,
        scheduler: LRScheduler | None,
        config: Config,
        find_loss: Callable[[Any], Any] | None = None,
        call: Callable[..., Any] | None = None,
        runs: bool = True,
    ) -> None:
        """See `compile_step`.

        Args:
            find_loss: what finds the loss in what the model returns, for those who look at models
                that return something else.
            call: what gets the batch in the model's place, for tools that have a function of model
                and batch. It calls the model, and returns what the model would.
            runs: whether its graph runs once it is compiled; somebody may only look at it.
        """
        self._runs = runs
        self.model = model = getattr(model, "_orig_mod", model)
        self.optimizer = optimizer = unwrapped(optimizer, "optimizer", Optimizer)
        self.scheduler = scheduler = unwrapped(scheduler, "scheduler", LRScheduler)
        self._micro_batches = check_micro_batches(micro_batches)
        as_now(optimizer)
        check_scheduler(scheduler, optimizer)
        parameters = optimized_parameters(model, optimizer)
        kernels_of(optimizer)  # raises for what cannot be captured, before the model is touched
        step_passes(config, self._micro_batches, clip_grad_norm)  # raises for bad settings
        if model_state(model) is None:
            shard(model, zero=0)
            parameters = optimized_parameters(model, optimizer)
        config = held_as_sharded(config, param_specs(model))
        refuse_without_group_for_state(config, param_specs(model))
        refuse_beside_pipeline(config, param_specs(model), kernels_of(optimizer))
        lowered = {precision.param_dtype} - {None}
        if torch.float16 not in (lowered or {s.compute_dtype for s in param_specs(model).values()}):
            precision.refuse_loss_scale()
        refuse_strangers(optimizer)
        set_precision(model, precision)
        if runs:
            dump_folder.expect(config.dump)
        specs = param_specs(model)
        scaled = any(s.compute_dtype is torch.float16 for s in specs.values())
        self.loss_scale = LossScale(precision) if scaled else None
        """The loss scale of an fp16 run; save and load its state_dict with a checkpoint."""
        self._config = config
        self._clip_grad_norm = clip_grad_norm
        state = model_state(model)
        assert state is not None
        self._state: ModelState = state
        self._specs = _specs_by_identity(model, specs, state)
        if clip_grad_norm is not None or scaled or config.stop_unless_finite:
            refuse_ignored(parameters, specs)
        self._parameters = parameters
        self._modules = list(model.modules())
        self._loss_fn = loss_fn
        self._find_loss = find_loss
        self._call = call
        self._fp32_loss = precision.fp32_loss
        self._structure: object = None
        self._loss: Callable[..., Any] | None = None
        self._compiled_shapes: list[str] = []
        self._programs: list[tuple[Binder, Callable[[list[Any]], Any]]] = []
        """What Dynamo's graphs were compiled to."""
        self._traced: set[tuple[Any, ...]] = set()
        """Shapes of the batches that were traced."""
        self._batch_is_known = False
        """Of a pipeline, whether its ranks have compared their first batch."""
        self._loop: LoopStep | None = None
        """What trains instead where Dynamo cannot trace the step as one graph."""
        self._result: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        self._has_begun = False
        """Whether the call that is running has come to its graph."""
        self._has_compared = False
        """Whether its batch needs no comparing any more, as has been done or was before."""
        self._layout = self._new_layout()

    @property
    def falls_back(self) -> bool:
        """Whether the step is no single graph, and trains by the ordinary loop; known from the
        first step on."""
        return self._loop is not None

    def __call__(self, *batch: Any, **kwargs: Any) -> StepOutput:
        """Train on one batch: this rank's.

        Args:
            batch: the model's arguments, then the target if there is a `loss_fn`. Tensors of
                one dim or more are split along dim 0 if there are several micro-batches.
            kwargs: further arguments of the model.

        Raises:
            BatchError: a batch that does not divide by the number of micro-batches.
            CaptureError: a loss that is no scalar; under ``strict`` a forward that is no single
                graph (else a warning, and the step trains in several graphs).
            DiskError: what is on disk cannot be read, or is not what was written; or it cannot be
                written: the step is complete then, and its output is the error's ``output``.
            NonFiniteGradientError: gradients that are not finite, where that is an error.
        """
        with self._telling_other_stages():
            self._check(batch, kwargs)
            self._follow_changes()
            if self._state.pipeline is not None and not self._has_compared:
                self._has_compared = True
                refuse_other_batch(self._state.pipeline, (tuple(batch), dict(kwargs)))
                self._batch_is_known = True
            if self._layout.kernels and self._loop is None:  # others are looked at when they step
                before_step(self.optimizer)
            assert self._loss is not None
            rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
            result = self._train_as_one_graph(batch, kwargs) if self._loop is None else None
        if result is None:
            scale = self.loss_scale.value if self.loss_scale is not None else None
            assert self._loop is not None
            with torch.enable_grad():
                result = self._loop(batch, kwargs, scale)
        loss, norm, skip = result
        skipped = self.loss_scale is not None and skip is not None and bool(skip.item())
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        if not skipped:
            self._count_elsewhere()
            _compat.mark_stepped(self.optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
        output = StepOutput(loss, norm, rates, skipped)
        arena = disk_arena_of(self.optimizer)
        if arena is not None and arena.store.failures:
            error, *_ = arena.store.failures
            arena.store.failures.clear()
            error.output = output
            raise error
        return output

    @contextlib.contextmanager
    def _telling_other_stages(self) -> Iterator[None]:
        """Of a pipeline, let no rank wait for one whose graph does not begin: each compiles a graph
        of its own, and may be the only one to fail."""
        self._has_begun, self._has_compared = False, self._batch_is_known
        try:
            yield
        except Exception as error:
            pipeline = self._state.pipeline
            if pipeline is not None and not self._has_compared:
                refuse_other_batch(pipeline, None)
            elif pipeline is not None and self._batch_is_known and not self._has_begun:
                give_up(pipeline.group.name, f"{type(error).__name__}: {error}")
            raise

    def _count_elsewhere(self) -> None:
        """Count the steps of parameters of other stages of a pipeline, which those have updated: a
        checkpoint may be written by any rank that knows of them."""
        if self._state.pipeline is None:
            return
        state = self.optimizer.state
        away = [p for p in self._parameters.values() if not self._specs[id(p)].is_here]
        steps = [state[p]["step"] for p in away if isinstance(state.get(p, {}).get("step"), Tensor)]
        if steps:
            _compat.foreach_add_(steps, 1)

    def use_gradients(self) -> None:
        """Run the updates that the last step has left to the next one (`offload_states.delay`): at
        the end of training, or before a model is looked at that has learned all that it has seen.
        Whoever makes a state dict gets that by itself."""
        use_gradients(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on: model, optimizer by names, scheduler, loss scale. Its
        tensors are those that are trained, this rank's parts of them.

        `torch.distributed.checkpoint` saves and loads a step by it. `fxzero.checkpoint` saves more:
        generators, positions in data, while training goes on.
        """
        if self._layout.kernels and not self.optimizer.state:
            create_state(self._layout, self._layout.parameters)  # where something can be loaded to
        return TrainState(self, rng=False).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, in a process of the same layout; or elsewhere from
        what `torch.distributed.checkpoint` has loaded into it.

        Raises:
            CheckpointError: it is of something else. Nothing is changed then.
        """
        TrainState(self, rng=False).load_state_dict(state)

    @_compat.with_room_for_frames  # Dynamo traces below it
    def _train_as_one_graph(
        self, batch: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Run the step's graph; None if Dynamo cannot make one, from when on there is a loop."""
        assert self._loss is not None
        self._result = None
        try:
            with torch.enable_grad(), self._tracing(batch, kwargs):
                returned = self._loss(*batch, **kwargs)
        except _compat.recompile_limit_error() as error:
            raise CaptureError(
                f"this step was compiled {_compat.recompile_limit()} times, for "
                f"{self._compiled_shapes}, and is called with yet another shape, or with a number "
                "in the model that changes from step to step. Pad batches to a few shapes, keep "
                "changing numbers in tensors, or raise torch._dynamo.config.recompile_limit."
            ) from error
        except SeveralGraphsError as error:
            if self._config.strict:
                raise
            self._begin_loop(error)
            return None
        except _compat.graph_break_errors() as error:
            if self._config.strict:
                raise CaptureError(
                    "compile_step needs the forward and the loss in one graph, and Dynamo could "
                    f"not trace them:\n{error}\nRewrite what it names, or drop strict=True to "
                    "train in several graphs."
                ) from error
            self._begin_loop(error)
            return None
        result = self._take_result()
        if result is None:
            raise CaptureError(
                f"the loss is no tensor of the graph but {type(returned).__name__} "
                f"({returned!r}). Return a scalar tensor, or pass loss_fn(output, target)."
            )
        return result

    @contextlib.contextmanager
    def _tracing(self, batch: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """A context for a call: one whose shapes are new will be traced."""
        shapes = tuple(
            (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
            for value in pytree.tree_leaves((tuple(batch), dict(kwargs)))
        )
        if shapes in self._traced:
            yield
            return
        with _compat.lenient_tracing(self._modules):
            yield
        self._traced.add(shapes)  # what has failed is traced again

    def _begin_loop(self, error: Exception) -> None:
        """Train in several graphs from now on, and say why.

        Raises:
            ConfigError: something is asked that needs the update in the graph.
        """
        if self._config.offloads:
            raise ConfigError(
                f"{self._config.offloads} needs forward, backward and update in one graph, and "
                f"forward and loss could not be traced as one:\n{error}\nRewrite what it names, or "
                "drop the setting."
            ) from error
        if self._state.pipeline is not None:
            raise CaptureError(
                "stages of a pipeline are cut out of one graph, and forward and loss could not be "
                f"traced as one:\n{error}\nRewrite what it names. {WITHOUT_CHECKPOINTS}"
            ) from error
        warnings.warn(
            "compile_step trains in several graphs: forward and loss could not be traced as one."
            f"\n{error}\nNumbers are the same; updates wait for the whole backward"
            f"{_BUDGET_OF_PARTS if self._config.budget else ''}. "
            "Rewrite what it names for one graph; strict=True makes this an error.",
            FxZeroWarning,
            stacklevel=6,  # the line that calls the step, which a decorator stands before
        )
        self._loop = LoopStep(
            self.model,
            self.optimizer,
            self._loss_function(whole=True),
            state=self._state,
            parameters=self._parameters,
            micro_batches=self._micro_batches,
            clip_grad_norm=self._clip_grad_norm,
            config=self._config,
        )

    def _take_result(self) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """What the graph returned to the call that is running; None if none ran."""
        result, self._result = self._result, None
        return result

    def _check(self, batch: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See that this call means what the caller thinks."""
        if self._loss_fn is not None and len(batch) < 2:
            raise BatchError(
                "with a loss_fn, step(*inputs, target) takes the model's inputs and a target; "
                f"found {len(batch)} positional arguments."
            )
        if torch.is_inference_mode_enabled():
            raise ConfigError("a training step was called under torch.inference_mode")
        if self._state.sync == GradSync.REDUCE_ACCUMULATED.value and not self._state.kept:
            self._state.sync = GradSync.REDUCE.value  # in one process, say, nothing is kept
        if self._state.sync != GradSync.REDUCE.value or self._state.kept:
            raise ConfigError(
                "compile_step was called with gradients kept back by fxzero.no_sync. Pass "
                "micro_batches=k instead: the step then reduces as seldom as its stage allows."
            )
        with _compat.without_torch_function():  # a hundred layers have a thousand parameters
            hooked = [n for n, p in self._parameters.items() if _has_hooks_of_users(p)]
            behind = [n for n, p in self._parameters.items() if p.grad is not None]
        if hooked:
            raise ConfigError(
                f"{hooked[0]} has a gradient hook, which a compiled step would not run. Remove it, "
                "or use the ordinary loop with torch.compile(model, backend='fxzero')."
            )
        if behind:
            raise ConfigError(
                f"{behind[0]} has a .grad from an ordinary backward, which a compiled step would "
                "neither use nor clear. Call optimizer.zero_grad() before it."
            )
        for value in pytree.tree_leaves((tuple(batch), dict(kwargs))):
            if isinstance(value, Tensor) and value.requires_grad:
                raise BatchError(
                    f"a tensor of shape {list(value.shape)} in the batch requires a gradient, "
                    "which a compiled step does not return. Detach it, or use the ordinary loop."
                )
        if self._micro_batches > 1:
            check_splits((tuple(batch), dict(kwargs)), self._micro_batches)
            check_divides((tuple(batch), dict(kwargs)), self._micro_batches)

    def _follow_changes(self) -> None:
        """Compile anew if something changed that the graph is made for."""
        now = self._structure_now()
        if now == self._structure:
            return
        if self._structure is not None:
            log.warning("compile_step compiles again: %s", self._what_changed(now))
            use_gradients(self.optimizer)
            self._parameters = optimized_parameters(self.model, self.optimizer)
            self._layout = self._new_layout()
            now = self._structure_now()
        self._structure = now
        self._loop = None
        self._traced = set()
        self._compiled_shapes = []
        self._programs = []
        release(self.optimizer)
        self._loss = torch.compile(
            _compat.private_code(self._loss_function()),
            backend=_weakly(self, TrainStep._compile),
            fullgraph=True,
            dynamic=False,
        )

    def _structure_now(self) -> Any:
        """What a graph is made for, beside what Dynamo guards."""
        with _compat.without_torch_function():
            trained = tuple([p.requires_grad for p in self._parameters.values()])
        return (
            trained,
            tuple(_structure_of(group) for group in self.optimizer.param_groups),
            _compat.has_step_hooks(self.optimizer),
            _compat.num_module_hooks(self._modules),
        )

    def _what_changed(self, now: Any) -> str:
        before: Any = self._structure
        names = [
            name
            for name, old, new in zip(self._parameters, before[0], now[0], strict=False)
            if old != new
        ]
        if names:
            return f"requires_grad of {', '.join(names[:8])} has changed"
        if before[1] != now[1]:
            return "the optimizer's parameter groups have changed"
        return "hooks were added or removed"

    def _loss_function(self, whole: bool = False) -> Any:
        """What Dynamo traces: the loss of the first micro-batch, or of the `whole` batch."""
        count = 1 if whole else self._micro_batches
        return loss_function(
            self.model, self._loss_fn, count, self._fp32_loss, self._find_loss, self._call
        )

    def _new_layout(self) -> OptimizerLayout:
        """What updates which parameter."""
        new = [name for name, p in self._parameters.items() if id(p) not in self._specs]
        if new:
            raise ConfigError(
                f"the model has got new parameters since compile_step: {', '.join(new[:8])}. Make "
                "the step anew."
            )
        keys = {id(p): self._specs[id(p)].key for p in self._parameters.values()}
        group = {
            keys[id(p)]: index
            for index, settings in enumerate(self.optimizer.param_groups)
            for p in settings["params"]
        }
        return OptimizerLayout(
            optimizer=self.optimizer,
            parameters={keys[id(p)]: p for p in self._parameters.values()},
            group=group,
            kernels=kernels_of(self.optimizer),
        )

    def _compile(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Sequence[Tensor]]:
        """Dynamo's backend."""
        shapes = ", ".join(str(list(v.shape)) for v in _batch_values(example_inputs, self._specs))
        if shapes in self._compiled_shapes:
            log.warning(
                "compile_step compiles again for inputs %s, which it has compiled for before: "
                "something else that forward reads has changed (TORCH_LOGS=recompiles says what)",
                shapes,
            )
        elif self._compiled_shapes:
            log.warning(
                "compile_step compiles again: inputs %s, before %s", shapes, self._compiled_shapes
            )
        try:
            binder, run = compile_graph(
                module,
                example_inputs,
                config=self._config,
                layout=self._layout,
                specs=self._specs,
                static={id(t) for t in (*self.model.parameters(), *self.model.buffers())},
                micro_batches=self._micro_batches,
                clip_grad_norm=self._clip_grad_norm,
                scaled=self.loss_scale is not None,
            )
        except FxZeroError as error:
            raise _compat.passing_through_dynamo(error) from None

        self._compiled_shapes.append(shapes)
        if binder.disk.buckets:
            check_saves(self.model, self.optimizer)
        if self._config.offload_states.delay:
            watch_state_dicts(self.model, self.optimizer)
        self._programs.append((binder, run))
        number = len(self._programs) - 1
        return _weakly(self, lambda step, *inputs: step._run(number, inputs))

    def _run(self, number: int, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """Run one of the compiled graphs."""
        if not self._runs:
            self._result = torch.zeros(()), None, None
            return self._result[:1]
        binder, run = self._programs[number]
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        with torch.no_grad():
            values = binder(inputs, scale)
            self._has_begun = True
            result = self._result = run(values)
            sync_buffers(self._state)
        return (result[0],)


_BUDGET_OF_PARTS = (
    ", and memory_budget bounds each graph by itself, and nothing of what Dynamo leaves to eager "
    "code (all of a function with a graph break in a loop)"
)


def _weakly(step: TrainStep, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a step that does not keep it alive.

    Dynamo keeps backends, and what they return, for as long as the code that it compiled
    lives, which the step itself holds: no garbage collector would find that circle.
    """
    reference = weakref.ref(step)

    def call(*args: Any) -> Any:
        found = reference()
        assert found is not None, "only the step itself runs its code"
        return function(found, *args)

    return call


def _batch_values(example_inputs: Sequence[Any], specs: Mapping[int, ParamSpec]) -> list[Tensor]:
    """The tensors among a graph's inputs that are no parameters."""
    found = (v for v in example_inputs if isinstance(v, Tensor) and id(v) not in specs)
    return [v for v in found if not isinstance(v, (DTensor, nn.Parameter))]


def _specs_by_identity(
    model: nn.Module, specs: Mapping[str, ParamSpec], state: ModelState
) -> dict[int, ParamSpec]:
    """The layout of every parameter, `ignored` ones included, which belong to their rank."""
    by_identity = {id(s.parameter()): s for s in specs.values() if s.parameter is not None}
    for name, parameter in model.named_parameters():
        if id(parameter) not in by_identity:
            by_identity[id(parameter)] = register(
                ParamSpec.whole(parameter, name, f"{state.number}/{name}", state)
            )
    return by_identity


def _has_hooks_of_users(parameter: Tensor) -> bool:
    """Whether somebody but us wants to see a parameter's gradient when it comes."""
    hooks = _compat.gradient_hooks(parameter)
    return bool(hooks) and bool(hooks_of_users(hooks))


def _structure_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a parameter group's kernel, and its state, depend on."""
    flags = ("amsgrad", "fused", "foreach", "differentiable", "decoupled_weight_decay")
    zeros = ("momentum", "dampening")
    return (
        tuple(map(id, group["params"])),
        *(group.get(flag) for flag in flags),
        *(group.get(number, 0) == 0 for number in zeros),
    )
