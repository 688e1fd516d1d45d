"""Which tensor a name, a marker, a constant or a reference stands for."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "equal layers read the first one's parameters",
        "fxzero/capture/unfold_layers.py",
        "self._keys.get(a, a) if isinstance(a, str) else a for a in copy.args",
        "a for a in copy.args",
        "tests/capture/test_fold_layers.py::test_the_graph_is_the_same[3]",
    ),
    Fault(
        "a constant of a layer is looked up by name in the model",
        "fxzero/capture/unfold_layers.py",
        "constants.adopt(self._module, node) if is_constant else node.target,",
        "node.target,",
        "tests/graph/test_constants.py"
        "::test_equal_layers_keep_their_constants_in_both_doors[3-model's too]",
    ),
    Fault(
        "a free name is taken for the constant of that name",
        "fxzero/graph/constants.py",
        "is not constant.value:",
        "is None:",
        "tests/graph/test_constants.py"
        "::test_equal_layers_keep_their_constants_in_both_doors[3-model's too]",
    ),
    Fault(
        "a marker names another parameter of its module",
        "fxzero/sharding/markers.py",
        "local, self._fxzero_keys[name], getattr(MODES, self._fxzero_mode)",
        "local, [*self._fxzero_keys.values()][0], getattr(MODES, self._fxzero_mode)",
        "tests/parity/test_parity.py::test_float64[2-mlp-3]",
    ),
    Fault(
        "a parameter that is tied after shard keeps its own key",
        "fxzero/sharding/markers.py",
        "vars(self)[KEYS] = {**keys, name: key}",
        "vars(self)[KEYS] = dict(keys)",
        "tests/parity/test_habits.py::test_habit[TiedAfterShard-2]",
    ),
    Fault(
        "reads around a marker stay as they are",
        "fxzero/capture/mark_inputs.py",
        "user.replace_input_with(node, markers[0])",
        "pass",
        "tests/parity/test_habits.py::test_habit[InATupleToo-2]",
    ),
    Fault(
        "a write to a gathered copy is lost in silence",
        "fxzero/sharding/full_parameter.py",
        "if version_of(copy) != version:",
        "if version_of(copy) < version:",
        "tests/parity/test_habits.py::test_habit[NormalisedByHand-2]",
    ),
    Fault(
        "a norm is each rank's own part",
        "fxzero/sharding/sharded_value.py",
        "if is_pending(result):\n",
        "if not result.placements:\n",
        "tests/parity/test_identity.py::test_numbers_are_of_all_ranks[3-2]",
    ),
    Fault(
        "an assignment to .data changes what was kept aside",
        "fxzero/sharding/local_data.py",
        "set_local_tensor(tensor, local_tensor(value).detach())",
        "local_tensor(tensor).copy_(local_tensor(value))",
        "tests/parity/test_identity.py::test_data_is_swapped_and_swapped_back[3-2]",
    ),
    Fault(
        "who holds a replaced parameter keeps its old values",
        "fxzero/sharding/identity.py",
        "args, kwargs = replaced((args, kwargs or {}), ReplacedParameter, replacement)\n"
        "        return func(*args, **kwargs)",
        "with torch._C.DisableTorchFunctionSubclass():\n"
        "            return func(*args, **(kwargs or {}))",
        "tests/parity/test_habits.py::test_habit[InATuple-2]",
    ),
    Fault(
        "optimizers made before shard keep the old parameters",
        "fxzero/sharding/identity.py",
        "[replaced_by.get(id(p), p) for p in group",
        "[p for p in group",
        "tests/parity/test_identity.py::"
        "test_an_optimizer_from_before_shard_has_the_parameters_of_today[1-2]",
    ),
    Fault(
        "a parameter without gradient gets zeros, and decays",
        "fxzero/capture/shard_inputs.py",
        "ctx.set_materialize_grads(False)",
        "ctx.set_materialize_grads(True)",
        "tests/parity/test_sharding.py::test_parameters_without_gradient_have_none[3-2]",
    ),
    Fault(
        "what is written to a part of a shard is lost",
        "fxzero/sharding/whole_value.py",
        "vars(item)[VIEW] = view",
        "pass",
        "tests/parity/test_writes_outside.py::test_a_write_reaches_the_shards[2]",
    ),
    Fault(
        "every rank keeps its rows of its own random numbers",
        "fxzero/sharding/whole_value.py",
        "dist.broadcast(value, src=0)",
        "pass",
        "tests/parity/test_writes_outside.py::test_a_write_reaches_the_shards[2]",
    ),
    Fault(
        "what ranks add up in 16 bits is rounded on each",
        "fxzero/sharding/sharded_value.py",
        "return value.float() if value.dtype in _ROUNDED else value",
        "return value",
        "tests/parity/test_outside_of_a_forward.py::test_every_optimizer_of_torch[Muon-3-2]",
    ),
    Fault(
        "a parameter that shard has not seen trains alone",
        "fxzero/sharding/before_step.py",
        "    if left:\n",
        "    if not reduced and not left:\n",
        "tests/parity/test_before_step.py::test_a_criterion_with_parameters[2]",
    ),
    Fault(
        "replicas that differ train on",
        "fxzero/sharding/before_step.py",
        "return step in (1, 10) or",
        "return",
        "tests/parity/test_before_step.py::test_replicas_that_differ[eager-2]",
    ),
    Fault(
        "an input of a graph is called as its parameter is",
        "fxzero/graph/step_graph.py",
        "node.target = node.name",
        "pass",
        "tests/step/test_names.py::test_a_step_trains_them",
    ),
)
