"""Full parameters: gathered whole, from the right ranks, alive while they are read."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a bucket's record has the bytes of its first tensor",
        "fxzero/transfer.py",
        "full_bytes=sum(transfer.full_bytes for transfer in every),",
        "full_bytes=self.full_bytes,",
        "verify: stage 3",
        "and its record says",
    ),
    Fault(
        "gathered parameters are left out of the budget",
        "fxzero/schedule/storage.py",
        "storage.gathered = self.graph.specs[key].zero == 3",
        "storage.gathered = False",
        "tests/passes/test_prefetch_by_cost.py::test_never_over_the_budget",
    ),
    Fault(
        "a plan of another graph is replayed",
        "fxzero/compiler/plan.py",
        "decisions = self.graphs.get(digest)",
        "decisions = next(iter(self.graphs.values()))",
        "tests/compiler/test_plan.py::test_a_digest_that_was_changed_is_refused",
    ),
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
        "record_for(kind, axis, full)",
        "record_for(kind, spec.layout.axes[0], full)",
        "verify: stage 3 on two axes",
        "but its layout asks for",
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
        "set_args(part, (joined, index))",
        "set_args(part, (joined, len(old) - 1 - index))",
        "verify: stage 3",
        "is taken for",
    ),
    Fault(
        "tensors are sent in another order than they are taken",
        "passes/lower_transfers.py",
        "sent = list(tensors)",
        "sent = list(tensors)[::-1]",
        "verify: stage 3, lowered",
        "is taken for",
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
        "tests/parity/test_schedules.py::test_ranks_with_other_batches_decide_alike[step-3]",
    ),
    Fault(
        "what has a group of its own is gathered in the mesh's",
        "fxzero/sharding/layout.py",
        "replace(a, group=a.gather_group or a.group)",
        "a",
        "tests/parity/test_gather_group.py::test_gathers_in_a_group_of_their_own[2-1-loop]",
    ),
)
