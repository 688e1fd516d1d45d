"""What is inspected: where the model is made, and the batch that it is called with.

    package.module:factory     models/mine.py:factory     package.module:Model.tiny

The factory takes no arguments. It returns a module that has ``example_inputs(batch_size)``, or
``(module, inputs)``: a tensor, a tuple, a dict of keyword arguments, or ``(module, tuple, dict)``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fxzero.errors import ConfigError, nearest


@dataclass(frozen=True)
class Batch:
    """What a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(inputs: Any, where: str) -> Batch:
        """Read a tensor, a tuple or list, or a dict of keyword arguments.

        Raises:
            ConfigError: it is none of them.
        """
        if isinstance(inputs, Tensor):
            return Batch((inputs,))
        if isinstance(inputs, Mapping):
            strange = [key for key in inputs if not isinstance(key, str)]
            if strange:
                raise ConfigError(f"{where}: a dict of inputs has names, not {strange[0]!r}")
            return Batch((), dict(inputs))
        if isinstance(inputs, (tuple, list)):
            return Batch(tuple(inputs))
        raise ConfigError(
            f"{where}: found {type(inputs).__name__} for the model's inputs; give a tensor, a "
            "tuple of arguments, or a dict of keyword arguments"
        )


def load(target: str) -> Callable[[], Any]:
    """Import a factory, from the working directory too.

    Args:
        target: ``package.module:factory``, or ``path/to/file.py:factory``.

    Raises:
        ConfigError: there is no such module or function, or it cannot be called without arguments.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(
            f"{target!r} names no factory. Write package.module:factory, or file.py:factory."
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    factory: Any = module
    for part in name.split("."):
        known = {n for n, value in vars(factory).items() if callable(value) and n[:1] != "_"}
        factory = getattr(factory, part, None)
        if factory is None:
            raise ConfigError(f"{place} has no function {name!r}: {nearest(part, known)}")
    _check_callable(factory, target)
    return functools.partial(_call, factory, target)


def model_and_batch(built: Any, batch_size: int | None) -> tuple[nn.Module, Batch]:
    """The model that a factory returned, and what to call it with.

    Args:
        batch_size: passed to ``example_inputs``; None is 2.

    Raises:
        ConfigError: it is no model, or its inputs cannot be found out.
    """
    if isinstance(built, nn.Module):
        kind = type(built).__name__
        examples = getattr(built, "example_inputs", None)
        if not callable(examples):
            raise ConfigError(
                f"{kind} has no example_inputs(batch_size) to make a batch with. "
                "Define it, or let the factory return (model, inputs)."
            )
        rows = 2 if batch_size is None else batch_size
        inputs = _asked(lambda: examples(rows), f"{kind}.example_inputs({rows})")
        return built, Batch.of(inputs, f"{kind}.example_inputs")
    if isinstance(built, (tuple, list)) and built and isinstance(built[0], nn.Module):
        model, *inputs = built
        if batch_size is not None and inputs:
            raise ConfigError(
                f"batch_size={batch_size} has no effect: the factory makes its own inputs. Let it "
                "return a model that has example_inputs(batch_size), or drop the size."
            )
        if len(inputs) == 1:
            return model, Batch.of(inputs[0], "the factory")
        if len(inputs) == 2 and isinstance(inputs[0], (tuple, list)):
            named = Batch.of(inputs[1], "the factory")
            if isinstance(inputs[1], Mapping):
                return model, Batch(tuple(inputs[0]), named.kwargs)
    shown = type(built).__name__
    if isinstance(built, (tuple, list)):
        shown += f" of ({', '.join(type(part).__name__ for part in built)})"
    raise ConfigError(
        f"the factory returned {shown}; it must return a module, or (module, inputs), where inputs "
        "are a tensor, a tuple or a dict"
    )


def raised_at(error: BaseException) -> str:
    """``file.py:12``: the last line outside of torch and fxzero that an error came through."""
    ours = ("/torch/", "/fxzero/", "/passes/", "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ours)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "fxzero"


def _import_module(name: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {name!r} from {Path.cwd()}: {error}. Run from the folder that "
            "holds it, or install it."
        ) from None
    except Exception as error:
        raise _failed(f"importing {name!r}", error) from error
    except SystemExit as error:
        raise ConfigError(f"importing {name!r} ended the program: {error!r}") from None


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r} in {Path.cwd()}")
    _search(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(f"importing {str(path)!r}", error) from error
    except SystemExit as error:
        raise ConfigError(f"importing {str(path)!r} ended the program: {error!r}") from None
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _check_callable(factory: Any, target: str) -> None:
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"{target!r} is a {type(factory).__name__} that exists already, with memory. Name a "
            "function that makes it: it is called where tensors have none."
        )
    if not callable(factory):
        raise ConfigError(
            f"{target!r} is no function but {type(factory).__name__}. Name a function without "
            "arguments that returns a model, or (model, inputs)."
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if needed:
        raise ConfigError(
            f"{target!r} needs arguments ({', '.join(needed)}), and is called without any. Name a "
            "function that passes them: def tiny(): return Model(width=64)."
        )


def _call(factory: Callable[[], Any], target: str) -> Any:
    return _asked(factory, f"{target}()")


def _asked(call: Callable[[], Any], what: str) -> Any:
    """Call what the user wrote, and say so if it raises."""
    try:
        return call()
    except Exception as error:
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or "no reason given"
    return ConfigError(f"{what} raised {type(error).__name__} at {raised_at(error)}: {reason}")
