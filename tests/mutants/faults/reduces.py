"""Gradients: each reduced once, over every group, to a mean."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a reduction is not waited for",
        "passes/shard_grads.py",
        "return graph.call(_c10d.wait_tensor.default, (part,), "
        "stamp=replace(stamp, role=Role.WAIT))",
        "return part",
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
        "for group in spec.replica_groups:\n        part = _all_reduce",
        "for group in ():\n        part = _all_reduce",
        "verify: stage 3 on two axes",
        "is reduced over groups",
    ),
    Fault(
        "shards of gradients are sums, not means",
        "passes/shard_grads.py",
        '("avg", group.size, group.name),',
        '("sum", group.size, group.name),',
        "verify: stage 3",
        "is no mean over the ranks",
    ),
    Fault(
        "full gradients are sums, not means",
        "passes/shard_grads.py",
        'default, ("avg", group.name), stamp',
        'default, ("sum", group.name), stamp',
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
        "what follows a joint launch stays before it",
        "passes/bucket.py",
        "    if not first:\n        _waits_after",
        "    if first:\n        _waits_after",
        "verify: stage 3",
        "before it exists",
    ),
    Fault(
        "ranks' rows are added up, not averaged",
        "fxzero/runtime/collectives.py",
        "        free_storage(flight.source)\n    return total.div_(size)",
        "        free_storage(flight.source)\n    return total",
        "tests/parity/test_step.py::test_float64[2-sgd-None-1-3]",
    ),
    Fault(
        "an all-reduce is added up, not averaged",
        "fxzero/runtime/collectives.py",
        "    _joined.extend(flight.handles)\n    return total.div_(size)",
        "    _joined.extend(flight.handles)\n    return total",
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
        "fxzero/ops.py",
        "    for group in spec.replica_groups:\n",
        "    for group in spec.replica_groups[1:]:\n",
        "tests/parity/test_sharding.py::test_two_axis_mesh_uncompiled[3-4]",
    ),
    Fault(
        "what reaches a parameter around its marker is not reduced",
        "fxzero/gradients.py",
        "return None if seen == now or gradient.numel() == 0 else _synchronised(gradient, key)",
        "return None",
        "tests/parity/test_habits.py::test_habit[ThroughTheDict-2]",
    ),
)
