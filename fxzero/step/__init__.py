"""The second front door: the whole training step as one graph."""

from fxzero.step.train_step import StepOutput, TrainStep, compile_step

__all__ = ["StepOutput", "TrainStep", "compile_step"]
