"""Whether code that touches a parameter runs inside of a forward.

Inside, a parameter is what the model computes with: its full value. Outside it is what an
optimizer, an initialiser or a logger works on: this rank's shard. The call stack tells: a
forward runs below ``nn.Module.__call__``, or below a checkpoint that repeats it in backward;
an optimizer's step does not, even if somebody calls it from a module or from a hook.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch import nn

from fxzero._compat import is_compiling, module_call

_CALL = module_call().__code__
_verdicts: dict[str, bool | None] = {}
"""By file: inside, outside, or None where it does not tell. Not by code: some that Dynamo makes
has no hash."""


def _verdict(code: CodeType) -> bool | None:
    if code is _CALL:
        return True
    if code.co_filename not in _verdicts:
        _verdicts[code.co_filename] = _of_file(code.co_filename.replace("\\", "/"))
    return _verdicts[code.co_filename]


def _of_file(file: str) -> bool | None:
    if file.endswith("torch/utils/checkpoint.py"):
        return True
    if "torch/optim/" in file:
        return False
    return None


def in_compiler() -> bool:
    """Whether the compiler itself, not code that it traces, looks at a tensor."""
    # Dynamo reads the first question as true in what it traces, and asks no further.
    return not torch.compiler.is_dynamo_compiling() and is_compiling()


def in_forward() -> bool:
    """Whether the innermost caller that tells is a forward. Under the compiler it always is."""
    if torch.compiler.is_dynamo_compiling():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        verdict = _verdict(frame.f_code)
        if verdict is not None:
            return verdict
        frame = frame.f_back
    return False


def outermost_module() -> nn.Module | None:
    """The module whose call is the outermost on the stack: the model, in a training loop."""
    found: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame.f_locals.get("self", found)
        frame = frame.f_back
    return getattr(found, "_orig_mod", found)
