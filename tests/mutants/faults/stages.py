"""What stages of a pipeline owe each other: gradients of what they share, the norm, the loss."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SCHEDULES = "tests/parity/test_pipeline.py::test_every_schedule"
_SHARED = "tests/parity/test_pipeline.py::test_a_module_of_two_stages"

FAULTS = (
    Fault(
        "gradients of what two stages share are not added up",
        "passes/join_stages.py",
        "return Notes(tied=sum_tied(graph))",
        "return Notes(tied=0)",
        _SHARED,
    ),
    Fault(
        "the norm counts what two stages share twice",
        "passes/clip_grads.py",
        "if pipeline.place_of[graph.specs[k].stages[0]] == pipeline.place",
        "if pipeline.place in map(pipeline.place_of.__getitem__, graph.specs[k].stages)",
        _SHARED,
    ),
    Fault(
        "each stage returns the loss that it has",
        "passes/join_stages.py",
        "values[graph.loss] = graph.call(_aten.view.default, (shared, []), stamp=compute)",
        "values[graph.loss] = graph.call(_aten.view.default, (own, []), stamp=compute)",
        _SCHEDULES,
    ),
    Fault(
        "gradients of micro-steps are added up in memory that two parameters share",
        "passes/shard_grads.py",
        "return len(grad.users) < 2 and all(stamp_of(user).role in marks for user in grad.users)",
        "return True",
        "tests/step/test_sums_in_place.py::test_sums",
    ),
    Fault(
        "saved values of micro-steps in flight lie in one place on the host",
        "passes/offload_activations.py",
        "        offsets = places(values)\n",
        "        offsets = {v.node: 0 for v in values}\n",
        "tests/passes/test_offload_activations.py::"
        "test_values_of_micro_steps_in_flight_have_places_of_their_own",
    ),
    Fault(
        "what is repeated for a product that is put off is put off with it",
        "passes/recompute.py",
        "repeat_before_put_off(graph, set(made.values()))",
        "pass",
        "tests/passes/test_split_stages.py::"
        "test_what_is_repeated_for_a_product_that_is_put_off_is_not_put_off",
    ),
    Fault(
        "what the stage before waits for is sent behind gradients of weights",
        "passes/split_stages.py",
        "            self.graph.output.prepend(node)\n",
        "            self.halves and self.graph.output.prepend(node)\n",
        "tests/passes/test_split_stages.py::test_gradients_of_weights_come_behind_what_is_sent",
    ),
    Fault(
        "what is light in a backward is put off with gradients of weights",
        "passes/split_stages.py",
        "if node not in waited_for and (follows or flops_of(node)):",
        "if node not in waited_for:",
        "tests/passes/test_split_stages.py::test_only_products_and_what_follows_are_put_off",
    ),
    Fault(
        "a pipeline's replay sends gradients at the end of a backward",
        "fxzero/pipeline/replay.py",
        "way_us = transfer_us(need, action) - early_us(need) if crosses else 0.0",
        "way_us = transfer_us(need, action) if crosses else 0.0",
        "tests/pipeline/test_tables.py::test_what_leaves_before_an_action_ends",
    ),
    Fault(
        "places of a pipeline decide as one",
        "fxzero/graph/step_graph.py",
        'place = "" if self.pipeline is None else f" at {self.pipeline.place}"',
        'place = ""',
        "tests/parity/test_pipeline_memory.py::test_a_stage_that_does_not_fit_stops_all",
    ),
    Fault(
        "the handles of joined sums keep their memory",
        "fxzero/runtime/collectives.py",
        "    total.set_()  # type: ignore[call-overload]\n",
        "",
        "tests/runtime/test_collectives.py::test_a_joined_sum_is_nobody_elses",
    ),
)
