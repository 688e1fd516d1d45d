"""Equal layers: traced once, copied where nothing differs, called where they were made once."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a copied layer reads the parameters of the traced one",
        "fxzero/_compat/layer_copies.py",
        "return keys.get(value, value) if isinstance(value, str) else value",
        "return value",
        "tests/compat/test_equal_layers.py::test_the_graph_is_the_one_of_tracing_each_layer",
    ),
    Fault(
        "a layer is copied whether or not the traced one's guards hold for it",
        "fxzero/_compat/layer_guards.py",
        "return self.valid and bool(self.root.check({}))",
        "return True",
        "tests/compat/test_equal_layers.py::test_a_layer_that_differs",
    ),
    Fault(
        "a layer is copied though it reads what the forward has changed",
        "fxzero/_compat/layer_guards.py",
        "if any(id(value) in self.changes.objects for value in (module.value, *values)):",
        "if False:",
        "tests/compat/test_equal_layers.py::test_a_forward_that_changes_objects"
        "[before the layers-own_config-change_what_one_reads]",
    ),
    Fault(
        "nobody notices that a layer reads what the forward has set",
        "fxzero/_compat/traced_objects.py",
        "        self.touches += 1",
        "        pass",
        "tests/compat/test_equal_layers.py::test_a_forward_that_changes_objects",
    ),
    Fault(
        "a piece gives its results in another order",
        "fxzero/graph/pieces.py",
        "set_args(node, (call, i))",
        "set_args(node, (call, len(parts) - 1 - i))",
        "tests/passes/test_meaning.py::test_every_pass_keeps_the_meaning[2-outline]",
    ),
    Fault(
        "runs are told apart by what they read and do, not by what others read of them",
        "fxzero/graph/structure.py",
        "tuple(index[node].position for node in outputs),",
        "(),",
        "tests/passes/test_lower_regions.py::test_structures_differ_where_results_do",
    ),
    Fault(
        "backward keeps a cast of a parameter that forward made",
        "passes/outline.py",
        "            if needed is not None:",
        "            if needed is None:",
        "tests/passes/test_outline.py::test_backward_reads_no_parameter_from_forward[casting]",
    ),
    Fault(
        "a layer waits for its last bucket where it begins",
        "passes/outline.py",
        "if key in begun and reader is not None and is_call(reader):",
        "if key not in begun and reader is not None and is_call(reader):",
        "tests/passes/test_outline.py::test_the_tasks_are_those_of_operators[3-64-tower]",
    ),
    Fault(
        "a plan is for every graph of such calls, whatever is called",
        "fxzero/graph/digest.py",
        'return f"{node.target.__name__} {node.target.digest}"',
        "return node.target.__name__",
        "tests/passes/test_outline.py::test_what_is_called_counts_in_a_digest",
    ),
    Fault(
        "layers that were left out read the example's parameters",
        "passes/expand_layers.py",
        "return self._layers[layer - _EXAMPLE - 1].inputs[number]",
        "return self._example.inputs[number]",
        "tests/passes/test_expand_layers.py::test_gradients_are_those_of_eager[loop-Deep]",
    ),
    Fault(
        "the layer behind those that were left out reads the first of them",
        "passes/expand_layers.py",
        "(_EXAMPLE + 1, _EXAMPLE, last),",
        "(_EXAMPLE + 1, _EXAMPLE, 0),",
        "tests/passes/test_expand_layers.py::test_gradients_are_those_of_eager[loop-Deep]",
    ),
    Fault(
        "a chain goes on where others read what it passes on",
        "fxzero/capture/layer_runs.py",
        "if not set(output.users) <= set(following.nodes) or",
        "if",
        "tests/passes/test_expand_layers.py::test_gradients_are_those_of_eager[loop-Collected]",
    ),
    Fault(
        "the gradient of what all layers of a chain share is the first one's",
        "fxzero/capture/layer_runs.py",
        '        elif not _is_constant(mine.meta["example_value"]):',
        "        elif False:",
        "tests/passes/test_expand_layers.py::test_gradients_are_those_of_eager[loop-SharedScale]",
    ),
    Fault(
        "layers that are sharded differently are left out",
        "fxzero/capture/leave_out.py",
        "if len({places.kinds(place) for place in (*left, *kept)}) > 1:",
        "if False:",
        "tests/passes/test_expand_layers.py"
        "::test_layers_that_are_sharded_differently_are_not_left_out",
    ),
    Fault(
        "parameters of copied layers are known by the first one's fake tensors",
        "fxzero/_compat/layer_copies.py",
        'fake_beside(node.meta["example_value"], output.fake_mode)',
        'node.meta["example_value"]',
        "tests/compat/test_equal_layers.py::test_calls[penalised]",
    ),
)
