"""Several micro-batches to a step, in a graph and in a loop."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a micro-step's gradients are lost",
        "passes/accumulate.py",
        "for term in terms[1:]:",
        "for term in terms[2:]:",
        "verify: step of 4 micro-batches, stage 3",
        r"adds up micro-steps \[0, 2, 3\]",
    ),
    Fault(
        "the first micro-step's gradients stand for all",
        "passes/shard_grads.py",
        "total = graph.call(_aten.add_.Tensor, (total, grad), stamp=role)",
        "total = graph.call(_aten.add_.Tensor, (total, total), stamp=role)",
        "verify: step of 4 micro-batches, stage 1",
        r"adds up micro-steps \[0, 0",
    ),
    Fault(
        "every micro-step sees the first rows",
        "passes/accumulate.py",
        "(batch, 0, index * rows, (index + 1) * rows),",
        "(batch, 0, 0, rows),",
        "tests/passes/test_accumulate.py::test_rows",
    ),
    Fault(
        "running statistics forget all micro-batches but the last",
        "passes/accumulate.py",
        "before = {source: values[-1][position]",
        "before = {source: values[0][position]",
        "tests/step/test_train_step.py::test_bitwise[None-4]",
    ),
    Fault(
        "micro-batches' losses are added up, not averaged",
        "fxzero/step/binding.py",
        "(self.tangents, loss_scale / self._micro_batches),",
        "(self.tangents, loss_scale),",
        "tests/step/test_train_step.py::test_bitwise[None-4]",
    ),
    Fault(
        "a long step leaves out a micro-batch",
        "fxzero/runtime/looped.py",
        "runs = range(STEADY, STEADY + graph.steady_runs)",
        "runs = range(STEADY, STEADY + graph.steady_runs - 1)",
        "tests/parity/test_many_micro_batches.py::test_rows_that_begin_anywhere[3]",
    ),
    Fault(
        "the micro-step that stands for others sees the same rows each time",
        "fxzero/runtime/looped.py",
        "self.graph.call_function(operator.mul, (index, rows))",
        "self.graph.call_function(operator.mul, (STEADY, rows))",
        "tests/parity/test_many_micro_batches.py::test_rows_that_begin_anywhere[3]",
    ),
    Fault(
        "a run of the loop reads what the first one read",
        "fxzero/runtime/looped.py",
        "following = [*loop.carried.values(), *loop.kept]",
        "following = [*loop.carried, *loop.kept]",
        "tests/parity/test_many_micro_batches.py::test_rows_that_begin_anywhere[3]",
    ),
    Fault(
        "traffic of a long step is that of five micro-batches",
        "fxzero/graph/steady.py",
        "return graph.steady_runs if stamp.micro_step == STEADY else 1",
        "return 1",
        "tests/graph/test_steady.py::test_traffic_of_many_micro_batches",
    ),
    Fault(
        "no_sync keeps the last micro-batch only",
        "fxzero/sharding/ops.py",
        "kept.grad.add_(grad)\n        kept.backward",
        "kept.grad.copy_(grad)\n        kept.backward",
        "tests/sharding/test_ops.py::test_no_sync_keeps_and_gives_back",
    ),
    Fault(
        "what no_sync kept is left out of the reduction",
        "fxzero/sharding/ops.py",
        "return kept.grad.add_(grad) if kept is not None else",
        "return grad.clone() if kept is not None else",
        "tests/parity/test_accumulation.py::test_no_sync[uncompiled-0-2]",
    ),
    Fault(
        "zero_grad does not forget what no_sync kept",
        "fxzero/sharding/ops.py",
        "    if parameter.grad is None:\n        return None\n    written",
        "    if parameter.grad is None:\n        return kept\n    written",
        "tests/sharding/test_ops.py::test_zero_grad_forgets[sharded-True]",
    ),
    Fault(
        "a step in several graphs reduces no micro-batch",
        "fxzero/step/loop.py",
        "keeps = index < count - 1 and self._state.zero < 2",
        "keeps = self._state.zero < 2",
        "tests/step/test_loop.py::test_several_graphs_have_the_numbers_of_one[2-0-2]",
    ),
    Fault(
        "a step in several graphs adds up micro-batches' losses",
        "fxzero/step/loop.py",
        "(loss * (scale / count)).backward()",
        "(loss * scale).backward()",
        "tests/step/test_loop.py::test_several_graphs_have_the_numbers_of_one[2-3-2]",
    ),
    Fault(
        "a step in several graphs goes on with old gradients",
        "fxzero/step/loop.py",
        "        for parameter in self.parameters.values():\n            parameter.grad = None",
        "        for parameter in ():\n            parameter.grad = None",
        "tests/step/test_loop.py::test_several_graphs_have_the_numbers_of_one[2-3-2]",
    ),
)
