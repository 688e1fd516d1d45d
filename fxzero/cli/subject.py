"""What a command looks at: a step that is compiled for it, or one that a run has dumped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    Dtype,
    check_companions,
    dtype_of,
    settings_of,
)
from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.inspect import Analysis, Capture, capture
from fxzero.inspect.dump import is_dump, read
from fxzero.inspect.targets import Target, load
from fxzero.inspect.targets.transformers_models import PREFIX


@dataclass(frozen=True)
class Subject:
    """A target and the options that say what is compiled of it, as the command line gives them."""

    target: str
    zero: int = 3
    world_size: int = DEFAULT_WORLD_SIZE
    rank: int = 0
    batch_size: int | None = None
    seq_len: int | None = None
    inputs: str | None = None
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    offload: bool = False
    step: bool = False
    clip_grad_norm: float = 1.0
    micro_batches: int = 1
    cluster: str | None = None
    options: str = "{}"
    inference: bool = False
    mesh: tuple[int, ...] = ()
    """Of the axes that parameters lie on: see `fxzero.inspect.capture`."""
    side: str = field(default="", compare=False)
    """What its options are called with, where a command has two subjects: ``other-``."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **others: Any) -> Subject:
        """What a command was called with: those of its arguments that have a field's name.

        Args:
            arguments: all that it has, by name.
            others: fields that have another name there.
        """
        own = [f.name for f in fields(cls) if f.name not in ("mesh", "side")]  # a command says them
        named = {name: arguments[name] for name in own if name in arguments}
        return cls(**named, **others)

    @property
    def is_dump(self) -> bool:
        """Whether a run, or another command, has written down what was decided."""
        return is_dump(self.target) or self.is_file

    @property
    def is_file(self) -> bool:
        """Whether it is an analysis that ``fxzero report --json`` has printed."""
        return self.target.endswith(".json") and not self.target.startswith(PREFIX)

    def check(self) -> None:
        """See, before anything takes time, that the options go together.

        Raises:
            ConfigError: they do not; or the target is a dump, of which they say nothing.
        """
        if self.is_dump:
            given = [
                f"--{f.name.replace('_', '-')}"
                for f in fields(self)
                if f.name not in ("target", "rank", "side") and getattr(self, f.name) != f.default
            ]
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: {self.target} is a dump, of a run that has decided "
                    "already. Leave out what a capture would be told."
                )
            _ = self._found
            return
        check_companions(
            {
                "--micro-batches": (self.micro_batches > 1, "--step", self.step),
                "--clip-grad-norm": (self.clip_grad_norm != 1.0, "--step", self.step),
                "--inference": (self.inference, "no --step", not self.step),
                "--reduce-dtype": (
                    self.reduce_dtype is not None,
                    "no --inference",
                    not self.inference,
                ),
            }
        )
        if self.rank >= self.world_size:
            raise ConfigError(f"rank {self.rank} is not in a world of {self.world_size} ranks")
        self.config()
        _ = self._found

    @cached_property
    def _found(self) -> Target | Analysis | dict[int, Analysis]:
        """What the target names: read or found once, and before anything takes time."""
        if self.is_file:
            return _read(Path(self.target))
        return read(self.target) if self.is_dump else load(self.target)

    def captured(self, *, keep_text: bool = False) -> Capture:
        """Compile it.

        Args:
            keep_text: record the graph's text behind every pass.
        """
        build, settings = self.settings(keep_text=keep_text)
        return capture(build, **settings)

    def settings(self, *, keep_text: bool = False) -> tuple[Callable[[], Any], dict[str, Any]]:
        """What makes the model, and the arguments of `fxzero.inspect.capture`."""
        found = self._found
        assert isinstance(found, Target)
        return found.build, {
            "zero": self.zero,
            "world_size": self.world_size,
            "rank": self.rank,
            "batch_size": self.batch_size,
            **found.usual(dtype_of(self.param_dtype), self.seq_len, self.inputs),
            "reduce_dtype": dtype_of(self.reduce_dtype),
            "offload": self.offload,
            "training": not self.inference,
            "step": self.step,
            "micro_batches": self.micro_batches,
            "clip_grad_norm": self.clip_grad_norm or None,
            "mesh": self.mesh,
            "options": self.config(keep_text=keep_text),
        }

    def config(self, *, keep_text: bool = False) -> Config:
        """The compiler's settings."""
        return settings_of(self.options, self.cluster, keep_text, f"--{self.side}options")

    def analysis(self, *, texts: bool = False) -> Analysis:
        """All that is known of it, in detail.

        Args:
            texts: also the graph's text behind every pass.

        Raises:
            ConfigError: the dump is none, or has no such rank.
        """
        found = self.analyses(texts=texts)
        if isinstance(self._found, dict) and self.rank not in found:
            raise ConfigError(
                f"{self.target} holds ranks {', '.join(map(str, found))}, and not {self.rank}: "
                "dumps of other hosts are on their disks"
            )
        return found[self.rank] if self.rank in found else next(iter(found.values()))

    def analyses(self, *, texts: bool = False) -> dict[int, Analysis]:
        """The same by rank: all of a dump's, and the one of anything else."""
        found = self._found
        if isinstance(found, dict):
            return found
        if isinstance(found, Target):
            found = Analysis.of(self.captured(keep_text=texts), memory=True, detail=True)
        return {found.rank: found}


BESIDE = ("code", "diffs", "pipeline")
"""What `fxzero inspect --json` prints beside an analysis."""


def _read(path: Path) -> Analysis:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Name a file that --json wrote.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or "schedules" not in data:
        raise ConfigError(
            f"{path} holds no analysis: name a file that `fxzero report --json` wrote"
        )
    found = Analysis.from_json({k: v for k, v in data.items() if k not in BESIDE}, str(path))
    for detail in found.details:
        if any(len(row.num_bytes) != len(detail.kinds) for row in detail.held):
            raise ConfigError(
                f"{path}: graph {detail.graph} holds memory of other than {len(detail.kinds)} kinds"
            )
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")
