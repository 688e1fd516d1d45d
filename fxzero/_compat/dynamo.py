"""How Dynamo is told what to compile, and how it says that it cannot."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any, NoReturn
from unittest import mock

import torch


def reset_dynamo() -> None:
    """Forget every graph that was captured before."""
    torch._dynamo.reset()


_SAYS_OF_DYNAMO = hasattr(torch.compiler, "_compile_session_context")


def is_compiling() -> bool:
    """Whether the compiler is at work: torch 2.11 says so of exports alone, 2.13 of Dynamo too."""
    if _SAYS_OF_DYNAMO:
        return torch.compiler.is_compiling()
    return torch.compiler.is_compiling() or torch._guards.CompileContext.try_get() is not None


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let a model that is called take the ways that it takes while it is traced: transformers'
    experts, say, multiply groups by an operator that takes fake tensors in bfloat16 alone."""
    with mock.patch.object(torch.compiler, "_is_compiling_flag", new=True):
        yield


def register_entry_point(entry: EntryPoint) -> None:
    """Let `torch.compile` find a backend by name that no installed package announces."""
    from torch._dynamo.backends import registry

    vars(registry)["_BACKENDS"].setdefault(entry.name, entry)


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo inline a function, but not make a graph of its frame."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def private_code(function: types.FunctionType) -> Callable[..., Any]:
    """The same function with code of its own: Dynamo's caches, and their limits, go by code."""
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@functools.cache
def write_no_asserts_without_symbols() -> None:
    """Let Dynamo not look for places of assertions about sizes in graphs of known sizes alone.

    To look, it writes the graph's Python and compiles it: 2 ms for each layer of a GPT (torch 2.11
    to 2.13).
    """
    from torch._dynamo.output_graph import OutputGraph

    config = torch._dynamo.config
    whole, backend = OutputGraph.compile_and_call_fx_graph, OutputGraph.call_user_compiler

    @functools.wraps(whole)
    def compile_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looking also drops unused attributes, which may be missing by now.
        if self.shape_env.var_to_range or self.graph.find_nodes(op="get_attr", sort=False):
            return whole(self, *args, **kwargs)
        self.fxzero_asserts_are_off = config.do_not_emit_runtime_asserts
        with config.patch(do_not_emit_runtime_asserts=True):
            return whole(self, *args, **kwargs)

    @functools.wraps(backend)
    def call_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What a backend compiles meanwhile may have symbols: there nothing is to be left out.
        off = getattr(self, "fxzero_asserts_are_off", config.do_not_emit_runtime_asserts)
        with config.patch(do_not_emit_runtime_asserts=off):
            return backend(self, *args, **kwargs)

    OutputGraph.compile_and_call_fx_graph = compile_and_call  # type: ignore[method-assign]
    OutputGraph.call_user_compiler = call_backend  # type: ignore[method-assign]


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
            _log_settings_without_functions()
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@functools.cache
def _log_settings_without_functions() -> None:
    """Let Dynamo write its settings to its metrics while it is told which functions to ignore.

    torch 2.11 sorts a setting that is a set, and logs a traceback where these cannot be compared.
    """
    from torch._dynamo import utils

    names = vars(utils)
    original = names["_get_dynamo_config_for_logging"]

    def settings() -> str | None:
        with torch._dynamo.config.patch(ignore_logging_functions=set()):
            written: str | None = original()
        return written

    try:
        original()
    except TypeError:
        names["_get_dynamo_config_for_logging"] = settings


def recompile_limit() -> int:
    """How often Dynamo compiles one function."""
    return int(torch._dynamo.config.recompile_limit)


def recompile_limit_error() -> type[Exception]:
    """What Dynamo raises when it has compiled a function too often."""
    from torch._dynamo import exc

    return exc.FailOnRecompileLimitHit


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises when it cannot make one graph of a function."""
    from torch._dynamo import exc

    names = ("Unsupported", "TorchRuntimeError", "UserError")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


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

    def reduce(self: Any) -> tuple[Any, ...]:
        """Another process, which has no such class, gets the error itself."""
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return kind, self.args, notes

    mixed = type(
        kind.__name__,
        (kind, ShortenTraceback),
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__init__": initialise,
            "__reduce__": reduce,
        },
    )
    return mixed(*error.args).with_traceback(error.__traceback__)
