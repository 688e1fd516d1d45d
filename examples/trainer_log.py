"""The log of `examples/logs.py` for transformers' Trainer: what a run takes, beside what it learns.

    trainer = Trainer(…, callbacks=[trainer_log(Path("outputs/run"), tokens_per_step=8192)])

Where the Trainer logs, by its own ``logging_steps``, rank 0 writes loss, rate and norm with time,
memory and communication to metrics.jsonl, TensorBoard, and wandb where that is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.logs import StepNumbers, open_log
from examples.meter import Meter

if TYPE_CHECKING:
    from transformers import TrainerCallback


def trainer_log(
    output: Path, *, tokens_per_step: int | None = None, wandb: bool = False
) -> TrainerCallback:
    """A callback for Trainer; transformers is imported here.

    Args:
        output: the folder to write to.
        tokens_per_step: of all ranks, if they are to be counted.
        wandb: also write an offline run of wandb.
    """
    from transformers import TrainerCallback

    class TrainerLog(TrainerCallback):
        """Open from the beginning of training to its end."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            self.log = open_log(output, state.max_steps, args.to_sanitized_dict(), wandb)
            self.log.__enter__()
            self.log.go_on_after(state.global_step)
            samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            self.meter = Meter(
                model,
                samples_per_step=samples,
                tokens_per_step=tokens_per_step,
                step=state.global_step,
            )

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
        ) -> None:
            step = state.global_step
            if "loss" not in logs:  # an evaluation's, or the summary at the end
                self.log.record(step, **{k: v for k, v in logs.items() if isinstance(v, float)})
                return
            rate, norm = logs.get("learning_rate", 0.0), logs.get("grad_norm", float("nan"))
            numbers = StepNumbers(
                loss=logs["loss"], lr=rate, grad_norm=float(norm), measured=self.meter.read(step)
            )
            self.log.step(step, numbers)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.meter.restart(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.log.__exit__()

    return TrainerLog()
