"""Every node of a step has an answer, and answers have the numbers of the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxzero import ConfigError
from fxzero.inspect import Analysis, capture
from fxzero.inspect.explain import Explanation, explain
from fxzero.inspect.targets import load

ON: dict[str, Any] = {"cost": {"cluster": "dgx_h100"}}


@pytest.fixture(scope="module")
def analyses() -> dict[str, Analysis]:
    """A GPT's step at stage 3, in both doors, and with several micro-batches."""
    build = load("examples.models:gpt_nano").build
    many: dict[str, dict[str, Any]] = {
        "loop": {},
        "step": {"step": True, "micro_batches": 2},
        "by layer": {"options": {**ON, "bucket": {"min_bytes": 0}, "prefetch": {"keep": False}}},
    }
    return {
        name: Analysis.of(
            capture(build, zero=3, world_size=8, **{"options": ON, **settings}), detail=True
        )
        for name, settings in many.items()
    }


def one(analysis: Analysis, what: str) -> Explanation:
    """The only explanation of a name."""
    (found,) = explain(analysis, what)
    return found


def numbers(found: Explanation, question: str) -> dict[str, Any]:
    """Those of one answer."""
    (answer,) = (a for a in found.answers if a.question == question)
    return answer.numbers


@pytest.mark.parametrize("door", ["loop", "step", "by layer"])
def test_every_node_has_an_answer(analyses: dict[str, Analysis], door: str) -> None:
    """Of every role and lane, in the outline and in pieces, with its line and no hole."""
    (detail,) = analyses[door].details
    assert len(detail.nodes) > 600
    for row in detail.nodes:
        for found in explain(analyses[door], row.name):
            assert found.answers, row
            for answer in found.answers:
                assert answer.text.endswith("."), answer
                assert "None" not in answer.text, answer
                assert "{" not in answer.text, answer


@pytest.mark.parametrize("door", ["loop", "step"])
def test_every_pass_parameter_bucket_and_module(analyses: dict[str, Analysis], door: str) -> None:
    """By name."""
    analysis = analyses[door]
    for row in analysis.passes:
        assert explain(analysis, row.name)[0].kind == "pass"
    for transfer in analysis.transfers:
        if transfer.bucket:
            assert one(analysis, transfer.bucket).kind == "bucket"
        for param in transfer.params:
            assert one(analysis, param).kind == "parameter"
    assert [found.name for found in explain(analysis, "blocks.*.mlp")] == [
        f"blocks.{i}.mlp" for i in range(4)
    ]


def test_a_transfer_says_what_the_schedule_says(analyses: dict[str, Analysis]) -> None:
    """When it is on the link, what waits for it, and what the next best place would cost."""
    analysis = analyses["loop"]
    (detail,) = analysis.details
    launches = {row.bucket: row for row in detail.nodes if row.role == "launch" and row.bucket}
    waits = {row.bucket: row.name for row in detail.nodes if row.role == "wait"}
    spans = {span.node: span for span in detail.spans}
    stalls = {stall.node: stall.us for stall in detail.stalls}
    assert sum(stalls.values()) == pytest.approx(analysis.schedules[0].exposed_us, abs=0.01)
    for bucket, launch in launches.items():
        found = numbers(one(analysis, bucket), "Is it hidden?")
        span = spans[launch.name]
        assert (found["start_us"], found["us"]) == (span.start_us, span.us)
        assert found["stall_us"] == stalls.get(waits[bucket], 0.0)
        assert found["hidden_us"] == pytest.approx(span.us - found["stall_us"], abs=0.01)
        assert found["next_best_stall_us"] == span.us


def test_a_gather_that_is_spared(analyses: dict[str, Analysis]) -> None:
    """It says what gathering again would take, and what keeping holds."""
    analysis = analyses["step"]
    kept = analysis.details[0].decisions["prefetch"]["kept"]
    assert kept
    for name in kept:
        found = numbers(one(analysis, name), "Does it travel?")
        assert found["spared_us"] > 0
        assert found["held_bytes"] > 0
    (found,) = (a for a in one(analysis, "blocks.1.mlp.up.weight").answers if "again" in a.question)
    assert set(found.numbers["spared"]) <= set(kept)


def test_a_gather_by_layer_is_released(analyses: dict[str, Analysis]) -> None:
    """Where nothing is kept, each is gathered in both phases, and released between."""
    analysis = analyses["by layer"]
    found = one(analysis, "blocks.1.mlp.up.weight")
    asked = [answer.question for answer in found.answers]
    assert "Why gather in forward?" in asked
    assert "Why gather in backward?" in asked
    assert "Why reduce in backward?" in asked
    assert "Is it gathered again?" not in asked


def test_what_is_kept_and_what_is_repeated(analyses: dict[str, Analysis]) -> None:
    """Of a forward value: whether backward holds it, and what the other choice would cost."""
    analysis = analyses["loop"]
    (detail,) = analysis.details
    repeated = {row.again for row in detail.nodes if row.again}
    assert repeated
    for row in detail.nodes:
        if not row.again:
            continue
        found = [
            a for e in explain(analysis, row.name) for a in e.answers if a.numbers.get("again")
        ]
        assert any(answer.numbers["again"] == row.again for answer in found)
    kept = {
        row.name: row.num_bytes
        for row in detail.nodes
        if row.phase == "forward"
        and row.lane == "compute"
        and not row.piece
        and row.num_bytes
        and any(row.name in r.inputs and r.phase == "backward" for r in detail.nodes if not r.piece)
        and row.role in ("compute", "part")
    }
    assert kept
    for name, num_bytes in kept.items():
        found_numbers = numbers(one(analysis, name), "Is its value kept for backward?")
        if "kept" in found_numbers:
            assert found_numbers["num_bytes"] == num_bytes


def test_what_would_change_it(analyses: dict[str, Analysis]) -> None:
    """Options that there are, as they stand."""
    known = analyses["loop"].settings
    for what in ("gather.forward.0", "reduce.backward.0", "blocks.1.mlp", "tokens.weight"):
        settings = one(analyses["loop"], what).settings
        assert settings
        for setting in settings:
            value: Any = known
            for word in setting.option.split("."):
                assert word in value, setting
                value = value[word]


def test_a_name_that_there_is_not(analyses: dict[str, Analysis]) -> None:
    """The nearest are said, and not all of a thousand."""
    with pytest.raises(ConfigError, match=r"is no pass, bucket.*did you mean 'prefetch'") as raised:
        explain(analyses["loop"], "prefetchh")
    assert len(str(raised.value)) < 400


class Names(nn.Module):
    """Two names of one parameter, and a layer that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, T) to a loss."""
        return self.head(self.embed(ids)).logsumexp(-1).mean()


def test_a_parameters_other_name_and_what_is_not_read() -> None:
    def build() -> Any:
        return Names(), torch.zeros(2, 4, dtype=torch.long)

    found = Analysis.of(capture(build, zero=3, world_size=2, options=ON), detail=True)
    assert one(found, "head.weight") == one(found, "embed.weight")
    for name in ("unused.weight", "unused"):
        with pytest.raises(ConfigError, match="this step reads no parameter of it"):
            explain(found, name)
    alone = Analysis.of(capture(build, zero=3, world_size=1, options=ON), detail=True)
    with pytest.raises(ConfigError, match="on one rank nothing is gathered"):
        explain(alone, "embed.weight")
