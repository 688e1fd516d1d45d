"""What fxzero raises, one tree.

    FxZeroError
    ├── ConfigError         (ValueError)    an option that does not exist or cannot hold
    ├── ShardingError       (ValueError)    a model, parameter or mesh that cannot be sharded
    ├── BatchError          (ValueError)    a batch that does not fit the step
    ├── KernelError         (ValueError)    an argument that a kernel does not take
    ├── CaptureError        (RuntimeError)  a model whose step graph fxzero cannot read
    ├── PassError           (RuntimeError)  a pass that was asked for something it cannot do
    │   └── ContractError                   passes in an order that their contracts forbid
    ├── NonFiniteGradientError (ArithmeticError)  gradients at which a step must stop
    ├── RanksDisagreeError  (RuntimeError)  ranks whose collectives do not belong together
    ├── RankLostError       (RuntimeError)  a rank that is gone, or stopped
    ├── CheckpointError     (RuntimeError)  a checkpoint that cannot be written, read or taken
    ├── DiskError           (OSError)       bytes that disk cannot hold, or no longer has
    ├── HostMemoryError     (MemoryError)   memory of the host that the system does not give
    └── VerificationError   (RuntimeError)  a graph that breaks a rule which must always hold

    FxZeroWarning           (UserWarning)   a setting that cannot take effect

Every message says what was asked, what was found, where, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DYNAMOS_WORDS = "\n\nSet TORCHDYNAMO_VERBOSE"
"""Where its advice begins, to those who would debug Dynamo."""


class FxZeroError(Exception):
    """Root of everything that fxzero raises on purpose."""

    def __str__(self) -> str:
        """The message, without what Dynamo adds to whatever passes through it."""
        return super().__str__().partition(DYNAMOS_WORDS)[0]


class ConfigError(FxZeroError, ValueError):
    """An option that does not exist, or a value that it cannot take."""


class ShardingError(FxZeroError, ValueError):
    """A model, a parameter or a mesh that `fxzero.shard` cannot work with."""


class KernelError(FxZeroError, ValueError):
    """An argument of a dtype, device, shape or stride that a kernel does not take."""


class CaptureError(FxZeroError, RuntimeError):
    """A model whose training step cannot be read as one graph."""


class BatchError(FxZeroError, ValueError):
    """A batch that a training step cannot split as it was told."""


class NonFiniteGradientError(FxZeroError, ArithmeticError):
    """A gradient that is infinite or not a number, where the step was told to stop."""


class RanksDisagreeError(FxZeroError, RuntimeError):
    """Ranks that took different paths, so that their collectives do not belong together."""


class RankLostError(FxZeroError, RuntimeError):
    """A rank that others wait for, and that has died, has stopped or has given up."""


class PassError(FxZeroError, RuntimeError):
    """A pass that met something which it must not silently ignore."""


class ContractError(PassError):
    """A pipeline whose order breaks what one of its passes requires."""


class CheckpointError(FxZeroError, RuntimeError):
    """A checkpoint that cannot be written, that is not whole, or that is of something else."""


class DiskError(FxZeroError, OSError):
    """Bytes that cannot be held on disk, or that are not what was written there."""

    output: object = None
    """What a step returns that is complete, and whose result could not be written."""


class HostMemoryError(FxZeroError, MemoryError):
    """Memory of the host that the system does not give, or not such that a GPU reaches it."""


class VerificationError(FxZeroError, RuntimeError):
    """A graph that breaks one of the rules of `fxzero.graph.verify`."""


class FxZeroWarning(UserWarning):
    """A setting that cannot take effect; an error under `strict=True`."""


MANY = 60
"""Names, of which a message does not list all."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``did you mean 'bucket'? Known: bucket, prefetch``. Of very many
    names the nearest are said."""
    names = sorted(known)
    if len(names) > MANY:
        several = difflib.get_close_matches(word, names, n=5, cutoff=0.5)
        return (
            f"did you mean {', '.join(map(repr, several))}?"
            if several
            else f"none of {len(names)} names is near it."
        )
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}"
