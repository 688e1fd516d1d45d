"""Configurations that transformers and accelerate publish, written out anew."""

from __future__ import annotations

from typing import Any

AUTO = "auto"
SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
PINNED = {"device": "cpu", "pin_memory": True}
DISK = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4}
TRAINED = {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}
BY_TORCH = {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True, "adam_w_mode": True}
WARM = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
BATCHES = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
FP16_AUTO = {"fp16": {"enabled": AUTO, **SCALE}}
BOTH_AUTO = {**FP16_AUTO, "bf16": {"enabled": AUTO}}
FP16 = {"fp16": {"enabled": True, **SCALE}}
ADAMW = {"optimizer": {"type": "AdamW", "params": TRAINED}}
TORCH_ADAMW = {"optimizer": {"type": "AdamW", "params": BY_TORCH}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": WARM}}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {**WARM, "total_num_steps": AUTO}}}
OFFLOADED = {"offload_optimizer": PINNED, "offload_param": PINNED}


def _zero(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {**section, **more}}


SAVE = {"stage3_gather_16bit_weights_on_model_save": True}
SAVE_AUTO = {"stage3_gather_16bit_weights_on_model_save": AUTO}

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "zero2": {
        **BOTH_AUTO,
        **ADAMW,
        **WARMUP,
        **_zero(STAGE2, offload_optimizer=PINNED),
        **BATCHES,
    },
    "zero3": {**BOTH_AUTO, **ADAMW, **WARMUP, **_zero(STAGE3, **OFFLOADED, **SAVE), **BATCHES},
    "zero2_docs": {
        **FP16_AUTO,
        **ADAMW,
        **WARMUP,
        **_zero(STAGE2, offload_optimizer=PINNED, round_robin_gradients=True),
        **BATCHES,
    },
    "infinity_docs": {
        **FP16_AUTO,
        **ADAMW,
        **WARMUP,
        **_zero(
            STAGE3,
            offload_optimizer={**DISK, "fast_init": False},
            offload_param={**DISK, "buffer_size": 1e8, "max_in_cpu": 1e9},
            **SAVE,
        ),
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        **BATCHES,
    },
    "zero1_docs": {**_zero({"stage": 1}), **BATCHES},
    "zero2_manual_docs": {
        "fp16": {"enabled": True, **SCALE},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 3e-5,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
        },
        **_zero(STAGE2, offload_optimizer=PINNED),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_clipping": AUTO,
    },
    "cpu_offload_old": {
        **FP16_AUTO,
        **_zero({"stage": 2, "cpu_offload": True, "overlap_comm": True}),
        **BATCHES,
    },
    "fp32_communication": {
        "bf16": {"enabled": AUTO},
        "communication_data_type": "fp32",
        **_zero(STAGE2),
        **BATCHES,
    },
    "untested_optimizer": {
        **_zero(STAGE2),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **BATCHES,
    },
    "decay_docs": {**_zero(STAGE2), **ADAMW, **DECAY, **BATCHES},
    "fp32_docs": {"fp16": {"enabled": False}, **_zero({"stage": 2}), **BATCHES},
    "inference_docs": {"bf16": {"enabled": AUTO}, **_zero(STAGE3, **SAVE), **BATCHES},
}

ACCELERATE: dict[str, dict[str, Any]] = {
    "stage1": {
        **FP16,
        **TORCH_ADAMW,
        **DECAY,
        **_zero(STAGE2, stage=1, reduce_bucket_size=AUTO),
        **BATCHES,
    },
    "stage2": {**FP16, **TORCH_ADAMW, **DECAY, **_zero(STAGE2, reduce_bucket_size=AUTO), **BATCHES},
    "stage2_offload": {
        **FP16,
        **TORCH_ADAMW,
        **DECAY,
        **_zero(STAGE2, reduce_bucket_size=AUTO, offload_optimizer=PINNED),
        **BATCHES,
    },
    "stage3": {**FP16, **ADAMW, **DECAY, **_zero(STAGE3, **SAVE_AUTO), **BATCHES},
    "stage3_offload": {
        **FP16,
        **ADAMW,
        **DECAY,
        **_zero(STAGE3, **OFFLOADED, **SAVE_AUTO),
        **BATCHES,
    },
    "tests_zero2": {
        **BOTH_AUTO,
        **TORCH_ADAMW,
        **WARMUP,
        **_zero(STAGE2, offload_optimizer=PINNED),
        **BATCHES,
    },
    "tests_zero3": {
        **BOTH_AUTO,
        **TORCH_ADAMW,
        **WARMUP,
        **_zero(
            STAGE3,
            offload_optimizer={**PINNED, "nvme_path": "/nvme"},
            offload_param={**PINNED, "nvme_path": "/nvme"},
            **SAVE_AUTO,
        ),
        **BATCHES,
    },
    "tests_zero2_model_only": {
        **BOTH_AUTO,
        **_zero(STAGE2, offload_optimizer=PINNED),
        "train_batch_size": 2,
        "gradient_clipping": AUTO,
    },
    "tests_zero3_model_only": {
        **BOTH_AUTO,
        **_zero(STAGE3, **OFFLOADED, **SAVE_AUTO),
        "train_batch_size": 2,
        "gradient_clipping": AUTO,
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accelerate zero++": (
        {
            **_zero(
                {
                    "stage": 3,
                    "reduce_bucket_size": AUTO,
                    "zero_quantized_weights": True,
                    "zero_hpz_partition_size": 8,
                    "zero_quantized_gradients": True,
                    "contiguous_gradients": True,
                    "overlap_comm": True,
                }
            ),
            **BATCHES,
        },
        "zero_optimization.zero_hpz_partition_size = 8",
    ),
    "accelerate sequence parallelism": (
        {
            "bf16": {"enabled": True},
            **_zero({"stage": 3}),
            **BATCHES,
            "seq_parallel_communication_data_type": "bf16",
            "sequence_parallel_size": 2,
        },
        "sequence_parallel_size = 2",
    ),
    "transformers apex": ({"amp": {"enabled": AUTO, "opt_level": AUTO}, **BATCHES}, "amp = "),
    "transformers aio in the wrong place": (
        {**_zero({"stage": 3, "aio": {"block_size": 262144}}), **BATCHES},
        "aio stands at the top",
    ),
    "transformers reduce_bucket_size of nothing": (
        {**_zero({"stage": 3, "reduce_bucket_size": 0}), **BATCHES},
        "must be a whole number of 1 or more",
    ),
}
