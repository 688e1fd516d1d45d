"""A rank that is suspended while a checkpoint is written: the others say which, and end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import os, signal, sys
    import torch, torch.distributed as dist
    import fxzero
    from fxzero.checkpoint import writer

    fxzero.init_distributed()
    model = fxzero.shard(torch.nn.Linear(8, 8), zero=3)
    state = fxzero.TrainState(model)
    fxzero.checkpoint.save(state, sys.argv[1], step=1).wait()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        write = writer.HashingWriter.write_data

        def stop(self, *args):
            os.kill(os.getpid(), signal.SIGSTOP)
            return write(self, *args)

        writer.HashingWriter.write_data = stop
    saving = fxzero.checkpoint.save(state, sys.argv[1], step=2)
    try:
        saving.wait()
    except fxzero.RankLostError as error:
        print("TOLD", str(error).replace(chr(10), " "), flush=True)
    os.kill(pids[1], signal.SIGKILL)  # a stopped one does not hear torchrun, which waits for it
    os._exit(1)
"""


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_in_saving(tmp_path: Path) -> None:
    """Within seconds of the time that it is given, and what was published stays."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--monitor-interval",
            "0.1",
            str(script),
            str(tmp_path / "checkpoints"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "FXZERO_WARN_S": "3",  # a tenth of the usual patience
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    assert "rank 1 has stopped" in told
    assert "rank 0: waits in a checkpoint at" in told
    assert "saving.wait()" in told
    assert "Rank 0 is here:" in done.stderr
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step-")] == ["step-0000000001"]
