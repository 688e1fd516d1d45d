"""Commands: what they compare, count and print."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a gradient that is rounding is held against itself",
        "fxzero/inspect/bisect/search.py",
        "largest[kind_of(name)] * rounding",
        "0.0",
        "tests/inspect/test_bisect.py::test_no_pass_is_blamed_for_rounding",
    ),
    Fault(
        "bisect makes complex parameters real",
        "fxzero/inspect/bisect/recorded.py",
        "if tensor.is_complex():",
        "if False:",
        "tests/inspect/test_bisect.py::test_complex_parameters_stay_complex",
    ),
    Fault(
        "complex parameters are estimated by a kernel that is not there",
        "fxzero/inspect/optimizer.py",
        "fused=fused or None",
        "fused=True",
        "tests/inspect/test_estimate.py::test_what_the_optimizer_updates_by_itself_has_state_too",
    ),
    Fault(
        "nobody says that an optimizer's memory is not known",
        "fxzero/schedule/storage.py",
        "self.found.left_out.append(repr(node.target))",
        "pass",
        "tests/cost/test_own_step.py::test_what_cannot_be_found_out_is_said",
    ),
    Fault(
        "a dump's file that is cut short is taken for whole",
        "fxzero/inspect/dump.py",
        "held[name] < size",
        "held[name] < 0",
        "tests/inspect/test_dump.py::test_cut_short_where_nobody_reads",
    ),
    Fault(
        "a name controls the terminal",
        "fxzero/cli/terminal.py",
        "super().render_str(visible(text), **settings)",
        "super().render_str(text, **settings)",
        "tests/cli/test_commands.py::test_nothing_controls_the_terminal",
    ),
    Fault(
        "what forward does not read is not held",
        "fxzero/inspect/capture.py",
        "graph.unread = unread",
        "graph.unread = ()",
        "tests/inspect/test_estimate.py::test_what_forward_does_not_read_is_held",
    ),
    Fault(
        "pretrained parameters are frozen where a constructor froze them",
        "fxzero/inspect/targets/pretrained.py",
        "parameter.requires_grad_(parameter.is_floating_point())",
        "pass",
        "tests/inspect/test_targets.py::test_what_a_constructor_froze",
    ),
    Fault(
        "parts of one shape are parameters of one shape",
        "fxzero/_compat/layer_guards.py",
        "if any(kind_of(own) != kind_of(key) for own, key in keys.items()):",
        "if False:",
        "tests/compat/test_equal_layers.py::test_parts_of_one_shape_are_no_parameters_of_one",
    ),
)
