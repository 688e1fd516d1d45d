"""`fxzero.checkpoint.values`: what comes back, what is refused, and what a hostile file can do."""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers

from fxzero.checkpoint.values import decode, encode
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import bits
from tests.tiers import exhaustive

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def through_json(value: Any) -> Any:
    """As a file would bring it back."""
    return decode(json.loads(json.dumps(encode(value, "it"))))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, of any shape, dense or a view with gaps."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numel = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor.mT if tensor.ndim > 1 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any bits, both byte orders."""
    dtype = np.dtype(draw(st.sampled_from(["?", "u1", "<i2", ">i4", "<f2", "<f4", ">f8", "<c16"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numel = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
HASHABLE = st.recursive(
    KEYS | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
LEAVES = (
    HASHABLE
    | st.just(float("nan"))
    | st.binary().map(bytearray)
    | st.sampled_from(DTYPES)
    | tensors()
    | arrays()
    | arrays().filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["!", "of", "dtype", "a"]), inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.builds(deque, st.lists(inner, max_size=3))
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("max_examples", [60, *exhaustive(400)])
def test_every_value_comes_back_to_the_bit(max_examples: int) -> None:
    """Of the same type, in the same order."""

    @settings(max_examples=max_examples, deadline=None)
    @given(VALUES)
    def comes_back(value: Any) -> None:
        assert bits(through_json(value)) == bits(value)

    comes_back()


def test_dicts_come_back_in_their_order() -> None:
    """Whoever iterates over one goes on as before."""
    for value in ({"b": 1, "a": 2}, {2: 0, 1: 0}, {"!": 1, "a": 2, "!!": 0}, Counter("bbcaa")):
        assert list(through_json(value)) == list(value)


def test_a_dict_that_looks_like_a_tag_is_a_dict() -> None:
    """Whoever trains chooses keys."""
    for value in ({"!": "bytes", "of": "AAAA"}, {"!": {"!": 1}}, [{"!": None}]):
        assert bits(through_json(value)) == bits(value)


def test_a_bounded_deque_stays_bounded() -> None:
    """A window of losses would grow from the resume on."""
    assert through_json(deque([1, 2], maxlen=2)).maxlen == 2


def test_equal_sets_are_written_alike() -> None:
    """Ranks compare texts: sets that are equal may iterate in another order."""
    one, other = {0, 8}, {8, 0}
    assert one == other
    assert list(one) != list(other), "the premise of this test"
    assert encode(one, "it") == encode(other, "it")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.zeros(2, requires_grad=True) + 1,
        torch.arange(6).reshape(2, 3)[:, ::2],
    ],
    ids=["conjugate", "negative", "in a graph", "with gaps"],
)
def test_lazy_views_come_back_as_their_values(tensor: torch.Tensor) -> None:
    """Bits that say how to read memory are no part of it."""
    assert bits(through_json({"t": tensor})["t"]) == bits(tensor)


class Colour(IntEnum):
    """No plain number."""

    RED = 1


class Text(str):
    """No plain string."""


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: None,
        Colour.RED,
        Text("a"),
        Point(1, 2),
        defaultdict(list),
        Path("a"),
        1j,
        range(3),
        np.array([object()], dtype=object),
        np.array(["text"]),
        np.array([(1, 2)], dtype="i4,i4"),
        np.datetime64("2020-01-01"),
        np.ma.masked_array([1, 2], mask=[True, False]),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        nn.Parameter(torch.zeros(1)),
        torch.device("cpu"),
        torch.Generator(),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_what_has_no_form_is_refused_by_place_and_type(value: Any) -> None:
    """Whoever reads the message finds the entry in their state dict."""
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [0, {"b": value}]}, "scheduler")
    assert "scheduler['a'][1]['b']" in str(caught.value)
    assert type(value).__name__ in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    """Its integers mean nothing without their scale."""
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="scheduler"):
        encode(value, "scheduler")


def test_a_key_that_has_no_form_is_refused() -> None:
    """As a key of a dict, in a set, in a tuple."""
    for value in ({object(): 1}, {frozenset({Colour.RED})}, {(1, Path("a")): 2}):
        with pytest.raises(CheckpointError, match="loader"):
            encode(value, "loader")


def test_a_container_that_holds_itself_is_refused() -> None:
    """And does not end as a RecursionError."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="loader"):
        encode(value, "loader")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.LambdaLR(o, lambda step: 1.0),
        lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.MultiStepLR(o, [2, 3]),
        lambda o: schedulers.ConstantLR(o),
        lambda o: schedulers.LinearLR(o),
        lambda o: schedulers.ExponentialLR(o, 0.9),
        lambda o: schedulers.PolynomialLR(o),
        lambda o: schedulers.CosineAnnealingLR(o, 5),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
        lambda o: schedulers.CyclicLR(o, 0.1, 0.2),
        lambda o: schedulers.OneCycleLR(o, 0.1, 10),
        lambda o: schedulers.ReduceLROnPlateau(o),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], [2]
        ),
        lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.StepLR(o, 2)]),
    ],
)
def test_the_state_of_every_scheduler_of_torch_comes_back(make: Any) -> None:
    """After two steps, and what is loaded goes on alike."""
    found = []
    saved = None
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        for _ in range(2) if saved is None else ():
            optimizer.step()
            _advance(scheduler)
        if saved is None:
            saved = through_json([scheduler.state_dict(), optimizer.state_dict()])
        else:
            scheduler.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for _ in range(4):
            optimizer.step()
            _advance(scheduler)
            found.append(optimizer.param_groups[0]["lr"])
    assert found[:4] == found[4:]


def _advance(scheduler: Any) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


HOSTILE: list[Any] = [
    {"!": "tuple"},
    {"!": "nothing", "of": []},
    {"!": [], "of": []},
    {"!": {}, "of": {}},
    {"!": None, "of": None},
    {"!": "set", "of": [[1], [2]]},
    {"!": "set", "of": 1},
    {"!": "dict", "of": [[1]]},
    {"!": "dict", "of": [[[1], 2]]},
    {"!": "Counter", "of": {"a": 1}},
    {"!": "bytes", "of": "not base64"},
    {"!": "bytes", "of": 3},
    {"!": "dtype", "of": "load"},
    {"!": "dtype", "of": "os.system"},
    {"!": "dtype", "of": ["float32"]},
    {"!": "tensor", "dtype": "float32", "shape": [3], "of": "AAAA"},
    {"!": "tensor", "dtype": "float32", "shape": [3], "of": "AAAAAA=="},
    {"!": "tensor", "dtype": "float32", "shape": [-1, -1], "of": "AAAAAA=="},
    {"!": "tensor", "dtype": "float32", "shape": "x", "of": "AAAAAA=="},
    {"!": "tensor", "dtype": "float32", "shape": [1 << 70], "of": "AAAAAA=="},
    {"!": "tensor", "dtype": "bits8", "shape": [4, 2], "of": "AAAAAA=="},
    {"!": "tensor", "dtype": "load", "shape": [1], "of": "AAAAAA=="},
    {"!": "tensor", "shape": [1], "of": "AAAAAA=="},
    {"!": "array", "dtype": "O", "shape": [1], "of": "AAAAAAAAAAA="},
    {"!": "array", "dtype": "i4,O", "shape": [1], "of": "AAAAAAAAAAA="},
    {"!": "array", "dtype": "(1,", "shape": [1], "of": "AAAAAA=="},
    {"!": "array", "dtype": "i4,(__import__('os'),)f4", "shape": [1], "of": "AAAAAA=="},
    {"!": "array", "dtype": "i4", "shape": [2], "of": "AAAAAA=="},
    {"!": "array", "dtype": "i4", "shape": [1 << 70], "of": "AAAAAA=="},
    {"!": "array", "dtype": {"names": ["a"], "formats": ["O"]}, "shape": [1], "of": "AAAA"},
    {"!": "scalar", "dtype": "V4", "shape": [], "of": "AAAAAA=="},
    {"!": "pickle", "of": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAZlY2hvIDGUhZRSlC4="},
    {"!": "builtins.eval", "of": ["__import__('os').system('true')"]},
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: json.dumps(content)[:60])
def test_what_nobody_writes_is_refused(content: Any) -> None:
    """Whatever it is, as a CheckpointError, wherever it stands."""
    for value in (content, [content], {"a": content}, {"!": "tuple", "of": [content]}):
        with pytest.raises(CheckpointError):
            decode(value)


def test_what_is_nested_too_deep_is_refused() -> None:
    """Python would end it as a RecursionError."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError):
        decode(deep)
    while deep:  # or its own end would recurse
        deep = deep.pop()


TENSORS = st.fixed_dictionaries(
    {
        "!": st.sampled_from(["tensor", "array", "scalar"]),
        "of": st.sampled_from(["", "AA==", "AAAAAA==", "AAAAAAAAAAA=", "!"]),
        "dtype": st.sampled_from(["float32", "int64", "complex64", "i4", "<f8", "|O", "f,f"]),
        "shape": st.lists(st.integers(-2, 5), max_size=2),
    }
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["!", "of", "dtype", "shape", "a"]), inner, max_size=4)
        | st.fixed_dictionaries(
            {
                "!": st.sampled_from(["tuple", "set", "dict", "Counter", "bytes", "dtype"]),
                "of": inner,
            }
        )
    ),
    max_leaves=10,
)


@settings(max_examples=500, deadline=None)
@given(JSON | TENSORS)
def test_any_json_is_decoded_or_refused(content: Any) -> None:
    """No other error, and no code: the values are of the few types that are written."""
    try:
        value = decode(content)
    except CheckpointError:
        return
    encode(value, "it")


def test_reading_never_comes_to_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to eval, nor to a shell."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise BaseException("code was run")

    for owner, name in ((pickle, "loads"), (pickle, "load"), (os, "system"), (torch, "load")):
        monkeypatch.setattr(owner, name, functools.partial(forbidden, name))
    value = {"a": (1, {2}), "t": torch.ones(2), "n": np.float32(1), "b": b"x", "d": torch.float16}
    assert bits(through_json(value)) == bits(value)
