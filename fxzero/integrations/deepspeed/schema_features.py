"""Sections of DeepSpeed about things of their own, that fxzero has not or has elsewhere.

Where their switch is off their other keys ask for nothing; names and types are checked anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxzero.integrations.deepspeed.kinds import (
    ANY,
    BOOL,
    COUNT,
    INT,
    LIST,
    MAPPING,
    NUMBER,
    SIZE,
    TEXT,
    TEXTS,
    Kind,
    one_of,
)
from fxzero.integrations.deepspeed.lines import Verdict
from fxzero.integrations.deepspeed.schema import Entry, Feature, Section, needless, refused

LOGS = "nothing is logged there. Log what a step returns (loss, grad_norm, learning_rates) yourself"
PRINTS = "it only prints: `fxzero trace`, `report` and `estimate` say where time and memory go"
COMPILED = "fxzero compiles the step anyway"
SAID_ELSEWHERE = "say it by zero_optimization.offload_optimizer or offload_param instead"

Kinds = dict[str, Kind | Mapping[str, Any]]

_CURRICULUM: Kinds = {
    "enabled": BOOL,
    "data_cluster_path": TEXT,
    "curriculum_metrics": MAPPING,
}
_BATCHING: Kinds = {
    "enabled": BOOL,
    "metrics_path": TEXT,
    "lr_scaling_method": TEXT,
    "min_batch_size": INT,
    "max_batch_size": INT.or_null,
    "sequence_picking_order": TEXT,
    "max_tokens": INT,
    "verbose": BOOL,
}
_RANDOM_LTD: Kinds = {
    "enabled": BOOL,
    "total_layer_num": INT,
    "random_ltd_layer_num": INT,
    "random_ltd_layer_id": LIST,
    "model_mask_name": TEXT.or_null,
    "model_type": TEXT,
    "hidden_state_order": TEXT,
    "random_ltd_schedule": MAPPING,
    "micro_batch_size": INT,
    "global_batch_size": INT,
    "layer_token_lr_schedule": MAPPING,
}
_SPLIT: Kinds = {"tp_size": INT, "tp_grain_size": INT, "mpu": ANY, "tp_group": ANY}
_EXPERTS = """
    autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model
    moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm
    route_norm route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend
    comm_num_sm comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups
    score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3
    num_experts_attr top_k_attr has_shared_experts shared_experts_pattern
    shared_experts_gate_pattern expert_activation
""".split()

MONITORS: dict[str, Entry] = {
    "tensorboard": Feature({"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}, LOGS),
    "csv_monitor": Feature({"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}, LOGS),
    "wandb": Feature(
        {"enabled": BOOL, "group": TEXT.or_null, "team": TEXT.or_null, "project": TEXT}, LOGS
    ),
    "comet": Feature(
        {
            "enabled": BOOL,
            "samples_log_interval": INT,
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"),
                TEXT.or_null,
            ),
            "online": BOOL.or_null,
        },
        LOGS,
    ),
}

PRINTED: dict[str, Entry] = {
    "comms_logger": Feature(
        {
            "enabled": BOOL,
            "prof_all": BOOL,
            "prof_ops": LIST,
            "verbose": BOOL,
            "debug": BOOL,
        },
        PRINTS,
        verdict=Verdict.NEEDLESS,
    ),
    "flops_profiler": Feature(
        {
            "enabled": BOOL,
            "recompute_fwd_factor": NUMBER,
            "profile_step": INT,
            "module_depth": INT,
            "top_modules": INT,
            "detailed": BOOL,
            "output_file": TEXT.or_null,
        },
        PRINTS,
        verdict=Verdict.NEEDLESS,
    ),
    "timers": Section(
        {
            "throughput": Section(
                {"enabled": needless(BOOL, PRINTS), "synchronized": needless(BOOL, PRINTS)}
            )
        }
    ),
}

COMPILE = Section(
    {
        "deepcompile": needless(BOOL, COMPILED),
        "autoep_non_moe": refused(BOOL, "there are no ranks that hold experts", False),
        "free_activation": needless(BOOL, "what backward has read is released"),
        "free_activation_threshold": needless(SIZE, "what backward has read is released"),
        "offload_activation": refused(BOOL, "pass options={'offload_activations': …}", False),
        "offload_activation_pin_memory": needless(BOOL, "host memory is pinned on CUDA"),
        "offload_opt_states": refused(BOOL, SAID_ELSEWHERE, False),
        "offload_parameters": refused(BOOL, SAID_ELSEWHERE, False),
        "double_buffer": needless(BOOL, "buckets and their order are decided by cost"),
        "symmetric_memory": needless(BOOL, "it is how bytes travel, not which"),
        "debug_log": needless(BOOL, "`fxzero inspect` shows graphs, and FXZERO_DUMP writes them"),
        **{
            f"sync_{when}_{what}": needless(BOOL, "transfers are waited for where they are read")
            for when in ("before", "after")
            for what in ("reduce", "allgather")
        },
        "keep_int_input_tensors": needless(BOOL, COMPILED),
        "keep_all_input_tensors": needless(BOOL, COMPILED),
        "passes": refused(
            Kind("a list of z1, z3, autosp, autotp", LIST.accepts, nullable=True),
            "a DeepCompile pass is no pass of fxzero's. Drop the list.",
            None,
            [],
            ["z1"],
            ["z3"],
        ),
    }
)

FEATURES: Mapping[str, Entry] = {
    **MONITORS,
    **PRINTED,
    "compile": COMPILE,
    "torch_autocast": Feature(
        {"enabled": BOOL, "dtype": TEXT, "lower_precision_safe_modules": TEXTS},
        "operators choose no dtype of their own. Say bf16 or fp16, or write torch.autocast around "
        "the model",
    ),
    "data_efficiency": Feature(
        {
            "enabled": BOOL,
            "seed": INT,
            "data_sampling": {
                "enabled": BOOL,
                "num_epochs": INT,
                "num_workers": INT,
                "pin_memory": BOOL,
                "curriculum_learning": _CURRICULUM,
                "dynamic_batching": _BATCHING,
            },
            "data_routing": {"enabled": BOOL, "random_ltd": _RANDOM_LTD},
        },
        "which rows are trained on is the loader's, and which tokens the model's",
    ),
    "autotuning": Feature(
        {
            "enabled": BOOL,
            "fast": BOOL,
            **dict.fromkeys(("results_dir", "exps_dir"), TEXT),
            "overwrite": BOOL,
            **dict.fromkeys(("start_profile_step", "end_profile_step", "mp_size"), INT),
            **dict.fromkeys(("metric", "tuner_type"), TEXT),
            **dict.fromkeys(("metric_path", "model_info_path"), TEXT.or_null),
            **dict.fromkeys(("tuner_early_stopping", "tuner_num_trials"), INT),
            "arg_mappings": MAPPING.or_null,
            **dict.fromkeys(
                (
                    "max_train_batch_size",
                    "min_train_batch_size",
                    "max_train_micro_batch_size_per_gpu",
                    "min_train_micro_batch_size_per_gpu",
                    "num_tuning_micro_batch_sizes",
                ),
                INT.or_null,
            ),
            "model_info": {
                "profile": BOOL,
                **dict.fromkeys(("num_params", "hidden_size", "num_layers"), INT.or_null),
            },
        },
        "no trial runs are started. `fxzero estimate` compares stages, memory='auto' finds what "
        "fits",
    ),
    "hybrid_engine": Feature(
        {
            "enabled": BOOL,
            "max_out_tokens": COUNT,
            "inference_tp_size": INT,
            "release_inference_cache": BOOL,
            "pin_parameters": BOOL,
            "tp_gather_partition_size": INT,
            "enable_cuda_graph": BOOL,
        },
        "there is no second engine that generates between steps",
    ),
    "tensor_parallel": Feature(
        {
            "dtype": ANY,
            "autotp_size": INT,
            "tp_overlap_comm": BOOL,
            "vocab_parallel_lm_head": BOOL.or_null,
            "vocab_parallel_ce_backend": one_of("torch", "liger"),
            "tp": _SPLIT,
            "tensor_parallel": _SPLIT,
            "injection_policy_tuple": ANY,
            "partition_config": MAPPING.or_null,
            "preset_model": TEXT.or_null,
            "keep_module_on_host": BOOL,
            "replace_with_kernel_inject": BOOL,
            "kernel_inject": BOOL,
        },
        "layers are not split over ranks. Train without tensor parallelism",
        switch="autotp_size",
        off=(0, 1),
    ),
    "expert_parallel": Feature(
        {"enabled": BOOL, **dict.fromkeys(_EXPERTS, Kind("anything", lambda v: True, True))},
        "experts are not spread over ranks: they are sharded like any parameter",
    ),
}
