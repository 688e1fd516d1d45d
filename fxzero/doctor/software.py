"""What is installed: Python, torch, Triton and libraries, against what fxzero is made for."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from fxzero.doctor.verdicts import Checked, fail, ok, warn

LEAST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Wanted:
    """A distribution, as pyproject.toml asks for it; a test holds the two together."""

    name: str
    least: tuple[int, ...]
    below: tuple[int, ...] | None = None
    needed: bool = True
    use: str = ""
    """What works with it alone."""
    extra: str = ""
    """What installs it: ``pip install 'fxzero[cli]'``."""

    @property
    def requirement(self) -> str:
        """``torch>=2.11,<2.14``."""
        least = ".".join(map(str, self.least))
        below = "" if self.below is None else ",<" + ".".join(map(str, self.below))
        return f"{self.name}>={least}{below}"

    def holds(self, version: str) -> bool:
        """Whether a version is in the range."""
        found = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
        return found >= self.least and (self.below is None or found < self.below)


TORCH = Wanted("torch", (2, 11), (2, 14))
TRITON = Wanted("triton", (3, 6), (3, 8))
LIBRARIES = (
    Wanted("hydra-core", (1, 3), (1, 4)),
    Wanted("networkx", (3, 2)),
    Wanted("numpy", (1, 26)),
    Wanted("xxhash", (3, 4)),
    Wanted("typer", (0, 15), extra="cli"),
    Wanted("rich", (13,), extra="cli"),
    Wanted(
        "transformers",
        (4, 57),
        (6,),
        needed=False,
        use="presets of `fxzero estimate` and targets hf:…",
        extra="hf",
    ),
    Wanted("tensorboard", (2, 16), needed=False, use="the trainer's logs", extra="train"),
)


def check_python(fxzero_version: str) -> Checked:
    """Python, and fxzero itself."""
    found = f"{platform.python_version()}, fxzero {fxzero_version}, {platform.platform()}"
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return fail("python", found, f"fxzero needs Python {least} or later.")
    return ok("python", found)


def check_torch() -> Checked:
    """Torch, and what it was built for."""
    cuda = torch.version.cuda
    found = f"{torch.__version__}, built for " + (f"CUDA {cuda}" if cuda else "CPUs")
    if not TORCH.holds(torch.__version__):
        return fail(
            "torch",
            found,
            f"fxzero reads torch's insides as they are in {TORCH.requirement}: "
            f"pip install '{TORCH.requirement}'.",
        )
    return ok("torch", found)


def check_libraries() -> Iterator[Checked]:
    """What fxzero imports, and what some commands do."""
    missing, found = [], []
    for wanted in LIBRARIES:
        version = version_of(wanted.name)
        if version is not None and wanted.holds(version):
            found.append(f"{wanted.name} {version}")
        elif wanted.needed:
            missing.append((wanted, version))
        else:
            how = f"pip install 'fxzero[{wanted.extra}]'"
            yield warn(
                wanted.name,
                version or "not installed",
                f"Without {wanted.requirement} there is no use of {wanted.use}: {how}.",
            )
    if missing:
        what = ", ".join(f"{wanted.name} {version or 'missing'}" for wanted, version in missing)
        install = " ".join(f"'{wanted.requirement}'" for wanted, _ in missing)
        yield fail("libraries", what, f"pip install {install}.")
    else:
        yield ok("libraries", ", ".join(found))


def version_of(name: str) -> str | None:
    """Of an installed distribution; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
