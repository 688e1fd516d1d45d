"""What changes parameters: updates, clipping, the loss scale, the next step's gathers."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "gradients are handed to other parameters",
        "passes/update.py",
        "emitter.fused(keys, grads, index, kernel)",
        "emitter.fused(keys, grads[::-1], index, kernel)",
        "verify: step",
        "which is that of",
    ),
    Fault(
        "an update gets another parameter's moments",
        "passes/update.py",
        "state = [[self.state(key, name) for key in keys] for name",
        "state = [[self.state(key, name) for key in keys[::-1]] for name",
        "verify: step",
        "for the state of",
    ),
    Fault(
        "an update changes other parameters",
        "passes/update.py",
        "params = [self.params[key] for key in keys]\n        state",
        "params = [self.params[key] for key in keys[::-1]]\n        state",
        "verify: step",
        "for the parameter of",
    ),
    Fault(
        "an update does not wait for the readers of its parameter",
        "fxzero/schedule/followers.py",
        "    if stamp_of(node).role is Role.UPDATE:\n        changed",
        "    if stamp_of(node).role is not Role.UPDATE:\n        changed",
        "verify: step of one process",
        "has changed it",
    ),
    Fault(
        "the next step's gather starts before the update",
        "passes/gather_ahead.py",
        "with graph.graph.inserting_after(after), graph.made_for(after):",
        "with graph.graph.inserting_before(after), graph.made_for(after):",
        "verify: step with gathers ahead",
        "for the next step before",
    ),
    Fault(
        "what is in flight is taken although a parameter has changed",
        "fxzero/runtime/ahead.py",
        "return torch.equal(sent.view(torch.uint8), now.view(torch.uint8))",
        "return True",
        "tests/parity/test_gather_ahead.py::test_parameters_that_change_between_steps[in_place]",
    ),
    Fault(
        "a change that one rank sees is its own affair",
        "fxzero/runtime/ahead.py",
        "current[group] = is_fake(changed) or not bool(changed.item())",
        "current[group] = is_fake(changed) or current[group]",
        "tests/parity/test_gather_ahead.py::test_parameters_that_change_between_steps[in_one_row]",
    ),
    Fault(
        "gradients are clipped by each rank's own norm",
        "passes/clip_grads.py",
        "call(updates.total_norm, (every, joined, replicated))",
        "call(updates.total_norm, (every, squares, replicated))",
        "tests/parity/test_step.py::test_float64[2-adamw-0.1-4-3]",
    ),
    Fault(
        "replicated parameters count once a rank in the norm",
        "passes/clip_grads.py",
        "if graph.specs[key].shard_group is not None]",
        "if graph.specs[key].zero == 3]",
        "tests/parity/test_step.py::test_float64[2-adamw-0.1-4-3]",
    ),
    Fault(
        "the norm is taken, and nothing is clipped by it",
        "fxzero/runtime/updates.py",
        "    if scale is not None:\n        foreach_mul_(grads, scale)",
        "    if scale is None:\n        foreach_mul_(grads, 1.0)",
        "tests/step/test_train_step.py::test_bitwise[0.5-1]",
    ),
    Fault(
        "the loss scale is not undone",
        "fxzero/step/binding.py",
        "(self.inverse_scales, 1.0 / loss_scale),",
        "(self.inverse_scales, 1.0),",
        "tests/parity/test_step.py::test_low_precision[1-1-fp16]",
    ),
    Fault(
        "an overflow does not keep buffers as they were",
        "fxzero/runtime/updates.py",
        "value if skip is None else torch.where(skip.bool(), buffer, value)",
        "value",
        "tests/parity/test_step.py::test_an_overflow_on_one_rank_skips_the_step_on_all[3]",
    ),
    Fault(
        "a skipped step counts for Adam's bias correction",
        "fxzero/runtime/updates.py",
        "foreach_sub_(steps, [skip] * len(steps))",
        "foreach_sub_(steps, [0 * skip] * len(steps))",
        "tests/parity/test_step.py::test_an_overflow_on_one_rank_skips_the_step_on_all[3]",
    ),
    Fault(
        "a step in several graphs clips by each rank's own norm",
        "fxzero/step/loop.py",
        "[_full(torch.linalg.vector_norm(g)) for g in trained.values()]",
        "[torch.linalg.vector_norm(_local(g)) for g in trained.values()]",
        "tests/step/test_loop.py::test_several_graphs_have_the_numbers_of_one[2-3-2]",
    ),
)
