"""Megatron-LM's published step times on A100s, predicted, with one constant fitted.

    python examples/benchmarks/megatron_times.py --json FILE

Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5: GPTs of 22 B to 1 T parameters on 8 to
512 GPUs of the cluster `dgx_a100`, tensor and pipeline parallel, with all layers repeated in
backward, and with sequence parallelism and attention's core repeated alone. The constant is the
share of the peak that large matrix products reach. Each step time is predicted with the one that
fits the seven others best: least squares of relative errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy.optimize import minimize_scalar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks.megatron import Shape
from examples.benchmarks.megatron_step import Case, Step, step_of
from examples.benchmarks.report import machine, table, write_json
from fxzero.cost.cluster import ClusterSpec, load_cluster

CLUSTER = "dgx_a100"
MOST, MEAN = 0.09, 0.05
"""Relative errors that are asked for: the largest, and the mean."""
_KNOTS = (0.6, 0.7, 0.85)
"""Shares of the peak at which steps are predicted for the fit: between them a step's time is all
but linear in the inverse."""


def _cases() -> tuple[Case, ...]:
    rows = {  # hidden, heads, layers, micro-batch; pipeline, chunks, micro-batches; full, selective
        "22B": ((6144, 64, 48, 4), (1, 1, 1), (1.42, 1.10)),
        "175B": ((12288, 96, 96, 1), (8, 3, 64), (18.13, 13.75)),
        "530B": ((20480, 128, 105, 1), (35, 3, 280), (49.05, 37.83)),
        "1T": ((25600, 160, 128, 1), (64, 1, 512), (94.42, 71.49)),
    }
    return tuple(
        Case(name, Shape(*sizes, sequence_parallel=in_parts), *places, published_s)
        for name, (sizes, places, seconds) in rows.items()
        for in_parts, published_s in zip((False, True), seconds, strict=True)
    )


CASES = _cases()


def cluster_at(efficiency: float) -> ClusterSpec:
    """The cluster, large matrix products at a share of the peak."""
    found = load_cluster(CLUSTER)
    return replace(found, device=replace(found.device, flops_efficiency=efficiency))


@dataclass(frozen=True)
class Prediction:
    """A step time, by a constant that it had no part in."""

    case: Case
    efficiency: float
    step: Step
    without: str = ""
    """What of the step is left out."""

    @property
    def seconds(self) -> float:
        """Of the step, or of what is left of it."""
        return seconds_of(self.step, self.without)

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.seconds / self.case.published_s - 1

    def to_json(self) -> dict[str, Any]:
        """A row of the figures."""
        return {
            "model": self.case.name,
            "recompute": recompute(self.case),
            "gpus": self.case.gpus,
            "published_s": self.case.published_s,
            "predicted_s": self.seconds,
            "error": self.error,
            "flops_efficiency": self.efficiency,
            **asdict(self.step),
        }


def recompute(case: Case) -> str:
    """What is repeated in backward."""
    return "core, sequence parallel" if case.shape.sequence_parallel else "layers"


def seconds_of(step: Step, without: str = "") -> float:
    """What a step takes, or would if one of its parts took no time."""
    return step.seconds - (getattr(step, without) if without else 0.0)


def steps_at_knots() -> list[list[Step]]:
    """By case, its step at each of the knots."""
    return [[step_of(case, cluster_at(knot)) for knot in _KNOTS] for case in CASES]


def predictions(steps: Sequence[Sequence[Step]], without: str = "") -> list[Prediction]:
    """Leave each step time out of the fit that predicts it.

    Args:
        steps: of `steps_at_knots`.
        without: a part of steps that shall take no time: what is asked of a model that lacks it.
    """
    curves = [[seconds_of(step, without) for step in row] for row in steps]
    found = []
    for left_out, case in enumerate(CASES):
        others = [i for i in range(len(CASES)) if i != left_out]
        efficiency = fitted([curves[i] for i in others], [CASES[i].published_s for i in others])
        step = step_of(case, cluster_at(efficiency))
        found.append(Prediction(case, efficiency, step, without))
    return found


def fitted(curves: Sequence[Sequence[float]], published_s: Sequence[float]) -> float:
    """The share of the peak at which the squares of relative errors add up to least.

    Args:
        curves: by step, its time at each of the knots.
    """

    def misfit(efficiency: float) -> float:
        at = [np.interp(-1 / efficiency, [-1 / knot for knot in _KNOTS], each) for each in curves]
        return float(sum((a / b - 1) ** 2 for a, b in zip(at, published_s, strict=True)))

    bounds = (_KNOTS[0], _KNOTS[-1])
    return float(minimize_scalar(misfit, bounds=bounds, method="bounded").x)


def errors(found: Sequence[Prediction]) -> tuple[float, float]:
    """The largest and the mean relative error."""
    sizes = [abs(prediction.error) for prediction in found]
    return max(sizes), sum(sizes) / len(sizes)


def render(found: Sequence[Prediction]) -> str:
    """Show predictions as a table, with what each step is made of."""
    header = ["model", "repeated", "published s", "predicted", "error", "of peak"]
    header += ["layers s", "again", "ends", "idle", "update"]
    lines = [
        [
            p.case.name,
            recompute(p.case),
            f"{p.case.published_s:.2f}",
            f"{p.seconds:.2f}",
            f"{p.error:+.1%}",
            f"{p.efficiency:.3f}",
            *(f"{part:.2f}" for part in (p.step.layers_s, p.step.repeated_s, p.step.ends_s)),
            *(f"{part:.2f}" for part in (p.step.idle_s, p.step.update_s)),
        ]
        for p in found
    ]
    return table(header, lines)


def render_errors(found: Sequence[Prediction]) -> str:
    """Say how far off they are."""
    most, mean = errors(found)
    return f"largest error {most:.1%}, mean {mean:.1%}"


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Predict eight published step times, each with a constant fitted to the seven others."""
    facts = machine("megatron_times.py", "cpu")
    steps = steps_at_knots()
    found = predictions(steps)
    print(f"{render(found)}\n{render_errors(found)}")
    lacking = {part: predictions(steps, part) for part in ("idle_s", "repeated_s", "update_s")}
    for part, others in lacking.items():
        print(f"without {part}, and the constant fitted again: {render_errors(others)}")
    if json_path is not None:
        facts |= {
            "cluster": CLUSTER,
            "published": "arXiv 2205.05198, tables 3 and 5",
            "fitted": "device.flops_efficiency, on the seven other steps, least squares of "
            "relative errors",
            "largest_and_mean_error": errors(found),
            "without": {part: errors(others) for part, others in lacking.items()},
            "parts": "of one micro-batch on one GPU, a layer's with the collectives that it waits "
            "for; steps' are those of the pipeline's rank that has most to do",
        }
        write_json(json_path, facts, [prediction.to_json() for prediction in found])


if __name__ == "__main__":
    typer.run(main)
