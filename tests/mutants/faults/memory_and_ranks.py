"""What lives until it was read, and what all ranks have alike."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "an activation is released although a view of it is read later",
        "passes/release_saved.py",
        "if user not in seen and root(user) is owner:",
        "if user not in seen and root(user) is user:",
        "verify: stage 3, backward alone",
        "released its memory",
    ),
    Fault(
        "what the caller holds is released",
        "passes/release_saved.py",
        "and roots[node] not in visible",
        "and roots[node] not in owners.keys() - {roots[node]}",
        "tests/passes/test_release_saved.py::test_what_the_user_holds_is_not_released",
    ),
    Fault(
        "a graph that is retained is released",
        "fxzero/sharding/ops.py",
        "if not backward_keeps_graph():",
        "if backward_keeps_graph() is not None:",
        "tests/sharding/test_ops.py::test_release_saved_obeys_retain_graph[True]",
    ),
    Fault(
        "dropout is repeated with other numbers",
        "passes/repeat_values.py",
        "if node in states:",
        "if False:",
        "tests/passes/test_repeat_values.py::test_a_mask_is_drawn_again_from_the_state_before_it",
    ),
    Fault(
        "a checkpoint does not keep what it hands to the next one",
        "fxzero/schedule/forward_values.py",
        "theirs is not None and theirs > mine:",
        "theirs is not None and theirs > mine and False:",
        "tests/passes/test_recompute.py::test_checkpoints_one_behind_the_other",
    ),
    Fault(
        "parts of a list are repeated that is not",
        "fxzero/schedule/forward_values.py",
        "and not (is_part and not values[sources[0]].may_repeat)",
        "",
        "tests/passes/test_recompute.py::test_nothing_random_is_repeated_by_policy",
    ),
    Fault(
        "every level is thought to fit a memory budget",
        "fxzero/compiler/level_search.py",
        "return trial.peak_bytes <= self._budget_bytes",
        "return True",
        "tests/compiler/test_level_search.py::test_the_first_level_that_fits",
    ),
    Fault(
        "what crosses a fence is repeated too",
        "fxzero/schedule/repetition_levels.py",
        "value.may_repeat and i not in crossing,",
        "value.may_repeat,",
        "tests/schedule/test_repetition_levels.py::test_levels_keep_what_crosses_a_fence",
    ),
    Fault(
        "a mask is drawn again from a state that something else has drawn from",
        "passes/repeat_values.py",
        "with graph.graph.inserting_before(node), graph.made_for(node):\n            found[node]",
        "with graph.graph.inserting_after(node), graph.made_for(node):\n            found[node]",
        "tests/passes/test_repeat_values.py::test_a_mask_is_drawn_again_from_the_state_before_it",
    ),
    Fault(
        "a buffer is taken for the same on all ranks",
        "fxzero/graph/same_on_ranks.py",
        "found[node] = _common([found.get(source, ()) for source in node.all_input_nodes])",
        "found[node] = _common([found.get(source) for source in node.all_input_nodes])",
        "tests/graph/test_same_on_ranks.py::test_what_is_the_same",
    ),
    Fault(
        "a rank cuts its part of a value that it computes by other numbers",
        "passes/repeat_values.py",
        'mine = expression(node)\n        if agree(graph.identity, f"{part.value} of '
        "{node.meta['val'].shape}\", mine) != mine:",
        "if False:",
        "tests/passes/test_repeat_values.py::test_a_rank_that_computes_by_other_numbers",
    ),
    Fault(
        "a part is freed while it travels",
        "passes/release_saved.py",
        "reader = _wait_of(user) if is_launch(user) else user",
        "reader = user",
        "tests/passes/test_repeat_values.py::test_a_part_is_freed_when_it_has_travelled",
    ),
    Fault(
        "a changed buffer is read again by backward",
        "passes/recompute.py",
        "            if source in mutated:\n                return None\n",
        "",
        "tests/passes/test_recompute.py::test_what_reads_a_changed_input_is_saved",
    ),
    Fault(
        "buffers are each rank's own",
        "fxzero/sharding/buffers.py",
        "                _broadcast(buffer)",
        "                pass",
        "tests/parity/test_refusals.py::test_buffers_are_those_of_ddp[step-3-2]",
    ),
    Fault(
        "statistics that eager kernels write unseen are each rank's own",
        "fxzero/sharding/buffers.py",
        "version != before or _counts(module)",
        "version != before",
        "tests/parity/test_refusals.py::test_buffers_are_those_of_ddp[eager-0-2]",
    ),
    Fault(
        "every rank decides alone which buffers have changed",
        "fxzero/sharding/buffers.py",
        "if channel is not None:",
        "if channel is None:",
        "tests/parity/test_identity.py::test_ranks_that_write_to_other_buffers_do_not_mix_them[0-2]",
    ),
    Fault(
        "ranks that run other graphs are not told",
        "fxzero/ranks/agree.py",
        "if not torch.equal(theirs, announcement.sent):",
        "if theirs is announcement.sent:",
        "tests/parity/test_ranks_disagree.py::test_another_path_on_one_rank[heads-compiled-0-2]",
    ),
    Fault(
        "eager collectives are not compared",
        "fxzero/ranks/agree.py",
        '_eager[group, what] = Account(\n            digest_of(f"eager {what}"),',
        '_eager[group, what] = Account(\n            digest_of("eager"),',
        "tests/parity/test_ranks_disagree.py::test_another_path_on_one_rank[heads-eager-0-2]",
    ),
    Fault(
        "a norm that is not finite is said of the wrong parameter",
        "fxzero/runtime/finite.py",
        "bad = [n for n, v in zip(self.names, norms, strict=True) if not math.isfinite(v)]",
        "bad = [n for n, v in zip(self.names, norms, strict=True) if math.isfinite(v)]",
        "tests/runtime/test_finite.py::test_a_step_that_was_not_finite",
    ),
)
