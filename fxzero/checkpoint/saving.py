"""Saving: the step waits for a copy in memory, a thread writes it, and it appears whole.

    save(state, DIR, step=100)
      every rank   copy its parts to the host's memory               │ training waits for this
                   plan, write and hash its file, sync it to disk    │
      rank 0       values, metadata, manifest; rename; old ones go   │ beside the next steps

What each rank has for itself (an `ignored` parameter, a buffer that is not broadcast) is found by
comparing, and saved once for each; what is equal everywhere is written once.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.tensor import DTensor

from fxzero.checkpoint import by_name
from fxzero.checkpoint.folder import (
    clear,
    lock,
    prune,
    publish,
    read_manifest,
    write_file,
    writing_path,
)
from fxzero.checkpoint.manifest import NAME, VALUES, FileRecord, Manifest, hash_blocks
from fxzero.checkpoint.ranks import Ranks, all_ranks
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import RNG, TrainState, flat
from fxzero.checkpoint.values import bytes_of
from fxzero.checkpoint.writer import CopiesPlanner, HashingWriter
from fxzero.errors import CheckpointError, FxZeroError
from fxzero.ranks.lost import explained
from fxzero.sharding.shard import model_state

log = logging.getLogger("fxzero")

_running: list[Saving] = []
"""The save that is under way: one at a time, as its ranks talk to each other."""


class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: the number that it is saved under.
        held_s: seconds for which `save` held training up.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.held_s = 0.0
        self._outcome: Future[Path] = Future()
        self._thread: threading.Thread | None = None
        self._is_told = False
        """Whether somebody has waited for it, and knows how it ended."""

    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._outcome.done()

    def wait(self) -> Path:
        """Wait until it is on disk.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written, on this rank or on another.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_told = True
        return self._outcome.result()

    def _run(self, job: _Job) -> None:
        try:
            path = job.run()
        except BaseException as met:  # whoever waits gets it
            error = explained(met)
            self._outcome.set_exception(error)
            log.warning("checkpoint %d was not written: %s", self.step, error)
        else:
            self._outcome.set_result(path)
        finally:
            job.forget()


def save(
    state: TrainState,
    folder: str | os.PathLike[str],
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    asynchronous: bool = True,
) -> Saving:
    """Save a run. All ranks call it, between two steps.

        saving = fxzero.checkpoint.save(state, "checkpoints", step=100, keep=3)

    Args:
        state: what to save.
        folder: of all checkpoints of this job, on a file system that all hosts share. One is the
            folder ``step-0000000100`` in it, which `torch.distributed.checkpoint.load` reads too.
        step: how many steps were trained: the number to save it under.
        keep: how many of the last checkpoints stay; None deletes none.
        keep_every: checkpoints whose step this divides stay for good.
        asynchronous: return when the state is copied to the host's memory, and write meanwhile.
            Else no copy is made, and the call returns when everything is on disk.

    Returns:
        What is under way: ``wait()`` for it to know that it is on disk. A later call waits for it,
        and raises what it has met.

    Raises:
        CheckpointError: something cannot be saved, or another job writes to the folder.
    """
    began = time.perf_counter()
    for name, number, least in (
        ("step", step, 0),
        ("keep", keep, 1),
        ("keep_every", keep_every, 1),
    ):
        if number is not None and (type(number) is not int or number < least):
            raise CheckpointError(f"{name}={number!r} must be a whole number, {least} or more")
    wait_for_running()
    ranks = all_ranks()
    job = _Job(state, ranks, Path(folder).absolute(), step, keep, keep_every)
    try:
        job.take(state, copy=asynchronous)
    except FxZeroError as error:  # the others are told: they must not wait for this rank
        job.error = error
    except Exception as error:
        job.error = CheckpointError(f"a state_dict() has failed: {type(error).__name__}: {error}")
        job.error.__cause__ = error
    saving = Saving(step)
    if asynchronous:
        saving._thread = threading.Thread(
            target=saving._run, args=(job,), name="fxzero-checkpoint", daemon=False
        )
        _running.append(saving)
        saving._thread.start()
    else:
        saving._run(job)
    if job.error is not None or not asynchronous:
        saving.wait()
    saving.held_s = time.perf_counter() - began
    return saving


def wait_for_running() -> None:
    """Wait for the save that is under way.

    Raises:
        CheckpointError: it could not be written, and nobody knows yet.
    """
    while _running:
        saving = _running.pop()
        if saving._is_told:
            assert saving.done()
        else:
            saving.wait()


class _Job:
    """One checkpoint, written by all ranks together."""

    def __init__(
        self,
        state: TrainState,
        ranks: Ranks,
        folder: Path,
        step: int,
        keep: int | None,
        keep_every: int | None,
    ) -> None:
        self.ranks = ranks
        self.folder = folder
        self.step = step
        self.keep = keep
        self.keep_every = keep_every
        self.tensors: dict[str, Any] = {}
        self.copies: dict[str, Tensor] = {}
        self.values: dict[str, str] = {}
        self.error: Exception | None = None
        """Why this rank has nothing to write."""
        self.shared = {
            f"model.{name}": f"model.{first}"
            for name, first in by_name.shared_names(state.model).items()
        }
        about = model_state(state.model)
        zero = "no fxzero" if about is None else f"zero {about.zero}"
        self.layout = f"{zero} on {ranks.size} ranks"

    def take(self, state: TrainState, *, copy: bool) -> None:
        """Look at the state as it is now.

        Raises:
            CheckpointError: something in it cannot be saved.
        """
        self.tensors, self.values = state.look()
        parts = flat(self.tensors)
        self.copies = (
            dict(state.staging.copy(parts))
            if copy
            else {name: local_part(tensor) for name, tensor in parts.items()}
        )

    def forget(self) -> None:
        """Let go of the tensors: they are the model's."""
        self.tensors, self.copies = {}, {}

    def run(self) -> Path:
        """Write it, and let it appear."""
        self.ranks.agree(self.error)
        self._prepare()
        try:
            writer = self._write()
        except BaseException:
            if self.ranks.rank == 0:
                shutil.rmtree(writing_path(self.folder, self.step), ignore_errors=True)
            raise
        return self._finish(writer)

    def _prepare(self) -> None:
        """Rank 0 makes room."""
        error = None
        if self.ranks.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock(self.folder)
                clear(self.folder)
                writing_path(self.folder, self.step).mkdir()
            except CheckpointError as met:
                error = met
            except OSError as met:
                error = CheckpointError(f"{met.filename or self.folder} cannot be written: {met}")
        self.ranks.agree(error)

    def _write(self) -> HashingWriter:
        """Write this rank's file."""
        own = self._own_of_ranks()
        state = dict(self.tensors)
        copies = dict(self.copies)
        if own:
            here: dict[str, Tensor] = {}
            for name in own:
                if name in copies:
                    here[name] = _take(state, name)
                    copies[f"ranks.{self.ranks.rank}.{name}"] = copies.pop(name)
            state["ranks"] = {str(self.ranks.rank): here}
        writer = HashingWriter(writing_path(self.folder, self.step), self.shared)
        planner = CopiesPlanner(copies)
        group = self.ranks.group
        if group is None:
            _write_alone(state, writer, planner)
            return writer
        try:
            save_by_dcp(state, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            rank, (met, _) = next(iter(error.failures.items()))
            mine = error.failures.get(self.ranks.rank, (met,))[0]
            said = met if isinstance(met, CheckpointError) else f"{type(met).__name__}: {met}"
            raise CheckpointError(
                f"checkpoint {self.step} was not written. Rank {rank}: {said}"
            ) from mine
        return writer

    def _own_of_ranks(self) -> list[str]:
        """Tensors of which each rank has its own: they lie whole on every rank, and differ."""
        if self.ranks.size == 1:
            return []
        whole = {
            name: _hash(self.copies[name])
            for name, tensor in flat(self.tensors).items()
            if not isinstance(tensor, DTensor)
        }
        by_rank = self.ranks.gather(whole)
        names = list(dict.fromkeys(name for found in by_rank for name in found))
        return [
            name for name in names if len({found[name] for found in by_rank if name in found}) > 1
        ]

    def _finish(self, writer: HashingWriter) -> Path:
        """Rank 0 writes what all have to say, and renames."""
        gathered = self.ranks.gather((writer.records, self.values))
        error, path = None, None
        if self.ranks.rank == 0:
            try:
                path = self._publish(gathered)
            except CheckpointError as met:
                error = met
            except OSError as met:
                full = met.errno in (errno.ENOSPC, errno.EDQUOT)
                error = CheckpointError(
                    f"{met.filename or self.folder} cannot be written: {met.strerror}"
                    + (". Free some space, or keep fewer checkpoints." if full else "")
                )
            if error is not None:
                shutil.rmtree(writing_path(self.folder, self.step), ignore_errors=True)
        self.ranks.agree(error)
        path = self.ranks.from_first(path)
        assert path is not None
        log.info("checkpoint %d is at %s", self.step, path)
        return path

    def _publish(self, gathered: list[tuple[dict[str, FileRecord], dict[str, str]]]) -> Path:
        path = writing_path(self.folder, self.step)
        files = {name: record for records, _ in gathered for name, record in records.items()}
        values = json.dumps(_by_part([values for _, values in gathered]), indent=1).encode()
        write_file(path / VALUES, values)
        files[VALUES] = hash_blocks(values)
        manifest = Manifest(
            step=self.step,
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            world_size=self.ranks.size,
            layout=self.layout,
            tensor_bytes=sum(t.nbytes for t in flat(self.tensors).values()),
            versions={"torch": torch.__version__},
            files=files,
        )
        write_file(path / NAME, manifest.to_bytes())
        try:
            read_manifest(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"not every rank has written where rank 0 looks: {error}. Give a folder that all "
                "hosts share."
            ) from error
        published = publish(self.folder, self.step)
        prune(self.folder, self.keep, self.keep_every)
        return published


def _write_alone(state: dict[str, Any], writer: HashingWriter, planner: CopiesPlanner) -> None:
    """What `dcp.save` does in a single process, without its warning that it is one."""
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.value()])


def _by_part(ranks: list[dict[str, str]]) -> dict[str, Any]:
    """Values by part: ``{"all": …}`` where all ranks have the same, else ``{"ranks": [...]}``.
    Generators are each rank's own, of a single rank too: in a larger world others must differ."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for values in ranks for name in values):
        texts = [values.get(name) for values in ranks]
        if len(set(texts)) == 1 and name != RNG:
            found[name] = {"all": json.loads(texts[0] or "null")}
        else:
            found[name] = {"ranks": [json.loads(text or "null") for text in texts]}
    return found


def _take(state: dict[str, Any], name: str) -> Tensor:
    """Take a tensor out of `TrainState.look`, by the name that files have it under."""
    root, rest = name.split(".", 1)
    if root in ("model", "parts"):
        state[root] = dict(state[root])
        return state[root].pop(rest)
    own, key = rest.removeprefix("state.").rsplit(".", 1)
    state[root] = {**state[root], "state": dict(state[root]["state"])}
    state[root]["state"][own] = dict(state[root]["state"][own])
    tensor: Tensor = state[root]["state"][own].pop(key)
    return tensor


def _hash(tensor: Tensor) -> str:
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.sha256(about + bytes_of(tensor)).hexdigest()
