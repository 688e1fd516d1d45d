"""Do compilers work: Inductor with its C++ compiler, and Triton.

Inductor keeps what it compiled on disk, where it hides that a compiler is gone: here it begins with
an empty folder. What it found out about this CPU's vector units, in seconds, it may keep. What was
compiled streams through memory as a model's layers do between their matrix products, and is timed
for that (`fxzero.doctor.compute`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fxzero._compat import options_for_one_kernel, probe_vector_instructions
from fxzero.doctor.software import TRITON, version_of
from fxzero.doctor.verdicts import Checked, fail, ok, reason, warn

Chain = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
CHAIN_TENSORS = 6
"""That `chain` reads and writes."""
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def chain(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What stands between products: a sum, a norm, ReLU and its gradient; all (rows, columns).

    Memory bounds it: what a CPU computes by polynomials is timed by itself.
    """
    total = x + y
    hidden = F.layer_norm(total, total.shape[-1:])
    return total, F.relu(hidden), torch.where(hidden > 0, g, 0.0)


@dataclass(frozen=True)
class Compiled:
    """What became of a small function."""

    checked: Checked
    run: Chain | None
    """None if it could not be compiled."""


def compile_chain(rows: int, columns: int, device: torch.device) -> Compiled:
    """Compile `chain` for a shape by ``torch.compile``, from an empty cache."""
    inputs = [torch.randn(rows, columns, device=device) for _ in range(3)]
    begin = time.perf_counter()
    try:
        if device.type == "cpu":
            probe_vector_instructions()
        with empty_caches(), torch.no_grad():
            run: Chain = torch.compile(chain, options=options_for_one_kernel())
            made = run(*inputs)
        right = all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-4)
            for a, b in zip(made, chain(*inputs), strict=True)
        )
    except Exception as error:
        what, advice = _why(error, device)
        return Compiled(fail("compiler", what, advice), None)
    seconds = time.perf_counter() - begin
    if not right:
        advice = "What Inductor compiles here is wrong. Set lower_regions.backend=eager, and tell."
        return Compiled(fail("compiler", "compiled code computes other values", advice), None)
    compiler = "Triton" if device.type == "cuda" else os.environ.get("CXX", "the C++ compiler")
    what = f"a small function was compiled by Inductor and {compiler} in {seconds:.1f} s"
    return Compiled(ok("compiler", what), run)


def _why(error: Exception, device: torch.device) -> tuple[str, str]:
    what = f"torch.compile does not work here: {_cause(error)}"
    if device.type == "cuda":
        return what, "Triton compiles for the GPU, and needs a C compiler for its launchers: gcc."
    return what, (
        "Inductor needs a C++ compiler with OpenMP: install g++, or name one by CXX. Without it, "
        "lower_regions.backend=eager runs torch's own kernels."
    )


def _cause(error: BaseException) -> str:
    """What a compiler said: behind the error that Dynamo raises from it, and without its advice."""
    text = reason(error)
    return text.removeprefix("BackendCompilerFailed: ").removeprefix("InductorError: ")


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Let compilers keep what they make in a folder that is gone afterwards."""
    before = {name: os.environ.get(name) for name in _CACHES}
    folder = tempfile.mkdtemp(prefix="fxzero-doctor-")
    try:
        for name in _CACHES:
            os.environ[name] = folder
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def check_triton() -> Checked:
    """Whether there is one, of a version that goes with torch, and what it runs on."""
    version = version_of(TRITON.name)
    has_gpu = torch.cuda.is_available()
    says = fail if has_gpu else warn
    if version is None:
        return says(
            "triton",
            "not installed",
            f"fxzero.kernels need it, and on GPUs Inductor: pip install '{TRITON.requirement}'.",
        )
    if not TRITON.holds(version):
        return says("triton", version, f"pip install '{TRITON.requirement}'.")
    if has_gpu:
        return ok("triton", f"{version}, for {torch.cuda.get_device_name()}")
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    how = "by its interpreter" if interprets else "without a GPU, with TRITON_INTERPRET=1 alone"
    return ok("triton", f"{version}; kernels run here {how}")
