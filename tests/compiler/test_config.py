"""Settings: typed, and misspellings are errors that name the right word."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fxzero import Config, ConfigError, FxZeroWarning
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.pipelines import loop_passes
from fxzero.passes import Bucket, LowerRegions, Prefetch
from fxzero.passes.lower_regions import RegionBackend
from fxzero.settings import build


def test_defaults() -> None:
    """No options, an empty mapping and a default Config are one thing."""
    assert Config.from_options(None) == Config.from_options({}) == Config()


def test_nested_settings() -> None:
    """A pass is its own settings."""
    config = Config.from_options(
        {"prefetch": {"distance": 3}, "bucket": {"cap_bytes": 7}, "strict": True}
    )
    assert config.prefetch == Prefetch(distance=3)
    assert config.bucket == Bucket(cap_bytes=7)
    assert config.strict
    assert config.recompute == Config().recompute


def test_ready_made_objects_are_taken() -> None:
    """A Config, a pass, an enum's member."""
    config = Config(prefetch=Prefetch(2))
    assert Config.from_options(config) is config
    assert Config.from_options({"prefetch": Prefetch(2)}) == config
    eager = Config.from_options({"lower_regions": {"backend": RegionBackend.EAGER}})
    assert eager == Config.from_options({"lower_regions": {"backend": "eager"}})
    assert eager.lower_regions == LowerRegions(RegionBackend.EAGER)


KNOWN = (
    "bucket, cost, cuda_graph, disk, dump, gather_ahead, host_budget, keep_text, lower_kernels, "
    "lower_regions, memory, memory_budget, offload_activations, offload_params, offload_states, "
    "order_micro_batches, plan, prefetch, recompute, slab, stop_unless_finite, strict, throttle, "
    "tile_linear"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefech": {}},
            f"options has no setting 'prefech': did you mean 'prefetch'? Known: {KNOWN}",
        ),
        (
            {"prefetch": {"distanse": 1}},
            (
                "options.prefetch has no setting 'distanse': did you mean 'distance'? Known: "
                "budget_bytes, distance, keep, reduce_distance"
            ),
        ),
        (
            {"zzz": 1},
            f"options has no setting 'zzz': Known: {KNOWN}",
        ),
        (
            {"lower_regions": {"backend": "inductr"}},
            (
                "options.lower_regions.backend='inductr': did you mean 'inductor'? Known: eager, "
                "inductor"
            ),
        ),
        ({"prefetch": 3}, "options.prefetch takes a mapping of settings, not 3"),
        ({"strict": 1}, "options.strict=1 must be true or false"),
        ({"strict": "yes"}, "options.strict='yes' must be true or false"),
        ({"prefetch": {"distance": 1.5}}, "options.prefetch.distance=1.5 must be a whole number"),
        ({"prefetch": {"distance": True}}, "options.prefetch.distance=True must be a whole number"),
        ({"prefetch": {"distance": "2"}}, "options.prefetch.distance='2' must be a whole number"),
        ({"bucket": {"min_bytes": -1}}, "bucket.min_bytes=-1 must be 0 or more"),
        ({"prefetch": {"budget_bytes": 0}}, "prefetch.budget_bytes=0 must be positive"),
        (
            {"cost": {"model": "mesured"}},
            "options.cost.model='mesured': did you mean 'measured'? Known: analytic, measured",
        ),
        (
            {"cost": {"cluster": "dgx_h10"}},
            (
                "cost.cluster='dgx_h10': did you mean 'dgx_h100'? Known: dgx2, dgx_a100, "
                "dgx_h100, h200, laptop, pair_1gbit; or a file that ends in .yaml"
            ),
        ),
        ({"prefetch": {"distance": -1}}, "prefetch.distance=-1 must be 0 or more"),
        ({"bucket": {"cap_bytes": 0}}, "bucket.cap_bytes=0 must be positive"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    """What was asked, where, and what is right."""
    with pytest.raises(ConfigError) as caught:
        Config.from_options(options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "more",
    [
        {"memory": "states_host"},
        {"memory": "infinity"},
        {"offload_states": {"share": 0.5}},
        {"offload_activations": {"share": 1.0}},
    ],
    ids=str,
)
def test_a_cuda_graph_replays_nothing_of_the_host(more: dict[str, Any]) -> None:
    """What is held there is copied, compared and updated by it."""
    Config.from_options({"cuda_graph": True})
    with pytest.raises(ConfigError, match=r"cuda_graph=True and offload_\w+.share=.*Leave out one"):
        Config.from_options({"cuda_graph": True, **more})


@pytest.mark.parametrize("max_nodes", [-1, -100])
def test_recompute_refuses_negative_numbers(max_nodes: int) -> None:
    """As the other passes do; 0 is the way to say none."""
    with pytest.raises(ConfigError, match=r"recompute\.max_nodes"):
        Config.from_options({"recompute": {"max_nodes": max_nodes}})


@dataclasses.dataclass(frozen=True)
class _Example:
    ratio: float = 0.5
    limit: int | None = 3


def test_optional_and_fractional_settings() -> None:
    """None where a setting may have none; a whole number is a number; true is not."""
    assert build(_Example, {"limit": None, "ratio": 1}, "x") == _Example(ratio=1, limit=None)
    with pytest.raises(ConfigError, match=r"x\.limit='3' must be a whole number"):
        build(_Example, {"limit": "3"}, "x")
    with pytest.raises(ConfigError, match=r"x\.ratio='a' must be a number"):
        build(_Example, {"ratio": "a"}, "x")
    with pytest.raises(ConfigError, match=r"x\.ratio=True must be a number"):
        build(_Example, {"ratio": True}, "x")


def test_what_cannot_take_effect_warns_and_is_an_error_if_strict() -> None:
    """A pass notes it in the context; the compilation speaks once."""
    lenient = Compilation(Config(), loop_passes(Config()), plain={})
    lenient.context.warnings.append("a setting did nothing")
    with pytest.warns(FxZeroWarning, match="^a setting did nothing$"):
        lenient.warn()
    lenient.warn()
    config = Config(strict=True)
    strict = Compilation(config, loop_passes(config), plain={})
    strict.context.warnings.append("a setting did nothing")
    with pytest.raises(ConfigError, match=r"a setting did nothing \(an error because strict=True"):
        strict.warn()


def test_settings_cannot_change_later() -> None:
    """They are part of what was compiled."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().strict = True  # type: ignore[misc]
