"""The keys of DeepSpeed 0.19 above and beside ``zero_optimization``; `TOP` is the whole table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxzero.integrations.deepspeed.kinds import (
    ANY,
    BOOL,
    COUNT,
    INT,
    MAPPING,
    NUMBER,
    PERIOD,
    SIZE,
    TEXT,
    TEXTS,
    Kind,
    at_least,
    one_of,
)
from fxzero.integrations.deepspeed.schema import (
    Entry,
    Feature,
    Removed,
    Section,
    mapped,
    needless,
    refused,
)
from fxzero.integrations.deepspeed.schema_features import FEATURES
from fxzero.integrations.deepspeed.schema_zero import ZERO

DTYPE = one_of("fp32", "fp16", "bf16", any_case=True)
TORCH_DTYPE = one_of(
    *("fp32", "float32", "float", "torch.float32"),
    *("fp16", "float16", "half", "torch.float16"),
    *("bf16", "bfloat16", "torch.bfloat16"),
    any_case=True,
)
"""Where DeepSpeed takes torch's names too."""
PRINTS = "it only prints; `fxzero trace`, `report` and `estimate` say where time and memory go"
SAVED_ANYWAY = "fxzero.checkpoint has its own format, checked when it is read"
OWN_LOADER = "fxzero makes no data loader: say it to yours"
ONE_MEAN = "gradients are averaged over ranks, and the mean is the same"
CHECKPOINTED = (
    "it is about DeepSpeed's own checkpoint function; fxzero repeats what "
    "torch.utils.checkpoint marks, and more under a memory_budget"
)

BF16 = Section(
    {
        "enabled": mapped(BOOL, "param_dtype"),
        "immediate_grad_update": needless(BOOL, "gradients are reduced as soon as they are there"),
        "check_grad_overflow": mapped(BOOL, "stop_unless_finite"),
        "bf16_master_weights_and_grads": refused(
            BOOL, "masters are as exact as the model is made: fp32, as a rule", False
        ),
        "bf16_optimizer_states": refused(
            BOOL, "optimizer state has the masters' dtype: fp32, as a rule", False
        ),
    }
)

FP16 = Section(
    {
        "enabled": mapped(BOOL, "param_dtype"),
        "auto_cast": needless(BOOL, "floating-point inputs are cast to the compute dtype anyway"),
        "loss_scale": mapped(at_least(0), "Precision.loss_scale"),
        "initial_scale_power": mapped(SIZE, "Precision.initial_scale_power"),
        "loss_scale_window": mapped(COUNT, "Precision.loss_scale_window"),
        "hysteresis": mapped(COUNT, "Precision.hysteresis"),
        "consecutive_hysteresis": mapped(BOOL, "Precision.consecutive_hysteresis"),
        "min_loss_scale": mapped(COUNT, "Precision.min_loss_scale"),
        "fp16_master_weights_and_grads": refused(
            BOOL, "masters are as exact as the model is made: fp32, as a rule", False
        ),
    }
)

OPTIMIZER = Section(
    {
        "type": mapped(TEXT.or_null, "make_optimizer"),
        "params": mapped(MAPPING.or_null, "make_optimizer"),
        "legacy_fusion": needless(BOOL, "updates are fused bucket by bucket"),
    },
    auto=False,
)

SCHEDULER = Section(
    {
        "type": mapped(TEXT.or_null, "make_scheduler"),
        "params": mapped(MAPPING.or_null, "make_scheduler"),
    },
    auto=False,
)

ACTIVATION_CHECKPOINTING = Section(
    {
        "partition_activations": needless(
            BOOL, "it splits over model-parallel ranks, of which there are none"
        ),
        "number_checkpoints": needless(INT.or_null, CHECKPOINTED),
        "contiguous_memory_optimization": needless(BOOL, CHECKPOINTED),
        "synchronize_checkpoint_boundary": needless(BOOL, CHECKPOINTED),
        "profile": needless(BOOL, PRINTS),
        "cpu_checkpointing": mapped(BOOL, "offload_activations.share"),
    },
    auto=False,
)

AIO = Section(
    {
        "block_size": mapped(COUNT, "disk.chunk_bytes"),
        "queue_depth": mapped(COUNT, "disk.depth"),
        "intra_op_parallelism": needless(COUNT, "a lane for each direction, and disk.depth"),
        "thread_count": needless(COUNT, "the old name of intra_op_parallelism"),
        "single_submit": needless(BOOL, "reads and writes are submitted as they come"),
        "overlap_events": needless(BOOL, "reads and writes overlap anyway"),
        "use_gds": needless(BOOL, "bytes go through the host's pinned memory"),
    },
    nullable=True,
    auto=False,
)

CHECKPOINT = Section(
    {
        "tag_validation": needless(
            one_of("ignore", "warn", "fail", any_case=True),
            "ranks always see that they write one checkpoint",
        ),
        "load_universal": refused(
            BOOL, "convert it by `fxzero checkpoint`, which reads DeepSpeed's files", False
        ),
        "use_node_local_storage": refused(
            BOOL, "ranks share the folder of a checkpoint. Name one that all of them reach.", False
        ),
        "checkpoint_serialization": needless(BOOL, SAVED_ANYWAY),
        "parallel_write": Section({"pipeline_stage": needless(BOOL, SAVED_ANYWAY)}),
        "writer": Section(
            {
                "type": needless(
                    one_of("mock", "python", "fast", any_case=True).or_null, SAVED_ANYWAY
                ),
                "decoupled": needless(BOOL, "fxzero.checkpoint writes while training goes on"),
                "io_buffer_size": needless(COUNT, SAVED_ANYWAY),
                "io_buffer_double": needless(BOOL, SAVED_ANYWAY),
                "show_statistics": needless(BOOL, PRINTS),
                "data_parallel": needless(
                    one_of("replica", "socket", "machine", any_case=True).or_null, SAVED_ANYWAY
                ),
                "io_multiplier": needless(COUNT, SAVED_ANYWAY),
            },
            nullable=True,
        ),
    },
    nullable=True,
    auto=False,
)

DATA_TYPES = Section(
    {
        "grad_accum_dtype": needless(
            TORCH_DTYPE.or_null, "gradients are added up in the masters' dtype, which is as exact"
        ),
        "param_dtype": mapped(DTYPE.or_null, "what bf16.enabled and fp16.enabled say"),
        "buffer_dtype": refused(
            DTYPE.or_null, "buffers keep their dtype. Cast them before shard.", None
        ),
        "keep_in_fp32_modules": needless(
            Kind("a list of texts", lambda v: v == "auto" or TEXTS.accepts(v)),
            "buffers keep their dtype",
        ),
    },
    auto=False,
)

PIPELINE_MODULE = "of DeepSpeed's PipelineModule, which is not run here"
PIPELINE = Section(
    {
        "stages": refused(
            Kind("a whole number", lambda v: v == "auto" or INT.accepts(v), nullable=True),
            "stages come from the mesh: shard(model, mesh=…) with an axis 'pipeline'",
            "auto",
            1,
            None,
        ),
        "partition": needless(TEXT, PIPELINE_MODULE),
        "seed_layers": needless(BOOL, PIPELINE_MODULE),
        "activation_checkpoint_interval": needless(INT, PIPELINE_MODULE),
        "pipe_partitioned": needless(BOOL, PIPELINE_MODULE),
        "grad_partitioned": needless(BOOL, PIPELINE_MODULE),
        "use_reentrant": needless(BOOL, PIPELINE_MODULE),
    },
    auto=False,
)

TOP = Section(
    {
        "train_batch_size": mapped(COUNT.or_null, "rows of a step, over all ranks", auto=False),
        "train_micro_batch_size_per_gpu": mapped(
            COUNT.or_null, "rows of a micro-batch, on each rank", auto=False
        ),
        "gradient_accumulation_steps": mapped(COUNT.or_null, "micro_batches", auto=False),
        "managed_gradient_accumulation": refused(
            BOOL, "micro-batches are counted here. Drop it, or accumulate by yourself.", True
        ),
        "gradient_clipping": mapped(at_least(0), "clip_grad_norm", auto=False),
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "fp16": FP16,
        "bf16": BF16,
        "bfloat16": Section(BF16.keys, alias="bf16"),
        "zero_optimization": ZERO,
        "allgather_size": mapped(SIZE, "bucket.cap_bytes, of an old zero_optimization: true"),
        "zero_allow_untested_optimizer": needless(BOOL, "any optimizer's own step() can be run"),
        "zero_force_ds_cpu_optimizer": needless(BOOL, "torch's fused kernels update on the host"),
        "communication_data_type": mapped(DTYPE.or_null, "reduce_dtype", auto=False),
        "seq_parallel_communication_data_type": needless(
            DTYPE.or_null, "there is no sequence parallelism", auto=False
        ),
        "prescale_gradients": needless(BOOL, ONE_MEAN),
        "gradient_predivide_factor": needless(NUMBER, ONE_MEAN),
        "gradient_allreduce_op": refused(
            one_of("mean", "sum", any_case=True),
            "gradients are averaged over ranks. Multiply the loss by their number.",
            "mean",
        ),
        "disable_allgather": refused(BOOL, "updated parameters are always gathered", False),
        "activation_checkpointing": ACTIVATION_CHECKPOINTING,
        "aio": AIO,
        "checkpoint": CHECKPOINT,
        "data_types": DATA_TYPES,
        "pipeline": PIPELINE,
        "steps_per_print": needless(PERIOD.or_null, PRINTS),
        "wall_clock_breakdown": needless(BOOL, PRINTS),
        "memory_breakdown": needless(BOOL, PRINTS),
        "dump_state": needless(BOOL, PRINTS),
        "log_level": needless(TEXT.or_null, "fxzero logs by Python's logging, under 'fxzero'"),
        "disable_python_gc": needless(BOOL, "gc.disable() is yours to call"),
        "vocabulary_size": needless(INT.or_null, "DeepSpeed only warns by it"),
        "dataloader_drop_last": needless(BOOL, OWN_LOADER),
        "use_data_before_expert_parallelism": refused(
            BOOL, "there are no ranks that hold experts", False
        ),
        "sequence_parallel_size": refused(
            COUNT, "all ranks read rows of their own. Train without sequence parallelism.", 1
        ),
        "datastates_ckpt": refused(
            ANY, "fxzero.checkpoint writes while training goes on", False, None
        ),
        "weight_quantization": refused(MAPPING, "weights are trained as they are"),
        **FEATURES,
    },
    auto=False,
)

_GONE = "DeepSpeed removed it in 0.19.7, and fxzero has it neither"

REMOVED: Mapping[str, Removed] = {
    name: Removed((0, 19, 7), f"{_GONE}. {advice}", off)
    for name, advice, off in (
        ("nebula", "Drop it: fxzero.checkpoint writes while training goes on.", (False, None)),
        ("compression_training", "Drop it: weights are trained as they are.", (None,)),
        ("amp", "Say fp16 or bf16.", (False, None)),
        ("quantize_training", "Drop it: weights are trained as they are.", (None,)),
        ("sparse_gradients", "Drop it: gradients of embeddings are reduced dense.", (False, None)),
        ("eigenvalue", "Drop it.", (None,)),
        ("sparse_attention", "Drop it: attention is the model's.", (None,)),
        ("elasticity", "Say the three batch sizes.", (None,)),
        ("graph_harvesting", "Drop it, or set options cuda_graph.", (False, None)),
        ("curriculum_learning", "Drop it: data are the loader's.", (None,)),
        ("progressive_layer_drop", "Drop it.", (None,)),
    )
}


def paths(entries: Mapping[str, Entry | Any] | None = None, start: str = "") -> dict[str, Any]:
    """Every path of the table with its entry, or its kind in a feature."""
    found: dict[str, Any] = {}
    for name, entry in (TOP.keys if entries is None else entries).items():
        path = f"{start}{name}"
        if isinstance(entry, (Section, Feature)):
            found |= paths(entry.keys, f"{path}.")
        elif isinstance(entry, Mapping):
            found |= paths(entry, f"{path}.")
        else:
            found[path] = entry
    return found
