"""Functions of the user that make a model.

    package.module:factory     models/mine.py:factory     package.module:Model.tiny

The factory takes no arguments. It returns a module, or ``(module, inputs)``: a tensor, a tuple, a
dict of keyword arguments, or ``(module, tuple, dict)``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fxzero.errors import ConfigError, nearest
from fxzero.inspect.targets.calls import asked, failed


def factory_of(target: str) -> Callable[[], Any]:
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
        raise failed(f"importing {name!r}", error) from error
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
        raise failed(f"importing {str(path)!r}", error) from error
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
    return asked(factory, f"{target}()")
