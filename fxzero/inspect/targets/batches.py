"""What a model is called with: as it says itself, as somebody writes it, or by its signature.

    example_inputs(batch_size)              the model's own; (batch_size, seq_len) where it takes it
    (model, inputs)                         the factory's own
    --inputs 'x=float32[B,16], y=int64[B]<10'
    else                                    by the names of forward's arguments, and by what the
                                            first layer reads: `fxzero.inspect.targets.signature`

Where tensors are fake they have shapes and dtypes, and no values; elsewhere random ones.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxzero.errors import ConfigError
from fxzero.inspect.targets.batch import Batch
from fxzero.inspect.targets.calls import asked
from fxzero.inspect.targets.signature import guessed

DEFAULT_ROWS = 2
_SIZES = ("B", "S")
_INPUT = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<dtype>[a-z]+\d*)\s*\[(?P<shape>[^\]]*)\]"
    r"\s*(?:<\s*(?P<high>\d+))?\s*"
)


@dataclass(frozen=True)
class Sizes:
    """What a batch shall be, as far as somebody said."""

    rows: int | None = None
    seq_len: int | None = None
    """Tokens of each row."""
    inputs: str | None = None
    """All inputs by hand, as `parse` reads them."""

    def refuse(self, why: str) -> None:
        """See that nothing was said.

        Raises:
            ConfigError: something was.
        """
        said = {"batch_size": self.rows, "seq_len": self.seq_len}
        for name, value in said.items():
            if value is not None:
                raise ConfigError(f"{name}={value} has no effect: {why}")


def model_and_batch(built: Any, sizes: Sizes) -> tuple[nn.Module, Batch]:
    """The model that a factory returned, and what to call it with.

    Args:
        sizes: of the batch; 2 rows by default.

    Raises:
        ConfigError: it is no model, its inputs cannot be found out, or its forward has no such
            arguments.
    """
    model, batch = _read(built, sizes)
    try:
        inspect.signature(model.forward).bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} cannot be called "
            f"with ({batch.text()}): {error}"
        ) from None
    except ValueError:  # a forward of which nobody knows: let it be called
        pass
    return model, batch


def _read(built: Any, sizes: Sizes) -> tuple[nn.Module, Batch]:
    if isinstance(built, nn.Module):
        return built, _batch_of(built, sizes)
    if isinstance(built, (tuple, list)) and built and isinstance(built[0], nn.Module):
        model, *inputs = built
        if inputs and sizes.inputs is not None:
            return model, parse(sizes.inputs, model, sizes)
        if inputs:
            sizes.refuse(
                "the factory makes its own inputs. Let it return a model that has "
                "example_inputs(batch_size), or drop the size."
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


def _batch_of(model: nn.Module, sizes: Sizes) -> Batch:
    if sizes.inputs is not None:
        return parse(sizes.inputs, model, sizes)
    rows = DEFAULT_ROWS if sizes.rows is None else sizes.rows
    kind = type(model).__name__
    examples = getattr(model, "example_inputs", None)
    if not callable(examples):
        return Batch((), guessed(model, rows, sizes.seq_len))
    arguments: tuple[int, ...] = (rows,)
    if sizes.seq_len is not None:
        try:
            inspect.signature(examples).bind(rows, sizes.seq_len)
        except TypeError:
            raise ConfigError(
                f"seq_len={sizes.seq_len} has no effect: {kind}.example_inputs takes the batch "
                "size alone. Let it take (batch_size, seq_len), or say all inputs (--inputs)."
            ) from None
        arguments = (rows, sizes.seq_len)
    called = f"{kind}.example_inputs({', '.join(map(str, arguments))})"
    inputs = asked(lambda: examples(*arguments), called)
    return Batch.of(inputs, f"{kind}.example_inputs")


def parse(text: str, model: nn.Module, sizes: Sizes) -> Batch:
    """Inputs as somebody writes them: ``tokens=int64[B,S]<50257, scale=float32[1]``.

    ``B`` is the batch's rows and ``S`` its tokens a row, where they are said (`--batch-size`,
    `--seq-len`); an input without a name is passed by position; ``<`` bounds whole numbers.

    Raises:
        ConfigError: it is no such text, or says a size or dtype that there is not.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    known = {"B": DEFAULT_ROWS if sizes.rows is None else sizes.rows, "S": sizes.seq_len}
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    used: set[str] = set()
    for part in re.split(r",(?![^\[]*\])", text):
        match = _INPUT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"--inputs: {part.strip()!r} is no input. Write name=dtype[shape], with a comma "
                "between two of them and, for whole numbers, what they are below: "
                "ids=int64[B,S]<50257, x=float32[B,3,224,224]."
            )
        shape = [_size(size.strip(), part, known) for size in match["shape"].split(",") if size]
        used |= {size.strip() for size in match["shape"].split(",")} & {*_SIZES}
        value = _tensor(match, shape, device)
        if match["name"] is None:
            if kwargs:
                raise ConfigError(
                    f"--inputs: {part.strip()!r} has no name and follows one that has"
                )
            args.append(value)
        elif match["name"] in kwargs:
            raise ConfigError(f"--inputs sets {match['name']} twice")
        else:
            kwargs[match["name"]] = value
    for size, name, said in (("B", "batch_size", sizes.rows), ("S", "seq_len", sizes.seq_len)):
        if said is not None and size not in used:
            raise ConfigError(f"{name}={said} has no effect: no shape of --inputs has {size} in it")
    return Batch(tuple(args), kwargs)


def _size(text: str, part: str, known: Mapping[str, int | None]) -> int:
    if text in known:
        value = known[text]
        if value is None:
            raise ConfigError(f"--inputs: {part.strip()!r} has a size S: say it by --seq-len")
        return value
    if not text.isdigit():
        raise ConfigError(
            f"--inputs: {part.strip()!r} has a size {text!r}. Sizes are whole numbers, B (rows) or "
            "S (--seq-len)."
        )
    return int(text)


def _tensor(match: re.Match[str], shape: list[int], device: torch.device) -> Tensor:
    dtype = getattr(torch, match["dtype"], None)
    what = match[0].strip()
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--inputs: {what!r}: torch has no dtype {match['dtype']!r}")
    if math.prod(shape) * dtype.itemsize >= 1 << 62:
        raise ConfigError(f"--inputs: {what!r}: no memory has {math.prod(shape):.1e} elements")
    if match["high"] is not None and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"--inputs: {what!r}: only whole numbers are below something")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    high = 2 if match["high"] is None else int(match["high"])
    if high < 1:
        raise ConfigError(f"--inputs: {what!r}: nothing is below {high}")
    return torch.randint(high, shape, device=device).to(dtype)
