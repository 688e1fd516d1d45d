"""Nodes as a person reads them.

mm_1: f32[4, 8] = aten.mm(relu, t_1)  # forward compute compute layers.1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload
from fxzero.graph.stamps import has_stamp, stamp_of

_DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def describe_value(value: Any) -> str:
    """``f32[8, 16]`` for a tensor; lists and numbers as they are."""
    if isinstance(value, torch.Tensor):
        name = _DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{name}{list(value.shape)}".replace("'", "")
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe_value(v) for v in value)})"
    return type(value).__name__ if value is not None else "None"


_OURS = f'File "{Path(__file__).parents[1]}'


def source_line(node: fx.Node) -> str:
    """The innermost line of the user's code that made a node: where a marker of ours reads a
    parameter, the line that asked for it."""
    frames: list[str] = []
    for line in (node.meta.get("stack_trace") or "").splitlines():
        words = line.strip()
        if words.startswith("File "):
            frames.append(words)
        elif frames and words.strip("^~ "):  # Python 3.11 underlines
            frames[-1] += f" {words}"
    theirs = [frame for frame in frames if not frame.startswith(_OURS)]
    return (theirs or frames or [""])[-1]


def node_line(node: fx.Node) -> str:
    """A node as `StepGraph.text` prints it."""
    value = describe_value(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}: {value} = input"
    if node.op == "output":
        return f"return {node.args[0]}"
    where = ""
    if has_stamp(node):
        stamp = stamp_of(node)
        words = [stamp.phase.value, stamp.lane.value, stamp.role.value]
        step = f"micro_{stamp.micro_step}" if stamp.micro_step else ""
        where = "  # " + " ".join([*words, *filter(None, [step, stamp.layer, stamp.bucket])])
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{node.name}: {value} = {_target_name(node)}({', '.join(arguments)}){where}"


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))
