"""The only module that touches private torch APIs.

Each function says what it needs and from which versions it is known to hold
(torch 2.11 to 2.13). Imports that cost time are made inside the functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch import fx
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fxzero.errors import CaptureError

pytree = torch.utils._pytree
"""Torch's walks through nested containers."""
OpOverload = torch._ops.OpOverload
"""The type of an operator as it stands in a graph."""
set_grad_enabled = torch._C._set_grad_enabled
"""What Dynamo writes for ``torch.no_grad``."""

# What torch's own optimizers are made of.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_


def reset_dynamo() -> None:
    """Forget every graph that was captured before."""
    torch._dynamo.reset()


_NEW_OBJECTS = 10_000
"""How many objects to make before the collector looks at them; Python's own number is 700."""
_collects_only_new = False


@contextlib.contextmanager
def collecting_only_new_objects() -> Iterator[None]:
    """Trace without the collector walking the some 400,000 objects that imports left.

    It also comes less often: of 96 layers it walked through what a compilation makes, and keeps,
    eleven times, for 1.8 s. Pausing it is faster still, but what it then leaves to the end
    fragments Python's memory for good: measured 16 MB of a six-layer GPT's resident size.
    """
    global _collects_only_new
    # To count what is frozen takes 0.1 s where much is: nested uses know without.
    if _collects_only_new or gc.get_freeze_count():  # the caller's own
        yield
        return
    youngest, *older = gc.get_threshold()
    gc.freeze()
    _collects_only_new = True
    if 0 < youngest < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *older)
    try:
        yield
    finally:
        _collects_only_new = False
        gc.set_threshold(youngest, *older)
        gc.unfreeze()


def collect_only_new_objects_in_dynamo() -> None:
    """Let it be so from the beginning of Dynamo's tracing on, before it calls a backend.

    Asked for again and again: ``torch._dynamo.reset()`` forgets it.
    """
    from torch._dynamo.callback import callback_handler as handler

    if _begin_tracing not in handler.start_callbacks:
        handler.register_start_callback(_begin_tracing)
        handler.register_end_callback(_end_tracing)


_tracing = contextlib.ExitStack()


def _begin_tracing(_: Any) -> None:
    _tracing.enter_context(collecting_only_new_objects())


def _end_tracing(_: Any) -> None:
    _tracing.close()


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by `name`."""
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def launch_all_reduce(tensor: torch.Tensor, group: str) -> Any:
    """Start summing a tensor over the ranks, in place; ``wait()`` on what is returned."""
    options = dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = True
    return resolve_process_group(group).allreduce([tensor], options)


def init_fake_process_group(world_size: int, rank: int = 0) -> None:
    """A process group of any size in one process, whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def default_store() -> Any:
    """The key-value store of the default process group; None without other processes."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return dist.distributed_c10d._get_default_store()


def private_store() -> Any:
    """The default store by a connection of its own, so that a thread may wait on it.

    None without other processes.
    """
    store = default_store()
    clone = getattr(store, "clone", None)
    return clone() if clone is not None else store


def gloo_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process that run over gloo, the largest first."""
    if not dist.is_initialized():
        return []
    groups = [
        group
        for group, (backend, _) in dist.distributed_c10d._world.pg_map.items()
        if isinstance(group, dist.ProcessGroup) and "gloo" in str(backend).lower()
    ]
    return sorted(groups, key=lambda group: -group.size())


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_number() -> int:
    """A number of the running backward; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def free_storage(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, whoever else still refers to it.

    Not by ``untyped_storage().resize_(0)``: that makes a Python object for the storage,
    whose end races with gloo's worker thread dropping its own reference to the storage,
    and corrupts the heap (seen after some tens of steps of small gathers).
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, 0)


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo inline a function, but not make a graph of its frame."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def is_plain_to_local(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``x.to_local()`` without arguments.

    A method call in torch 2.13; in 2.11 a function that has closed over its arguments.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "prim_to_local":
        assert callable(node.target)
        bound = inspect.getclosurevars(node.target).nonlocals
        return not any(bound.values())
    return node.op == "call_method" and node.target == "to_local"


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, outside of autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor hold another local tensor of the same layout."""
    tensor._local_tensor = local


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; under inference_mode nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def use_count(tensor: torch.Tensor) -> int:
    """How many hold a tensor beside Python: an operation that autograd has recorded does."""
    count: Callable[[], int] = getattr(tensor, "_use_count")  # noqa: B009 - not typed
    return count()


def own_local_fake(node: fx.Node) -> torch.Tensor:
    """A fake input that stands for the local tensor of the fake DTensor that a graph takes."""
    value = node.meta["example_value"]
    local = node.meta.get("fxzero_local")  # of a copy: `equal_layers`
    local = value._local_tensor if local is None else local
    with fake_mode_of_tensor(local):
        return local.detach().requires_grad_(value.requires_grad)


def without_torch_function() -> Any:
    """A context in which subclasses' ``__torch_function__`` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def take_foreach_of(*classes: type[torch.Tensor]) -> None:
    """Let torch's optimizers and norms use their foreach kernels for tensors of some classes.

    They ask for the exact class, and DTensor puts itself on the same lists.
    """
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as in_norms

    for supported in (in_optimizers, in_norms):
        supported += [kind for kind in classes if kind not in supported]


def unscale_function() -> Callable[..., Any]:
    """What GradScaler divides gradients by its scale with, and looks for infinities."""
    return torch._amp_foreach_non_finite_check_and_unscale_


def module_call() -> types.FunctionType:
    """What runs for every call of a module, around its forward and its hooks."""
    function = vars(torch.nn.Module)["_call_impl"]
    assert isinstance(function, types.FunctionType)
    return function


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph runs a graph of its own: a checkpoint, say."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def storage_identity(value: torch.Tensor) -> int:
    """A number of a tensor's storage; a DTensor's is that of its local tensor."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return int(local.untyped_storage()._cdata)


def fake_mode_of_tensor(value: torch.Tensor) -> Any:
    """The mode that made a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    assert isinstance(value, FakeTensor)
    return value.fake_mode


def mode_of(tensor: torch.Tensor) -> Any:
    """A context in which tensors are made as this one is: fake beside fake ones."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return fake_mode_of_tensor(local) if is_fake(local) else contextlib.nullcontext()


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of the same global shape and layout, around another local tensor.

    `DTensor.from_local` does the same through autograd, ten times as slowly.
    """
    return dtensor_of(local, layout_of(like))


def layout_of(tensor: DTensor) -> Any:
    """A DTensor's global shape, mesh and placements."""
    return tensor._spec


def dtensor_of(local: torch.Tensor, layout: Any) -> DTensor:
    """A DTensor of a layout, around a local tensor."""
    return DTensor(local.detach(), layout, requires_grad=False)


class _KeptLayout(DTensorSpec):
    """A parameter's layout: one object for life, so that to compare it mostly is to look at it.

    Dynamo's guards compare each parameter's layout with a deep copy of the one that it had, in
    every call: 5 ms at a thousand parameters.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeptLayout:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as torch's own, for who loads it without fxzero."""
        fields = [field.name for field in dataclasses.fields(DTensorSpec) if field.init]
        return DTensorSpec, tuple(getattr(self, name) for name in fields)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return other is self or super()._check_equals(other, skip_shapes)


def keep_layout(tensor: DTensor) -> None:
    """Say that a DTensor's layout is replaced, if ever, and never changed in place."""
    tensor._spec.__class__ = _KeptLayout


def makes_parameter(depth: int) -> bool:
    """Whether a caller, so many frames above, is the constructor of `torch.nn.Parameter`."""
    return sys._getframe(depth + 1).f_code is torch.nn.Parameter.__new__.__code__


def plain_reduce(tensor: DTensor) -> tuple[Any, ...]:
    """How torch pickles a tensor of a subclass: `rebuild_function`, and what that takes."""
    function, arguments, *_ = torch.Tensor.__reduce_ex__(tensor, 2)
    return function, arguments


def rebuild_function() -> Callable[..., torch.Tensor]:
    """What torch unpickles a tensor of a subclass with."""
    found: Callable[..., torch.Tensor] = vars(torch)["_tensor"]._rebuild_from_type_v2
    return found


def active_ddp_module() -> Any:
    """The DistributedDataParallel module whose forward is running, if any."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def return_free_memory() -> None:
    """Give what a compilation, or a full model, left behind back to the system.

    glibc keeps freed memory in its heap; after a compilation that is some hundred MiB.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def fake_mode_of(graph: fx.Graph) -> Any:
    """The FakeTensorMode of the graph's values, None for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def is_script_object(value: Any) -> bool:
    """Whether a graph input is an opaque object, such as a DTensor's mesh."""
    return type(value).__name__ == "FakeScriptObject" or isinstance(value, torch.ScriptObject)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_tensors() -> Any:
    """A context in which tensors are made without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def no_value_error() -> type[Exception]:
    """What asking a fake tensor for its value raises."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return DataDependentOutputException


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Make and use tensors with values inside of a compilation."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def hint(number: Any) -> int:
    """A number that may be symbolic, as it is in the call that is being compiled.

    ``int()`` of it would make a guard, and another number another graph. 0 for a number that
    only the data tell.
    """
    if not is_symbolic(number):
        return int(number)
    known = number.node.hint
    return int(known) if isinstance(known, (int, float)) else 0


def hinted(value: torch.Tensor) -> torch.Tensor:
    """A tensor without symbolic sizes: itself, or one on the meta device of the sizes at hand."""
    if not any(is_symbolic(size) for size in value.shape):
        return value
    return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def input_source_name(node: fx.Node) -> str:
    """Where Dynamo took a graph input from: ``"L['self']._modules['h']._parameters['w']"``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "") if source is not None else ""
    return name() if callable(name) else name


def copy_input_source(node: fx.Node, copy: fx.Node) -> None:
    """Let a copy of a graph input come from where Dynamo took the input."""
    if hasattr(node, "_dynamo_source"):
        setattr(copy, "_dynamo_source", getattr(node, "_dynamo_source"))  # noqa: B009, B010


def input_index(node: fx.Node) -> int | None:
    """Which input of Dynamo's graph a joint graph's placeholder is, or is a part of."""
    desc = node.meta.get("desc")
    while desc is not None and not hasattr(desc, "idx"):
        desc = getattr(desc, "base", None)
    return getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None


def mutated_index(desc: Any) -> int | None:
    """Of which input a joint graph's output is the value after the graph has changed it."""
    if type(desc).__name__ == "SubclassGetAttrAOTOutput":
        desc = desc.base
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    mutated = desc.mutated_input
    while mutated is not None and not hasattr(mutated, "idx"):
        mutated = getattr(mutated, "base", None)
    return getattr(mutated, "idx", None)


def gradient_index(desc: Any) -> int | None:
    """Of which input a joint graph's output is the gradient."""
    if type(desc).__name__ == "SubclassGetAttrAOTOutput":
        desc = desc.base
    if type(desc).__name__ != "GradAOTOutput":
        return None
    grad_of = desc.grad_of
    while grad_of is not None and not hasattr(grad_of, "idx"):
        grad_of = getattr(grad_of, "base", None)
    return getattr(grad_of, "idx", None)


def checkpoint_tag(node: fx.Node) -> str:
    """What `torch.utils.checkpoint` asked of a node: ``"save"``, ``"recompute"`` or ``""``."""
    policy = node.meta.get("recompute")
    name = getattr(policy, "name", "")
    if name in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE"):
        return "recompute"
    return "save" if name in ("MUST_SAVE", "PREFER_SAVE") else ""


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions after which Inductor can lower a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return {
        op: decomposition
        for op, decomposition in select_decomp_table().items()
        # Random numbers are torch's own, those of an eager run.
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
    }


def register_entry_point(entry: EntryPoint) -> None:
    """Let `torch.compile` find a backend by name that no installed package announces."""
    from torch._dynamo.backends import registry

    vars(registry)["_BACKENDS"].setdefault(entry.name, entry)


def aot_compile(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Run AOTAutograd on Dynamo's graph, with our partitioner and compilers."""
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
    )
    return compiler(module, inputs)


@functools.cache
def let_anomaly_mode_read_dtensors() -> None:
    """Give DTensor the operator by which autograd's anomaly mode looks for NaNs in gradients.

    torch 2.11 to 2.13 have none: ``set_detect_anomaly`` fails in every backward that hands a
    DTensor on. All ranks look at the whole gradient, so that all of them stop.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    operator = torch.ops.aten._is_any_true.default
    register_sharding(operator)(lambda _: [([Replicate()], [Replicate()])])


class _Captured(Exception):  # noqa: N818 - a way out, not an error
    """A joint graph, taken out of AOTAutograd before it goes on."""


def capture_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, int]:
    """AOTAutograd's joint graph of Dynamo's graph, and how many of its outputs are forward's.

    The caller runs it: nothing is partitioned, and no runtime is put around it.
    """

    def take(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        raise _Captured(joint, num_fwd_outputs)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        raise CaptureError("no parameter that requires a gradient goes into the loss")

    try:
        aot_compile(
            module,
            inputs,
            forward=compiler,
            backward=compiler,
            inference=compiler,
            partition=take,
            decompositions=decompositions,
        )
    except _Captured as captured:
        joint, num_forward_outputs = captured.args
        return joint, num_forward_outputs
    raise AssertionError("AOTAutograd never asked for a partition")


def is_output(desc: Any) -> bool:
    """Whether a joint graph's output is one of Dynamo's graph itself."""
    return type(desc).__name__ == "PlainAOTOutput"


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises when it cannot make one graph of a function."""
    from torch._dynamo import exc

    names = ("Unsupported", "TorchRuntimeError", "UserError")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


_LOGGED = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


def logging_functions() -> set[Callable[..., Any]]:
    """What tells somebody something and computes nothing: loggers' methods, `print`, warnings.

    Libraries add methods of their own to loggers: transformers' ``warning_once``.
    """
    found: set[Callable[..., Any]] = {print, warnings.warn}
    classes: list[type] = [logging.Logger]
    for kind in classes:
        children: list[type] = kind.__subclasses__()
        classes.extend(child for child in children if child not in classes)
        for name, function in vars(kind).items():
            if name in _LOGGED or name.endswith(("_once", "_advice")):
                found.add(function)
    return found


@contextlib.contextmanager
def lenient_tracing(modules: Iterable[torch.nn.Module] = ()) -> Iterator[None]:
    """Let Dynamo make one graph of forwards that it would break, inside and only there.

    What a forward logs, prints or warns of is left out: a compiled step does not say it.
    Recurrent layers (nn.LSTM, GRU, RNN) are traced. A program's own settings stay in force
    beside these.

    Args:
        modules: those of the model. With a recurrent layer among them oneDNN is off inside: on
            CPU its fp32 layers cannot be differentiated in a graph (torch 2.11 to 2.13).
    """
    config = torch._dynamo.config
    ignored = {*config.ignore_logging_functions, *logging_functions()}
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in modules)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and not recurrent)
    try:
        with config.patch(ignore_logging_functions=ignored, allow_rnn=True):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def recompile_limit_error() -> type[Exception]:
    """What Dynamo raises when it has compiled a function too often."""
    from torch._dynamo import exc

    return exc.FailOnRecompileLimitHit


def recompile_limit() -> int:
    """How often Dynamo compiles one function."""
    return int(torch._dynamo.config.recompile_limit)


def private_code(function: types.FunctionType) -> Callable[..., Any]:
    """The same function with code of its own: Dynamo's caches, and their limits, go by code."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def below_autograd() -> Any:
    """A context in which operators go straight to their kernels.

    Nothing that a scheduled graph runs is recorded, and functional collectives have autograd
    kernels in Python, which cost some 6 us a call. In-place operators still count versions.
    """
    return torch._C._AutoDispatchBelowAutograd()


def init_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let an optimizer create the state of a group's parameters, which must have gradients."""
    init_group: Callable[..., Any] = getattr(optimizer, "_init_group")  # noqa: B009 - not typed
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(init_group).parameters)[1:]]
    init_group(group, *lists)


_before_steps: list[Callable[..., None]] = []


def call_before_steps(hook: Callable[..., None]) -> None:
    """Let every optimizer call a function before its steps: once, however often it is asked."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if hook not in _before_steps:
        _before_steps.append(hook)
        register_optimizer_step_pre_hook(hook)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some user wants to be called before or after ``optimizer.step()``."""
    from torch.optim import optimizer as module

    before = vars(module)["_global_optimizer_pre_hooks"].values()
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(hook not in _before_steps for hook in before)
        or vars(module)["_global_optimizer_post_hooks"]
    )


def num_module_hooks(modules: Iterable[torch.nn.Module]) -> int:
    """How many hooks there are on modules: Dynamo does not look whether some were added."""
    return sum(
        len(m._forward_hooks)
        + len(m._forward_pre_hooks)
        + len(m._backward_hooks)
        + len(m._backward_pre_hooks)
        for m in modules
    )


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """What wants to see a parameter's gradient when it comes."""
    later = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(later or {}).values()]


def is_scheduler_counter(function: Callable[..., Any]) -> bool:
    """Whether a learning-rate scheduler has wrapped an optimizer's step, to count."""
    return bool(getattr(function, "_wrapped_by_lr_sched", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers, which watch ``optimizer.step``, that there was a step."""
    vars(optimizer)["_opt_called"] = True


def interpreted(module: fx.GraphModule) -> Callable[..., Any]:
    """A module as a function that hands its nodes' provenance on to what is traced of them."""

    def run(*args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(module).run(*args)

    return run


def trace_joint(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
    joint: bool,
    fake_mode: Any,
) -> fx.GraphModule | None:
    """The joint graph (or the forward alone) of a function of fake tensors, as AOTAutograd has it.

    Returns:
        A graph of the inputs and the outputs' gradients that returns the outputs, then the
        inputs' gradients, None where there is none; in its module, which holds the constants
        that it reads. None if AOTAutograd cannot: above all, if the function changes its
        inputs, or returns views of them.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple

    with fresh_tracing_context(fake_mode):
        try:
            traced = aot_export_joint_simple(
                function, tuple(inputs), trace_joint=joint, decompositions=decompositions
            )
        except RuntimeError:  # a real error comes up again when the whole graph is traced
            return None
    return traced


def trace_function(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
    joint: bool,
    fake_mode: Any,
) -> fx.GraphModule | None:
    """What `trace_joint` returns, traced the way models are: exporting takes more apart."""
    from torch._functorch.aot_autograd import aot_function

    def take(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise _Captured(graph)

    options = {"fw_compiler": take, "bw_compiler": take, "decompositions": decompositions}
    with fresh_tracing_context(fake_mode), torch.set_grad_enabled(joint):
        try:
            aot_function(function, partition_fn=take, **options)(*inputs)
        except _Captured as captured:
            traced: fx.GraphModule = captured.args[0]
            traced.graph.set_codegen(fx.graph.CodeGen())  # inputs one by one
            return traced
        except RuntimeError:
            return None
    return None


def tracing_fake_mode() -> Any:
    """The mode in which AOTAutograd will trace the graph that Dynamo is compiling."""
    context = torch._guards.TracingContext.try_get()
    return context.fake_mode if context is not None else None


def is_plain_fake(value: Any) -> bool:
    """Whether a value is a fake tensor that is no subclass of it, and dense."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor and value.layout is torch.strided


def log_usage() -> Callable[..., Any]:
    """What tells torch's own statistics that a part of its interface is used; no value."""
    return torch._C._log_api_usage_once


def has_symbolic_shape(value: torch.Tensor) -> bool:
    """Whether a fake tensor's layout depends on symbols."""
    return bool(value._has_symbolic_sizes_strides)


def forget_donated_buffers() -> None:
    """Tell AOTAutograd that we free saved tensors ourselves.

    It would otherwise refuse ``retain_graph=True`` on behalf of Inductor, which reuses
    their memory without asking; `release_saved` asks.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


class _Extraction:
    """One side of a joint graph that carries `set_side` marks, as a graph of its own.

    Does the work of torch's ``_extract_graph_with_inputs_outputs`` without walking through every
    node's arguments, and once for backward, which torch extracts twice: of 96 layers a quarter of
    the time. What it does not know it leaves to torch.
    """

    def __init__(self, original: Callable[..., fx.Graph]) -> None:
        self.original = original
        self.found: dict[Any, fx.Graph] = {}

    def __call__(
        self,
        joint: fx.Graph,
        inputs: list[fx.Node],
        outputs: list[Any],
        descriptions: list[Any],
        subgraph: str | None = None,
        **settings: Any,
    ) -> fx.Graph:
        key = (subgraph, tuple(inputs), tuple(outputs))
        if key not in self.found:
            graph = self._extract(joint, inputs, outputs, f"must_be_in_{subgraph}")
            if graph is None:
                return self.original(joint, inputs, outputs, descriptions, subgraph, **settings)
            self.found[key] = graph
        graph = self.found[key]
        end = next(iter(reversed(graph.nodes)))
        end.meta["desc"] = descriptions
        end.meta["output_stack_traces"] = [
            v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in end.args[0]
        ]
        return graph

    @staticmethod
    def _extract(
        joint: fx.Graph, inputs: list[fx.Node], outputs: list[Any], side: str
    ) -> fx.Graph | None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = node.meta
        for node in joint.nodes:
            if node in copies or node.op not in ("call_function", "get_attr"):
                continue
            if node.meta.get("partitioner_tag") != side:
                continue
            if all(source in copies for source in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if any(isinstance(value, fx.Node) and value not in copies for value in outputs):
            return None
        graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in outputs))
        graph.eliminate_dead_code()
        return graph


def extract_forward_backward(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    num_forward_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph whose nodes carry `set_side` marks, in AOTAutograd's conventions.

    What is saved is decided by the caller. The extraction keeps the order of nodes.
    """
    from torch._functorch import partitioners

    original = partitioners._extract_graph_with_inputs_outputs
    partitioners._extract_graph_with_inputs_outputs = _Extraction(original)
    try:
        sides = partitioners._extract_fwd_bwd_modules(
            joint, saved, saved_symbols, num_fwd_outputs=num_forward_outputs
        )
    finally:
        partitioners._extract_graph_with_inputs_outputs = original
    for side in sides:
        _print_for_readers(side)
    return sides


def _print_for_readers(module: fx.GraphModule) -> None:
    """Write a graph as text only if somebody reads it: AOTAutograd does so whenever it has one."""
    from torch._logging import _internal as logs

    original = module.print_readable

    def print_readable(*args: Any, **settings: Any) -> str:
        printed = settings.get("print_output", not args)
        kept = any(getattr(h, "root_dir", "") is not None for h in logs.trace_log.handlers)
        if printed or kept or logs.log_state.is_artifact_enabled("aot_graphs"):
            return original(*args, **settings)
        return ""

    module.print_readable = print_readable  # type: ignore[method-assign]


def set_side(node: fx.Node, *, backward: bool) -> None:
    """Fix the side of the cut on which `extract_forward_backward` puts a node."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


@contextlib.contextmanager
def fresh_tracing_context(fake_mode: Any) -> Iterator[None]:
    """Compile something inside a compilation without disturbing the outer one's metadata."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def inductor_compile(module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile one region: a function of a list of inputs, which it empties.

    All outputs are user-visible, so that their strides are those of the graph.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = next(iter(reversed(module.graph.nodes)))
    outputs = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return compile_fx_inner(module, inputs)


def break_graph(why: str, way_out: str) -> NoReturn:
    """Let Dynamo end its graph before the call that it tries on fake tensors, and run it eagerly.

    Where the caller wants one graph, the reason is in Dynamo's error.
    """
    from torch._dynamo.exc import Unsupported

    raise Unsupported(f"{why}. {way_out[0].upper()}{way_out[1:]}.")


def passing_through_dynamo(error: Exception) -> Exception:
    """The same error in a form that Dynamo hands to the caller as it is.

    Dynamo wraps what a backend raises in BackendCompilerFailed, which is no ValueError
    and buries the message; errors derived from its ShortenTraceback go through.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if isinstance(error, ShortenTraceback):
        return error

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        ShortenTraceback.__init__(self, *args, first_useful_frame=None)

    mixed = type(
        kind.__name__,
        (kind, ShortenTraceback),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__init__": initialise},
    )
    return mixed(*error.args).with_traceback(error.__traceback__)
