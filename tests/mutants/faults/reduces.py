"""Gradients: each reduced once, over every group, to a mean."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a transfer is not waited for",
        "fxzero/graph/launch.py",
        "return emit_part(graph, emit_wait(graph, launch, stamp), 0, stamp, name)",
        "return emit_part(graph, launch, 0, stamp, name)",
        "verify: stage 3",
        "is still in flight",
    ),
    Fault(
        "gradients are not reduced",
        "passes/shard_grads.py",
        "return reduce(graph, total, spec, stamp, compute)",
        "return total",
        "verify: stage 0",
        r"reduced over groups \[\]",
    ),
    Fault(
        "a gradient is reduced over one of two axes",
        "passes/shard_grads.py",
        "for kind, axis in spec.layout.reductions:",
        "for kind, axis in spec.layout.reductions[:1]:",
        "verify: stage 3 on two axes",
        "is reduced over groups",
    ),
    Fault(
        "shards of gradients are sums, not means",
        "passes/shard_grads.py",
        'record_for(kind, axis, part, "avg")',
        'record_for(kind, axis, part, "sum")',
        "verify: stage 3",
        "is no mean over the ranks",
    ),
    Fault(
        "full gradients are sums, not means",
        "passes/shard_grads.py",
        'record_for(kind, axis, part, "avg")',
        'record_for(kind, axis, part, "avg" if spec.shard_group else "sum")',
        "verify: stage 0",
        "is no mean over the ranks",
    ),
    Fault(
        "gradients are reduced in the compute dtype",
        "passes/shard_grads.py",
        "if communicates and value.dtype != spec.reduce_dtype:",
        "if not communicates and value.dtype != spec.reduce_dtype:",
        "tests/passes/test_shard_grads.py::test_reduce_dtype",
    ),
    Fault(
        "only one of a parameter's many gradients is reduced",
        "passes/shard_grads.py",
        "for grad in grads[1:]:",
        "for grad in grads[2:]:",
        "tests/passes/test_shard_grads.py::test_many_reads_are_reduced_once",
    ),
    Fault(
        "a joint launch is waited for before it starts",
        "passes/bucket.py",
        "before = min(t.wait for t in transfers) if gathers else launch.next",
        "before = min(t.wait for t in transfers)",
        "verify: stage 3",
        "before it exists",
    ),
    Fault(
        "ranks' rows are added up, not averaged",
        "fxzero/runtime/collectives.py",
        "means.append(total.div_(size))",
        "means.append(total)",
        "tests/parity/test_step.py::test_float64[2-sgd-None-1-3]",
    ),
    Fault(
        "an all-reduce is added up, not averaged",
        "fxzero/runtime/collectives.py",
        "return [_taken_from(total).div_(size) for total in totals]",
        "return [_taken_from(total) for total in totals]",
        "tests/parity/test_step.py::test_float64[2-sgd-None-1-0]",
    ),
    Fault(
        "a third rank's rows are left out",
        "fxzero/runtime/collectives.py",
        "for part in rest:",
        "for part in rest[1:]:",
        "tests/parity/test_step.py::test_float64[4-sgd-None-1-3]",
    ),
    Fault(
        "a gradient that the user reads too is reduced in place",
        "passes/lower_transfers.py",
        "        node = base\n    return False",
        "        node = base\n    return True",
        "tests/passes/test_lower_transfers.py"
        "::test_a_gradient_that_something_else_reads_is_not_reduced_in_place",
    ),
    Fault(
        "eager gradients are averaged over one of two axes",
        "fxzero/sharding/ops.py",
        "    for group in spec.replica_groups:\n",
        "    for group in spec.replica_groups[1:]:\n",
        "tests/parity/test_sharding.py::test_two_axis_mesh_uncompiled[3-4]",
    ),
    Fault(
        "what reaches a parameter around its marker is not reduced",
        "fxzero/sharding/gradients.py",
        "return None if seen == now or gradient.numel() == 0 else _synchronised(gradient, key)",
        "return None",
        "tests/parity/test_habits.py::test_habit[InATuple-2]",
    ),
    Fault(
        "one gradient of two parameters is reduced in place, twice",
        "passes/lower_transfers.py",
        "times[root(node)] == 1 and is_own(node)",
        "is_own(node)",
        "tests/passes/test_lower_transfers.py"
        "::test_one_gradient_of_two_parameters_is_neithers_own[0-all_reduce]",
    ),
)
