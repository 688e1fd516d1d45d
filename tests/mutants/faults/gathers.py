"""Full parameters: gathered whole, from the right ranks, alive while they are read."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a full parameter is released after its first reader",
        "passes/shard_params.py",
        "last = max(u for u in (*users, *aliases)",
        "last = min(u for u in (*users, *aliases)",
        "verify: stage 3",
        "released its memory",
    ),
    Fault(
        "backward reads what forward gathered and released",
        "passes/shard_params.py",
        "if segment != segments[0] and per_segment:",
        "if segment != segments[0] and not per_segment:",
        "verify: stage 3",
        "released its memory",
    ),
    Fault(
        "a shard is gathered over its replicas",
        "passes/shard_params.py",
        "([part], spec.shard_group.size, spec.shard_group.name),",
        "([part], spec.shard_group.size, (*spec.replica_groups, spec.shard_group)[0].name),",
        "verify: stage 3 on two axes",
        "but it is sharded over",
    ),
    Fault(
        "a gathered parameter keeps its padding",
        "passes/shard_params.py",
        "(full, 0, 0, spec.shape[0]),",
        "(full, 0, 0, spec.padded_rows),",
        "tests/passes/test_shard_params.py::test_13_rows[2-0-7-14]",
    ),
    Fault(
        "two results of a bucket are swapped",
        "passes/bucket.py",
        "(launch, position),",
        "(launch, len(sent) - 1 - position),",
        "verify: stage 3",
        "is waited for as",
    ),
    Fault(
        "tensors are sent in another order than they are waited for",
        "passes/lower_transfers.py",
        "in zip(transfer.tensors, transfer.parts,",
        "in zip(transfer.tensors[::-1], transfer.parts,",
        "verify: stage 3, lowered",
        "is waited for as",
    ),
    Fault(
        "what backward still reads is released in forward",
        "fxzero/schedule/keep.py",
        "left = [node for node in tensors if node not in kept]",
        "left = list(tensors)",
        "verify: step that keeps parameters",
        "released its memory",
    ),
    Fault(
        "this rank's own rows are missing from a gather",
        "fxzero/runtime/collectives.py",
        "rows[rank].copy_(part)",
        "rows[rank].zero_()",
        "tests/parity/test_step.py::test_float64[2-adamw-0.1-4-3]",
    ),
    Fault(
        "rows arrive at another rank's place",
        "fxzero/runtime/collectives.py",
        "process_group.recv([rows[other]], other, tag) for",
        "process_group.recv([rows[size - 1 - other]], other, tag) for",
        "tests/parity/test_step.py::test_float64[2-adamw-0.1-4-3]",
    ),
    Fault(
        "the ranks' schedules are each one's own",
        "fxzero/schedule/agreement.py",
        "return json.loads(_decided[key])",
        "return answer",
        "tests/parity/test_schedules.py::test_ranks_with_other_batches_decide_alike[step]",
    ),
)
