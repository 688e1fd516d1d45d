"""The only package that touches private torch APIs: a module per topic, whose names are here.

    dynamo            what it compiles, which errors it raises, which it lets through
    aot               joint graphs from AOTAutograd
    partition         their cut into forward and backward
    inductor          decompositions, and regions lowered
    compiled_memory   what a lowered region allocates
    nodes             operators, sources, descriptions and tags on the nodes of graphs
    fakes             tensors without values, symbolic numbers
    dtensors          local tensors, layouts, what torch asks of subclasses of tensors
    autograd          the running backward, versions, hooks on gradients
    modules           calls of modules and their hooks
    optimizers        foreach and fused kernels, states, hooks on steps
    process_groups    groups by name, stores
    memory            storages, Python's collector, the heap

One feature stands on more of Dynamo's inside than a function can hide, and is imported by itself:

    equal_layers      one of equal layers is traced, the others are copied
    layer_calls       what is called, and what was traced of it
    layer_guards      whether another layer is like the traced one
    layer_copies      its nodes for another layer
    traced_objects    where objects are, and whether they were changed

Each function says what it needs and from which versions it is known to hold
(torch 2.11 to 2.13). Imports that cost time are made inside the functions.
"""

from fxzero._compat.aot import (
    aot_compile,
    capture_joint,
    forget_donated_buffers,
    fresh_tracing_context,
    interpreted,
    trace_function,
    trace_joint,
    tracing_fake_mode,
)
from fxzero._compat.autograd import (
    backward_keeps_graph,
    backward_number,
    below_autograd,
    gradient_hooks,
    use_count,
    version_of,
)
from fxzero._compat.compiled_memory import held_bytes
from fxzero._compat.dtensors import (
    as_it_is,
    differentiable_local,
    dtensor_like,
    dtensor_of,
    gradient_of,
    is_view_function,
    keep_layout,
    layout_of,
    let_anomaly_mode_read_dtensors,
    local_tensor,
    makes_parameter,
    plain_reduce,
    rebuild_function,
    set_local_tensor,
    squeeze,
    without_torch_function,
)
from fxzero._compat.dynamo import (
    break_graph,
    graph_break_errors,
    is_compiling,
    lenient_tracing,
    logging_functions,
    never_compile_alone,
    passing_through_dynamo,
    private_code,
    recompile_limit,
    recompile_limit_error,
    register_entry_point,
    reset_dynamo,
    write_no_asserts_without_symbols,
)
from fxzero._compat.fakes import (
    empty_fake,
    fake_mode_of,
    fake_mode_of_tensor,
    fake_tensors,
    has_symbolic_shape,
    hint,
    hinted,
    is_fake,
    is_plain_fake,
    is_symbolic,
    mode_of,
    no_value_error,
    real_tensors,
)
from fxzero._compat.frames import with_room_for_frames
from fxzero._compat.inductor import inductor_compile, inductor_decompositions
from fxzero._compat.memory import (
    collect_only_new_objects_in_dynamo,
    collecting_only_new_objects,
    free_storage,
    return_free_memory,
    shares_memory,
    storage_identity,
    trim_heap,
)
from fxzero._compat.modules import active_ddp_module, module_call, num_module_hooks
from fxzero._compat.nodes import (
    OpOverload,
    by_identity,
    checkpoint_number,
    checkpoint_tag,
    copy_input_source,
    copy_node,
    create_node,
    gradient_index,
    input_index,
    input_source_name,
    is_higher_order,
    is_output,
    is_plain_to_local,
    is_script_object,
    log_usage,
    mutated_index,
    own_local_fake,
    pytree,
    set_args,
    set_grad_enabled,
    set_meta,
)
from fxzero._compat.optimizers import (
    call_before_steps,
    foreach_add_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
    fused_adagrad_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
    has_step_hooks,
    init_optimizer_state,
    is_scheduler_counter,
    mark_stepped,
    take_foreach_of,
    unscale_function,
)
from fxzero._compat.partition import extract_forward_backward, set_side
from fxzero._compat.process_groups import (
    default_store,
    gloo_groups,
    init_fake_process_group,
    launch_all_reduce,
    private_store,
    resolve_process_group,
)

__all__ = [
    "OpOverload",
    "active_ddp_module",
    "aot_compile",
    "as_it_is",
    "backward_keeps_graph",
    "backward_number",
    "below_autograd",
    "break_graph",
    "by_identity",
    "call_before_steps",
    "capture_joint",
    "checkpoint_number",
    "checkpoint_tag",
    "collect_only_new_objects_in_dynamo",
    "collecting_only_new_objects",
    "copy_input_source",
    "copy_node",
    "create_node",
    "default_store",
    "differentiable_local",
    "dtensor_like",
    "dtensor_of",
    "empty_fake",
    "extract_forward_backward",
    "fake_mode_of",
    "fake_mode_of_tensor",
    "fake_tensors",
    "foreach_add_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub_",
    "forget_donated_buffers",
    "free_storage",
    "fresh_tracing_context",
    "fused_adagrad_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "gloo_groups",
    "gradient_hooks",
    "gradient_index",
    "gradient_of",
    "graph_break_errors",
    "has_step_hooks",
    "has_symbolic_shape",
    "held_bytes",
    "hint",
    "hinted",
    "inductor_compile",
    "inductor_decompositions",
    "init_fake_process_group",
    "init_optimizer_state",
    "input_index",
    "input_source_name",
    "interpreted",
    "is_compiling",
    "is_fake",
    "is_higher_order",
    "is_output",
    "is_plain_fake",
    "is_plain_to_local",
    "is_scheduler_counter",
    "is_script_object",
    "is_symbolic",
    "is_view_function",
    "keep_layout",
    "launch_all_reduce",
    "layout_of",
    "lenient_tracing",
    "let_anomaly_mode_read_dtensors",
    "local_tensor",
    "log_usage",
    "logging_functions",
    "makes_parameter",
    "mark_stepped",
    "mode_of",
    "module_call",
    "mutated_index",
    "never_compile_alone",
    "no_value_error",
    "num_module_hooks",
    "own_local_fake",
    "passing_through_dynamo",
    "plain_reduce",
    "private_code",
    "private_store",
    "pytree",
    "real_tensors",
    "rebuild_function",
    "recompile_limit",
    "recompile_limit_error",
    "register_entry_point",
    "reset_dynamo",
    "resolve_process_group",
    "return_free_memory",
    "set_args",
    "set_grad_enabled",
    "set_local_tensor",
    "set_meta",
    "set_side",
    "shares_memory",
    "squeeze",
    "storage_identity",
    "take_foreach_of",
    "trace_function",
    "trace_joint",
    "tracing_fake_mode",
    "trim_heap",
    "unscale_function",
    "use_count",
    "version_of",
    "with_room_for_frames",
    "without_torch_function",
    "write_no_asserts_without_symbols",
]
