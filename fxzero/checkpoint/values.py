"""What is no tensor of the model or the optimizer, as JSON: read back without running any code.

    {"lr": 0.1, "betas": (0.9, 0.95)}   →   {"lr": 0.1, "betas": {"!": "tuple", "of": [0.9, 0.95]}}

Learning rates, schedulers, generators, positions in data: numbers, strings, containers of them, and
small tensors and arrays, which are kept to the bit; large ones (an average of the weights, say) go
beside the model's, and are named here. A pickle could hold anything, and reading one
runs whatever it names; what has no form here is refused where it is saved, by its place and type.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fxzero.errors import CheckpointError

_TAG = "!"
_LARGE = 1024
"""Elements that are written out."""
_PLAIN = (type(None), bool, int, float, str)
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_SEQUENCES: dict[str, Callable[..., Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def encode(value: Any, where: str, kept: dict[str, Tensor] | None = None) -> Any:
    """A value as what JSON can hold.

    Args:
        value: see above.
        where: what it is, for messages: ``"scheduler"``.
        kept: gets tensors that are too large for that, and those that ranks hold in parts, each by
            the place where it was; without it all are written out.

    Raises:
        CheckpointError: something in it is of another type, or it holds itself.
    """
    try:
        return _encode(value, where, kept)
    except RecursionError:
        raise CheckpointError(
            f"{where} holds itself, or is nested too deep for a checkpoint. Let state_dict() "
            "return what is needed to make it again."
        ) from None


def _encode(value: Any, where: str, kept: dict[str, Tensor] | None) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item, f"{where}[{i}]", kept) for i, item in enumerate(value)]
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]", kept) for key, item in value.items()}
    if kind in _MAPPINGS.values():
        items = [
            [_encode(key, f"{where}'s key {key!r}", kept), _encode(item, f"{where}[{key!r}]", kept)]
            for key, item in value.items()
        ]
        return {_TAG: kind.__name__, "of": items}
    if kind in _SEQUENCES.values() or kind is torch.Size:
        items = [_encode(item, f"{where}[{i}]", kept) for i, item in enumerate(value)]
        if kind in (set, frozenset):  # equal ones are written alike
            items.sort(key=json.dumps)
        if kind is deque:
            return {_TAG: "deque", "of": items, "maxlen": value.maxlen}
        return {_TAG: "tuple" if kind is torch.Size else kind.__name__, "of": items}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "of": _text(bytes(value))}
    if kind is torch.dtype:
        return {_TAG: "dtype", "of": _name(value)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        form = "array" if kind is np.ndarray else "scalar"
        data = _text(np.ascontiguousarray(array).tobytes())
        return {_TAG: form, "dtype": array.dtype.str, "shape": list(array.shape), "of": data}
    if kept is not None and isinstance(value, Tensor) and _is_large(value):
        kept[where] = value
        return {_TAG: "kept", "of": where}
    if kind is Tensor and _is_plain(value):
        data = _text(bytes_of(value))
        return {_TAG: "tensor", "dtype": _name(value.dtype), "shape": list(value.shape), "of": data}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold "
        "without a pickle, and reading one runs code. Let state_dict() return numbers, strings, "
        "containers of them, arrays and tensors."
    )


def decode(value: Any, kept: Mapping[str, Tensor] | None = None) -> Any:
    """The value that was encoded.

    Args:
        kept: tensors that were not written out, by the places where they were; without it they
            are None.

    Raises:
        CheckpointError: it is not what `encode` writes.
    """
    try:
        return _decode(value, kept)
    except Exception as error:  # of torch, of NumPy, of deep nesting: whatever hostile bytes meet
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"a value that nobody writes ({what})") from error


def _decode(value: Any, kept: Mapping[str, Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, kept) for key, item in value.items()}
    return _untagged(value, kept)


def _untagged(value: Mapping[str, Any], kept: Mapping[str, Tensor] | None) -> Any:
    kind, content = value[_TAG], value["of"]
    if kind == "kept":
        return None if kept is None else kept[content]
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(key, kept): _decode(item, kept) for key, item in content})
    if kind == "deque":
        return deque((_decode(item, kept) for item in content), value["maxlen"])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, kept) for item in content)
    if kind == "dtype":
        return _dtype(content)
    data = base64.b64decode(content, validate=True)
    if kind == "bytes":
        return data
    if kind == "bytearray":
        return bytearray(data)
    if kind == "tensor":
        flat = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        return flat.view(_dtype(value["dtype"])).reshape(value["shape"])
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {dtype}")
    array = np.frombuffer(data, dtype).reshape(value["shape"]).copy()
    return {"array": array, "scalar": array[()]}[kind]


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's values, one behind the other in the order of its dims."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def places_of_kept(value: Any) -> Iterator[str]:
    """The places of tensors that were not written out with an encoded value."""
    if isinstance(value, list):
        for item in value:
            yield from places_of_kept(item)
    elif isinstance(value, dict):
        if value.get(_TAG) == "kept":
            yield value["of"]
        else:
            yield from places_of_kept(list(value.values()))


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor goes beside the model's."""
    if isinstance(tensor, DTensor):
        return True
    return type(tensor) in (Tensor, Parameter) and _is_plain(tensor) and tensor.numel() > _LARGE


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its dtype, its shape and its bytes."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
