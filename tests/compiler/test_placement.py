"""What leaves the device where that is left to be decided: what is tried, and what is taken."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import step_passes
from fxzero.compiler.placement import LADDER, Rung, Tried, passes_of, rungs_of
from fxzero.inspect import capture
from fxzero.passes import JoinCopies, OffloadParams, OffloadStates
from fxzero.passes.repeat_values import Repetitions
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.settings import Auto
from tests.parity.harness import Pools
from tests.parity.test_offload import Training, same
from tests.stepping import EAGER, chain_of, compiled_step
from tests.tiers import exhaustive

AUTO: dict[str, Any] = {**EAGER, "memory": "auto", "offload_activations": {"min_bytes": 1}}
BUILD = chain_of(8, 128, 128)
"""What is saved takes as much as a parameter: half a megabyte of either, and more state."""


@functools.cache
def tried(budget: str, **throttle: str) -> Compilation:
    """A step that is compiled within a budget."""
    options = {**AUTO, "memory_budget": budget, "throttle": throttle}
    return compiled_step(BUILD, options=options, zero=0, world_size=1)


def taken(compilation: Compilation) -> Tried:
    """The rung that the step stands on."""
    (found,) = (one for one in compilation.rungs if one.taken)
    return found


def peak_bytes(compilation: Compilation) -> int:
    """What the step holds on the device."""
    assert compilation.joint is not None
    return simulate_memory(compilation.joint, fuses=False).peak_bytes


@functools.cache
def least_bytes() -> int:
    """What the error of a budget that is too small names."""
    with pytest.raises(fxzero.ConfigError, match="is the least that was found") as caught:
        tried("1")
    (found,) = re.findall(r"\((\d+) bytes\)", str(caught.value))
    return int(found)


def between(share: float) -> str:
    """A budget between the least and what the step takes without one."""
    whole = peak_bytes(tried("1GiB"))
    return str(int(least_bytes() + share * (whole - least_bytes())))


# -- what can be tried


def test_everything_is_open() -> None:
    """From nothing to all of it."""
    found = rungs_of(step_passes(Config.from_options(AUTO)), frozenset())
    assert [rung for rung, _ in found] == list(LADDER)
    for rung, passes in found:
        shares = {type(one): one.share for one in passes.scheduling if hasattr(one, "share")}
        assert shares.get(OffloadStates, 0.0) == rung.states
        assert shares.get(OffloadParams, 0.0) == rung.params
        joins = [one for one in passes.scheduling if isinstance(one, JoinCopies)]
        assert len(joins) == (rung != Rung())


def test_what_is_said_stays() -> None:
    """Rungs that are alike then are one, and parameters are where state is."""
    options = {**AUTO, "offload_activations": {"share": 0.0}, "offload_states": {"share": 0.5}}
    found = rungs_of(step_passes(Config.from_options(options)), frozenset())
    assert [(rung.states, rung.params) for rung, _ in found] == [(0.0, 0.0), (1.0, 0.5)]
    for _, passes in found:
        (states,) = (one for one in passes.scheduling if isinstance(one, OffloadStates))
        assert states.share == 0.5


def test_one_share_alone() -> None:
    """`memory` need not be ``auto``."""
    options = {**EAGER, "offload_states": {"share": "auto"}}
    config = Config.from_options(options)
    assert config.offload_states.share is Auto.AUTO
    assert config.budget is None
    found = rungs_of(step_passes(config), frozenset())
    assert [rung.states for rung, _ in found] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_what_a_plan_moves() -> None:
    """It says which updates: all of the pass's work is open to it."""
    passes = step_passes(Config.from_options(AUTO))
    ((rung, found),) = rungs_of(passes, frozenset({"prefetch", "offload_states"}))
    assert rung == Rung(states=1.0)
    assert found == passes_of(passes, rung)


def test_shares_that_cannot_be() -> None:
    """A sentence each."""
    with pytest.raises(fxzero.ConfigError, match="'automatic' must be a number or 'auto'"):
        Config.from_options({"offload_states": {"share": "automatic"}})
    with pytest.raises(fxzero.ConfigError, match=r"offload_params.share=1 is more than"):
        Config.from_options({"offload_params": {"share": 1.0}, "offload_activations": {}})
    with pytest.raises(fxzero.ConfigError, match=r"delay=1 and offload_params.share=auto"):
        Config.from_options({"memory": "auto", "offload_states": {"delay": 1}})


# -- what is taken


def test_nothing_moves_that_need_not() -> None:
    """All of it fits."""
    found = tried("1GiB")
    assert taken(found).rung == Rung()
    assert len({one.rung for one in found.rungs}) == 1
    assert found.joint is not None
    assert not [t for t in found.joint.transfers() if t.is_copy]


def test_the_first_rung_that_fits_is_taken_or_a_faster_one() -> None:
    """Budgets from all to the least: each holds, more moves, and none is named that is less."""
    assert least_bytes() < peak_bytes(tried("1GiB")) / 3
    moved = []
    for share in (0.8, 0.4, 0.0):
        budget = between(share)
        found = tried(budget)
        assert peak_bytes(found) <= int(budget) == found.budget_bytes
        assert found.joint is not None
        us = simulate(found.joint, found.context.costs, fuses=False).makespan_us
        assert us == pytest.approx(taken(found).step_us)
        assert us == min(one.step_us for one in found.rungs if one.peak_bytes <= int(budget))
        moved.append(LADDER.index(taken(found).rung))
    assert moved == sorted(moved)
    assert moved[0] < moved[-1]


def test_what_is_repeated_where_copies_are_dear() -> None:
    """Over a slow bus it is faster to compute again."""
    slow = tried(between(0.95), h2d="100KB/s", d2h="100KB/s")
    assert taken(slow).rung.states == 0.0
    assert unsaved_bytes(slow)
    assert not unsaved_bytes(tried(between(0.95)))


def unsaved_bytes(compilation: Compilation) -> int:
    """What is not kept, but repeated."""
    made = compilation.context.decisions.made["recompute"]
    assert isinstance(made, Repetitions)
    return sum(value.saved_bytes for value in made.values)


def test_what_has_time_to_be_moved_is_not_repeated() -> None:
    """Each level of what is repeated decides anew what goes to the host: together they do with less
    repetition than one of them alone."""
    repeated = []
    for share in (0.0, 1.0):
        options = {
            **EAGER,
            "memory_budget": between(0.93),
            "offload_activations": {"share": share, "min_bytes": 1},
        }
        found = compiled_step(BUILD, options=options, zero=0, world_size=1)
        assert peak_bytes(found) <= int(between(0.93))
        repeated.append(unsaved_bytes(found))
    assert repeated[1] < repeated[0]


@pytest.mark.parametrize(("rate", "share"), [("1KB/s", 0.0), ("100GB/s", 1.0)])
def test_without_a_budget_what_costs_nothing_moves(rate: str, share: float) -> None:
    """All state, or none of it."""
    options = {
        **EAGER,
        "offload_states": {"share": "auto"},
        "throttle": {"h2d": rate, "d2h": rate},
    }
    found = compiled_step(BUILD, options=options, zero=0, world_size=1)
    assert taken(found).rung.states == share


def test_an_optimizer_that_cannot_be_moved() -> None:
    """Saved values can: the rest is not tried twice, and said where nothing fits."""
    options = {**AUTO, "memory_budget": "1GiB"}
    found = compiled_step(BUILD, options=options, zero=0, world_size=1, optimizer=torch.optim.RAdam)
    assert taken(found).rung == Rung()
    with pytest.raises(fxzero.ConfigError, match=r"More cannot be moved.*RAdam runs its own step"):
        compiled_step(
            BUILD,
            options={**options, "memory_budget": "1"},
            zero=0,
            world_size=1,
            optimizer=torch.optim.RAdam,
        )


def test_warnings_are_those_of_what_is_taken() -> None:
    """A rung that moves nothing, as its share is less than a bucket, is nobody's concern."""
    options = {**AUTO, "memory_budget": "1GiB", "bucket": {}, "strict": True}
    compiled_step(BUILD, options=options, zero=0, world_size=1)
    options["offload_states"] = {"ahead": True, "share": 0.01}
    with pytest.raises(fxzero.ConfigError, match="moves nothing"):
        compiled_step(BUILD, options=options, zero=0, world_size=1)


def test_a_plan_replays_what_was_taken(tmp_path: Path) -> None:
    """By the same settings, with nothing tried."""
    options = {**AUTO, "memory_budget": between(0.5)}
    settings: dict[str, Any] = {"zero": 0, "world_size": 1, "step": True}
    first = capture(BUILD, options=options, **settings)
    path = tmp_path / "plan.json"
    first.plan(Config.from_options(options)).write(path)
    again = capture(BUILD, options={**options, "plan": str(path)}, **settings)
    texts = []
    for captured in (first, again):
        (compilation,) = captured.compilations
        assert compilation.joint is not None
        number = next(iter(compilation.specs.values())).state.number
        texts.append(compilation.joint.text().replace(f"{number}/", "N/"))
    assert texts[0] == texts[1]
    assert len(again.compilations[0].rungs) < len(first.compilations[0].rungs)


def test_seen() -> None:
    """What was tried, and what it came to."""
    rungs = tried(between(0.5)).rungs
    assert [one.rung for one in rungs][:2] == list(LADDER[:2])
    assert rungs[0].peak_bytes > rungs[-1].peak_bytes
    assert replace(taken(tried("1GiB")), taken=False) in [replace(r, taken=False) for r in rungs]


# -- numbers


def trains_alike(budget: str, **settings: Any) -> bool:
    """Job: three steps within a budget, and without one."""
    plain = Training("gpt", "adamw", 3, EAGER, **settings).run()
    options = {**AUTO, "memory_budget": budget}
    return same(plain, Training("gpt", "adamw", 3, options, **settings).run())


@pytest.mark.parametrize("budget", ["200KiB", *exhaustive("120KiB")])
def test_numbers_are_those_without(ranks: Pools, budget: str) -> None:
    """Bit by bit, on two ranks, which decide alike."""
    rest: dict[str, Any] = {"clip_grad_norm": 0.1, "micro_batches": 2}
    assert all(ranks(2).run(trains_alike, budget, **rest))
