"""The user's line of a stack, be it text or alive."""

from __future__ import annotations

import sys

import torch
from torch import nn

from fxzero.ranks.places import is_library, place_of, user_line, user_line_of

_STACK = """  File "/home/me/train.py", line 7, in main
    loss = model(x)
  File "/home/me/model.py", line 12, in torch_dynamo_resume_in_forward_at_9
    return self.head(x)
  File "{torch}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
"""


def test_the_line_of_a_stack_trace() -> None:
    """The innermost that is not torch's, without Dynamo's name for it."""
    text = _STACK.format(torch=torch.__path__[0])
    assert user_line(text) == "/home/me/model.py:12 in forward: return self.head(x)"
    assert user_line(None) == ""
    assert user_line("no stack") == ""


def test_the_line_of_a_running_frame() -> None:
    """From within torch, the line that called it."""
    found = []

    class Look(nn.Module):
        def forward(self) -> None:
            frame = sys._getframe().f_back  # torch's __call__
            assert frame is not None
            assert is_library(frame.f_code.co_filename)
            found.append(user_line_of(frame))
            found.append(place_of(frame, "run 1", {}).kind)

    Look()()
    line, kind = found
    assert line.startswith(__file__)
    assert line.endswith("in test_the_line_of_a_running_frame: Look()()")
    assert kind == "elsewhere"


def test_what_is_a_library() -> None:
    """Torch, Python itself and generated code; not what people have installed beside them."""
    assert is_library(torch.__file__)
    assert is_library("<eval_with_key>.3")
    assert is_library(sys.modules["logging"].__file__ or "")
    assert not is_library("/usr/lib/python3/site-packages/transformers/models/bart.py")
    assert not is_library(__file__)
