"""Gloo processes that outlive a test: started once, then fed one function after another.

Importing torch and Dynamo costs seconds, a job on a tiny model a fraction of one. A
`Pool` therefore keeps its ranks alive between tests:

    ranks(2).run(fn, *args)   →   [fn(*args) on rank 0, fn(*args) on rank 1]

`fn` is found by module and name in each rank, so it must be a module-level function;
arguments and results travel as pickles. A rank that raises fails the test with the
traceback of every rank that raised. A rank that neither answers nor raises is asked for
its stack and killed: a collective that one rank left out ends as a report, not a hang.
After either, the pool starts afresh, because its ranks no longer agree on what comes next.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from tests import garbage

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For a pool to import torch and join its process group, and for one of its collectives."""
JOB_TIMEOUT_S = 900.0
"""For one job. The slowest takes half a minute on a quiet machine: this is there to end hangs."""
GRACE_S = 5.0
"""For the process of a rank to end."""
OTHERS_S = 20.0
"""What the other ranks get to finish or fail once one rank has failed, on a busy machine."""
LOOK_S = 1.0
"""How often to see whether those that have not answered can."""
STACKS_TIMEOUT_S = 20.0
"""For a rank to write where it is."""

_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "fxzero",
    "tests.parity.preloaded",
]
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    # Inductor's own pool of compile processes would outnumber the cores.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


class RanksFailedError(AssertionError):
    """At least one rank raised, died or hung; the message holds what each of them said."""


@dataclass(frozen=True)
class _Job:
    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str | None = None
    """The traceback, where the job raised."""


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection
    stacks: Path
    """Where the worker writes its Python stacks when it gets SIGUSR1."""

    def read_answer(self) -> _Answer:
        """The answer that is ready; a worker that died counts as one that raised."""
        try:
            answer: _Answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE_S)
            return _Answer(error=f"the process died, exit code {self.process.exitcode}")
        return answer

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process, so that it answers nothing."""
        if self.process.pid is None or not self.process.is_alive():
            return False
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def dump_stacks(self) -> str:
        """Where every thread of the worker is now."""
        if self.process.pid is None or not self.process.is_alive():
            return "(already gone)"
        if self.is_stopped():
            return "(stopped)"  # it would read no signal
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline, before, now = time.monotonic() + STACKS_TIMEOUT_S, "", ""
        while time.monotonic() < deadline and not (now and now == before):
            time.sleep(0.3)
            before, now = now, self.stacks.read_text()
        return now

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass
class Pool:
    """`world_size` gloo ranks, started at the first job."""

    world_size: int
    timeout_s: float = JOB_TIMEOUT_S
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `fn` on all ranks and return their results in the order of the ranks.

        Raises:
            RanksFailedError: a rank raised, died, or took longer than `timeout_s`.
        """
        __tracebackhide__ = True  # what the ranks say is the interesting part
        if not self._workers:
            self._start()
        job = pickle.dumps(_Job(fn.__module__, fn.__qualname__, args, kwargs))
        for worker in self._workers:
            worker.connection.send_bytes(job)
        return [answer.value for answer in self._gather(fn.__qualname__, self.timeout_s)]

    def close(self) -> None:
        """End the ranks. The next job would start new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # A fork of one process that has imported torch starts in a tenth of the time of a
        # spawn, and so does the next pool. Nothing there has started a thread yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="fxzero-ranks-")
        folder = Path(self._folder.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            arguments = (rank, self.world_size, str(folder), inductor, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with mock.patch.dict(os.environ, _WORKER_ENV):
                process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, _stacks_file(folder, rank)))
        self._gather("start of the pool", START_TIMEOUT_S)

    def _gather(self, what: str, timeout_s: float) -> list[_Answer]:
        """One answer per rank, or `RanksFailedError` and no pool."""
        __tracebackhide__ = True
        try:
            answers = self._read_answers(timeout_s)
            complaints = self._complaints(answers, timeout_s)
        except BaseException:  # a pytest timeout, Ctrl-C: the ranks are in the middle of a job
            self.close()
            raise
        if complaints:
            self.close()
            raise RanksFailedError(f"{what} on {self.world_size} ranks\n\n" + "\n".join(complaints))
        return [answers[rank] for rank in range(self.world_size)]

    def _read_answers(self, timeout_s: float) -> dict[int, _Answer]:
        answers: dict[int, _Answer] = {}
        pending = {worker.connection: worker for worker in self._workers}
        deadline = time.monotonic() + timeout_s
        while pending:
            left = deadline - time.monotonic()
            ready = wait(list(pending), min(max(0.0, left), LOOK_S))
            if not ready and (left < LOOK_S or all(w.is_stopped() for w in pending.values())):
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = pending.pop(connection)
                answers[worker.rank] = answer = worker.read_answer()
                if answer.error:
                    deadline = min(deadline, time.monotonic() + OTHERS_S)
        return answers

    def _complaints(self, answers: dict[int, _Answer], timeout_s: float) -> list[str]:
        failed = {rank: answer.error for rank, answer in sorted(answers.items()) if answer.error}
        complaints = [f"--- rank {rank} raised\n{error}" for rank, error in failed.items()]
        why = "waited for a rank that raised" if failed else f"gave no answer in {timeout_s:g} s"
        for worker in self._workers:
            if worker.rank not in answers:
                complaints.append(f"--- rank {worker.rank} {why}\n{worker.dump_stacks()}")
        return complaints


@dataclass
class Pools:
    """What the `ranks` fixture gives: the pool of a size. Another size closes the last one."""

    _current: Pool | None = None

    def __call__(self, world_size: int, timeout_s: float = JOB_TIMEOUT_S) -> Pool:
        """The pool of `world_size` ranks, whose jobs may take `timeout_s` each."""
        if self._current is None or self._current.world_size != world_size:
            self.close()
            self._current = Pool(world_size)
        self._current.timeout_s = timeout_s
        return self._current

    def close(self) -> None:
        """End the ranks that are alive."""
        if self._current is not None:
            self._current.close()
            self._current = None


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"


def _serve(
    rank: int, world_size: int, folder: str, inductor: str | None, connection: Connection
) -> None:
    """A worker's life: join the group, say so, then answer jobs until it is killed."""
    with _stacks_file(Path(folder), rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        _send(connection, _attempt(partial(_join, rank, world_size, folder, inductor)))
        while True:
            try:
                job: _Job = pickle.loads(connection.recv_bytes())
            except EOFError:  # the tests are over, however they ended
                return
            _send(connection, _attempt(partial(_run, job)))


def _join(rank: int, world_size: int, folder: str, inductor: str | None) -> None:
    # Of the fork server's environment, which is that of the first pool's start, nothing is used.
    os.environ.update(
        _WORKER_ENV, TORCHINDUCTOR_CACHE_DIR=inductor or str(Path(folder) / "inductor")
    )
    torch.set_num_threads(1)
    garbage.keep_house_less_often()
    import fxzero

    # In the workers as in pytest's own process: a warning that no test expects is a failure.
    warnings.filterwarnings("error", category=fxzero.FxZeroWarning)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    timeout = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    _let_computing_go_first()
    garbage.freeze()


def _let_computing_go_first() -> None:
    """Give gloo's thread what the others leave of the processor.

    While a message lies there that nobody has asked for yet, that of a rank that is ahead, the
    thread is woken again and again: a fifth of what a rank that still compiles takes, and on two
    cores a tenth of the time of all tests of several ranks.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has ended meanwhile
            if (task / "comm").read_text().startswith("gloo"):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)


def _run(job: _Job) -> Any:
    try:
        with mock.patch.dict(os.environ):  # nothing in it is left to the next job
            result = job()
        # A rank that issued one collective more or less than the others fails this job,
        # not the one after it.
        dist.barrier()
        return result
    finally:
        torch._dynamo.reset()
        garbage.freeze()


def _attempt(action: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(value=action())
    except BaseException:
        return _Answer(error=traceback.format_exc())


def _send(connection: Connection, answer: _Answer) -> None:
    try:
        payload = pickle.dumps(answer)
    except Exception:
        payload = pickle.dumps(_Answer(error=traceback.format_exc()))
    connection.send_bytes(payload)
