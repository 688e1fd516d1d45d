"""The keys of ``zero_optimization``, and of what is offloaded."""

from __future__ import annotations

from dataclasses import replace

from fxzero.integrations.deepspeed.kinds import (
    BOOL,
    INT,
    MAPPING,
    SHARE,
    SIZE,
    TEXT,
    Kind,
    one_of,
    whole,
)
from fxzero.integrations.deepspeed.schema import Key, Section, mapped, needless, refused

STAYS = 'say "none": it stays on the device.'
DEVICE = replace(one_of("none", "cpu", "nvme"), hints={"gpu": STAYS, "cuda": STAYS})
STAGE = Kind("0, 1, 2 or 3", lambda v: type(v) is int and 0 <= v <= 3)
NAMES = Kind(
    "a text, or a list of texts",
    lambda v: isinstance(v, str) or (isinstance(v, list) and all(isinstance(x, str) for x in v)),
)

PINNED = "fxzero's host memory is one arena, pinned on CUDA"
BY_COST = "fxzero decides it by cost"
WIRE = "traffic that is quantised changes what is trained, and fxzero sends what it computes"

OFFLOAD_PARAM = Section(
    {
        "device": mapped(DEVICE, "offload_params", auto=False),
        "nvme_path": mapped(TEXT.or_null, "disk.paths", auto=False),
        "buffer_count": needless(SIZE, "fxzero has its own buffers of disk.chunk_bytes"),
        "buffer_size": needless(SIZE, "fxzero has its own buffers of disk.chunk_bytes"),
        "max_in_cpu": mapped(SIZE, "host_budget"),
        "pin_memory": needless(BOOL, PINNED),
    },
    nullable=True,
)

OFFLOAD_OPTIMIZER = Section(
    {
        "device": mapped(DEVICE, "offload_states", auto=False),
        "nvme_path": mapped(TEXT.or_null, "disk.paths", auto=False),
        "buffer_count": needless(SIZE, "fxzero has its own buffers of disk.chunk_bytes"),
        "pin_memory": needless(BOOL, PINNED),
        "pipeline_read": needless(BOOL, "reads, updates and writes of pieces overlap anyway"),
        "pipeline_write": needless(BOOL, "reads, updates and writes of pieces overlap anyway"),
        "fast_init": needless(BOOL, "nothing is written to disk before it is held there"),
        "ratio": mapped(SHARE, "offload_states.share"),
        "super_offload": needless(BOOL, "updates on the host overlap with compute anyway"),
        "cpuadam_cores_perc": needless(SHARE, "updates on the host use torch's threads"),
    },
    nullable=True,
)

LEAF_MODULE = Section(
    {
        name: needless(NAMES, "gathers are placed in the graph, not by hooks on modules")
        for name in ("classes", "names", "name_suffixes")
    }
)


def _stage3(name: str, key: Key) -> dict[str, Key]:
    """A key of stage 3, under both of its names."""
    other = Key(key.kind, key.verdict, key.reason, key.off, alias=name)
    return {name: key, f"stage3_{name}": other}


ZERO = Section(
    {
        "stage": mapped(STAGE, "shard(zero=…)", auto=False),
        "contiguous_gradients": needless(BOOL, "coalesced collectives copy into no flat buffer"),
        "reduce_scatter": needless(BOOL, "which collective reduces follows from the stage"),
        "reduce_bucket_size": mapped(whole(1), "bucket.cap_bytes"),
        "use_multi_rank_bucket_allreduce": needless(BOOL, "buckets belong to all ranks anyway"),
        "allgather_partitions": needless(BOOL, "parameters are always all-gathered"),
        "allgather_bucket_size": mapped(SIZE, "bucket.cap_bytes"),
        "overlap_comm": mapped(BOOL.or_null, "prefetch"),
        "compute_grad_norm": needless(BOOL, "the norm is computed where something reads it"),
        "load_from_fp32_weights": needless(
            BOOL, "masters are fp32 throughout, and checkpoints hold them"
        ),
        "elastic_checkpoint": needless(BOOL, "fxzero's checkpoints load on any number of ranks"),
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "zenflow": refused(
            MAPPING.or_null,
            "ZenFlow applies gradients late, and so trains otherwise. Drop it; the nearest is "
            "fxzero's offload_states.delay=1.",
            None,
        ),
        "sub_group_size": needless(SIZE, "updates run bucket by bucket"),
        "cpu_offload_param": mapped(BOOL.or_null, "offload_param.device=cpu, its new name"),
        "cpu_offload_use_pin_memory": needless(BOOL.or_null, PINNED),
        "cpu_offload": mapped(BOOL.or_null, "offload_optimizer.device=cpu, its new name"),
        **_stage3("prefetch_bucket_size", mapped(SIZE, "prefetch")),
        **_stage3("param_persistence_threshold", mapped(SIZE, "bucket.min_bytes")),
        **_stage3(
            "model_persistence_threshold",
            needless(SIZE, "what stays gathered is bounded by prefetch's budget"),
        ),
        **_stage3("max_live_parameters", mapped(SIZE, "prefetch.budget_bytes")),
        **_stage3("max_reuse_distance", mapped(SIZE, "prefetch.keep")),
        **_stage3(
            "gather_16bit_weights_on_model_save",
            needless(BOOL, "`fxzero export` writes whole weights of any checkpoint"),
        ),
        **_stage3(
            "module_granularity_threshold",
            needless(INT, "gathers are placed in the graph, not by hooks on modules"),
        ),
        **_stage3(
            "use_all_reduce_for_fetch_params",
            needless(BOOL, "coalesced all-gathers need neither concatenation nor slicing"),
        ),
        **_stage3(
            "allgather_sequential",
            needless(BOOL, "coalesced all-gathers copy into no flat buffer"),
        ),
        "stage3_gather_fp16_weights_on_model_save": needless(
            BOOL, "the old name of stage3_gather_16bit_weights_on_model_save; `fxzero export`"
        ),
        "ignore_unused_parameters": needless(
            BOOL, "which parameters get a gradient is known from the graph"
        ),
        "legacy_stage1": needless(BOOL, "an old way to the same result"),
        "round_robin_gradients": needless(BOOL, "each rank copies its own shards to the host"),
        "parameter_alignment": needless(BOOL, "there are no flat buffers to align in"),
        "zero_hpz_partition_size": refused(
            SIZE,
            "second copies of parameters inside of a node are not held. The nearest is a mesh of "
            "two axes, replicate and shard: from_deepspeed(…).shard(model, mesh=mesh).",
            0,
            1,
        ),
        "zero_quantized_weights": refused(BOOL, WIRE, False),
        "zero_quantized_nontrainable_weights": refused(BOOL, WIRE, False),
        "zero_quantized_gradients": refused(BOOL, WIRE, False),
        "memory_efficient_linear": needless(BOOL, "what backward keeps is decided in the graph"),
        "pipeline_loading_checkpoint": needless(BOOL, "checkpoints are read in parts anyway"),
        "override_module_apply": needless(BOOL, "Module.apply works on sharded models as it is"),
        "log_trace_cache_warnings": needless(
            BOOL, "there is no trace that is found out by running"
        ),
        "enable_sanity_checks": needless(BOOL, "every graph is verified before it runs"),
        "save_muon_momentum_buffer_in_memory": needless(
            BOOL, "of the optimizer Muon alone, which is refused where it is asked for"
        ),
        "leaf_module": LEAF_MODULE,
    }
)

REMOVED_ZERO = {
    "mics_shard_size": "MiCS: use a mesh of two axes, replicate and shard: "
    "from_deepspeed(…).shard(model, mesh=mesh)",
    "mics_hierarchical_params_gather": "MiCS: use a mesh of two axes, replicate and shard",
    "zeropp_loco_param": "LoCo: " + WIRE,
}

REMOVED_ZERO_OFF = {
    "mics_shard_size": (-1, 0),
    "mics_hierarchical_params_gather": (False,),
    "zeropp_loco_param": (None,),
}
