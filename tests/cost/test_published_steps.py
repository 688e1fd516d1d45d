"""Step times that others have published, predicted from graphs and their machine's figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from examples.benchmarks.megatron_step import Case, micro_step, step_of
from examples.benchmarks.megatron_times import (
    CASES,
    MEAN,
    MOST,
    Prediction,
    cluster_at,
    errors,
    predictions,
    render,
    steps_at_knots,
)
from fxzero.cost import AnalyticCosts
from fxzero.cost.flops import model_flops
from fxzero.cost.model import TransferCost
from fxzero.graph.stamps import stamp_of
from fxzero.transfer import Transfer, TransferKind


@pytest.mark.exhaustive
@pytest.mark.slow
def test_megatrons_step_times_come_out() -> None:
    """Within 9 % each and 5 % on average, each by a constant that was fitted without it. With one
    that is off by a tenth they do not, nor where nothing is repeated in backward."""
    steps = steps_at_knots()
    found = predictions(steps)
    most, mean = errors(found)
    assert most <= MOST, render(found)
    assert mean <= MEAN, render(found)
    for prediction in found:
        check_parts(prediction)
    for factor in (0.9, 1.1):
        moved = [replace(p, step=step_of(p.case, cluster_at(p.efficiency * factor))) for p in found]
        assert misses(moved)
    assert misses(predictions(steps, "repeated_s"))


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (CASES[0], {"all_reduce": 4}),
        (CASES[1], {"all_gather": 6, "reduce_scatter": 4}),
    ],
    ids=["tensor parallel", "sequence parallel"],
)
def test_a_layer_computes_and_sends_what_the_papers_say(case: Case, kinds: dict[str, int]) -> None:
    """FLOPs by appendix A of arXiv 2205.05198; collectives by its section 4.2.2, the gathers of
    what is kept in parts among them."""
    graph, shape = micro_step(case.shape), case.shape
    tokens = shape.seq_len * shape.micro_batch
    layer = 24 * tokens * shape.hidden**2 + 4 * tokens * shape.seq_len * shape.hidden
    logits = 2 * tokens * shape.hidden * shape.vocab_size
    assert model_flops(graph) == 3 * (layer + logits) / shape.tensor_parallel
    own = [t.record for t in graph.transfers() if stamp_of(t.launch).layer == "layers.0"]
    assert Counter(record.kind.value for record in own) == kinds
    assert {record.full_bytes for record in own} == {2 * tokens * shape.hidden}


def check_parts(prediction: Prediction) -> None:
    """Whatever a step is made of takes time, and only a pipeline has idle time."""
    step = prediction.step
    assert min(step.layers_s, step.repeated_s, step.ends_s, step.update_s) > 0
    if prediction.case.pipeline == 1:
        assert step.idle_s == pytest.approx(0, abs=1e-9)
    else:
        assert step.idle_s > 0.02 * step.seconds


def misses(found: list[Prediction]) -> bool:
    """Whether both bounds are missed."""
    most, mean = errors(found)
    return most > MOST and mean > MEAN


@pytest.mark.slow
@pytest.mark.exhaustive
def test_steps_of_ranks_that_say_nothing_to_each_other_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the constant is fitted then: a layer's collectives take no time, and messages between
    stages do."""
    priced = AnalyticCosts.transfer

    def transfer(self: AnalyticCosts, record: Transfer) -> TransferCost:
        is_message = record.kind is TransferKind.SEND
        return priced(self, record) if is_message else TransferCost(0.0)

    monkeypatch.setattr(AnalyticCosts, "transfer", transfer)
    assert misses(predictions(steps_at_knots()))
