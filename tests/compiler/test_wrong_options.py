"""Wrong options, 150 and more: each is a ConfigError in a sentence, none is accepted in silence.

All go through `Config.from_options`; a sample of them through both front doors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxzero
from fxzero import Config, ConfigError
from fxzero.cost.settings import CostKind, CostSettings
from fxzero.passes import Bucket, LowerKernels, LowerRegions, Prefetch, Recompute
from fxzero.passes.lower_regions import RegionBackend

HUGE = 1 << 64
TENSOR = torch.ones(())


class Nothing:
    """A value that means nothing to any option."""

    def __repr__(self) -> str:
        """Without an address: pytest names tests by it."""
        return "Nothing()"


OBJECT = Nothing()

WHOLE_NUMBERS = (
    "prefetch.reduce_distance",
    "recompute.max_nodes",
    "lower_kernels.min_logits_bytes",
)
OPTIONAL_WHOLE_NUMBERS = (
    "bucket.cap_bytes",
    "bucket.min_bytes",
    "prefetch.distance",
    "prefetch.budget_bytes",
)
FLAGS = (
    *("strict", "keep_text", "stop_unless_finite", "cuda_graph"),
    *("prefetch.keep", "gather_ahead.enabled", "lower_kernels.enabled", "slab.enabled"),
)
TEXTS = ("lower_kernels.force", "lower_kernels.table", "cost.cluster")
CHOICES = ("lower_regions.backend", "cost.model")
GROUPS = (
    *("cost", "lower_kernels", "recompute", "bucket"),
    *("prefetch", "gather_ahead", "lower_regions", "slab"),
)

NO_WHOLE_NUMBER = ("2", 1.0, math.nan, math.inf, True, [2], TENSOR, HUGE, -HUGE, np.float64(2))
NO_FLAG = (0, 1, "true", "yes", None, [], 1.0)
NO_TEXT = (3, True, ["rms_norm"], {"rms_norm"}, b"laptop", Path("laptop"))
NO_CHOICE = ("", "Eager", "none", 3, None, True, [], {}, OBJECT)
NO_GROUP = (3, "x", None, [], [("distance", 2)], True)


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"prefetch": {"distance": value}}``."""
    *groups, name = path.split(".")
    found = {name: value}
    for group in groups:
        found = {group: found}
    return found


TYPES: list[tuple[Any, str]] = [
    *((nested(p, v), p) for p in WHOLE_NUMBERS for v in (*NO_WHOLE_NUMBER, None)),
    *((nested(p, v), p) for p in OPTIONAL_WHOLE_NUMBERS for v in NO_WHOLE_NUMBER),
    *((nested(p, v), p) for p in FLAGS for v in NO_FLAG),
    *((nested(p, v), p) for p in TEXTS for v in NO_TEXT),
    *((nested(p, v), p) for p in CHOICES for v in NO_CHOICE),
    *((nested(p, v), p) for p in GROUPS for v in NO_GROUP),
]

OTHERS: list[tuple[Any, str]] = [
    # no mapping at all
    ([], "options takes a mapping of settings, not []"),
    ([("strict", True)], "options takes a mapping"),
    ("", "options takes a mapping"),
    ("strict", "options takes a mapping"),
    (0, "options takes a mapping"),
    (False, "options takes a mapping"),
    ({"strict"}, "options takes a mapping"),
    (Prefetch(), "options takes a mapping"),
    (Config, "options takes a mapping"),
    # names
    ({"prefech": {}}, "did you mean 'prefetch'?"),
    ({"Prefetch": {}}, "did you mean 'prefetch'?"),
    ({"prefetch.distance": 2}, "did you mean 'prefetch'?"),
    ({"": 1}, "options has no setting ''"),
    ({1: 2}, "options has no setting 1"),
    ({None: 2}, "options has no setting None"),
    ({("a", "b"): 2}, "options has no setting ('a', 'b')"),
    ({"mode": "max-autotune"}, "options has no setting 'mode'"),
    ({"triton.cudagraphs": True}, "options has no setting 'triton.cudagraphs'"),
    ({"max_autotune": True}, "options has no setting 'max_autotune'"),
    ({"shard_params": {}}, "options has no setting 'shard_params'"),
    ({"update": {}}, "options has no setting 'update'"),
    ({"from_options": 1}, "options has no setting 'from_options'"),
    ({"name": "x"}, "options has no setting 'name'"),
    ({"prefetch": {"name": "x"}}, "options.prefetch has no setting 'name'"),
    ({"prefetch": {"requires": []}}, "options.prefetch has no setting 'requires'"),
    ({"prefetch": {"distanse": 1}}, "did you mean 'distance'?"),
    ({"prefetch": {"prefetch": {"distance": 1}}}, "options.prefetch has no setting 'prefetch'"),
    ({"bucket": {"cap_mb": 25}}, "did you mean 'cap_bytes'?"),
    ({"cost": {"clusters": "laptop"}}, "did you mean 'cluster'?"),
    ({"lower_regions": {"fuse": True}}, "options.lower_regions has no setting 'fuse'"),
    # one group where another belongs
    ({"prefetch": Bucket()}, "options.prefetch takes a mapping"),
    ({"cost": Prefetch()}, "options.cost takes a mapping"),
    ({"lower_regions": RegionBackend.EAGER}, "options.lower_regions takes a mapping"),
    ({"lower_regions": {"backend": CostKind.MEASURED}}, "Known: eager, inductor"),
    ({"cost": {"model": RegionBackend.EAGER}}, "Known: analytic, measured"),
    # ranges
    ({"prefetch": {"distance": -1}}, "prefetch.distance=-1 must be 0 or more"),
    ({"prefetch": {"reduce_distance": -1}}, "prefetch.reduce_distance=-1 must be 0 or more"),
    ({"prefetch": {"budget_bytes": 0}}, "prefetch.budget_bytes=0 must be positive"),
    ({"prefetch": {"budget_bytes": -(1 << 30)}}, "must be positive"),
    ({"bucket": {"cap_bytes": 0}}, "bucket.cap_bytes=0 must be positive"),
    ({"bucket": {"cap_bytes": -1}}, "bucket.cap_bytes=-1 must be positive"),
    ({"bucket": {"min_bytes": -1}}, "bucket.min_bytes=-1 must be 0 or more"),
    ({"recompute": {"max_nodes": -1}}, "recompute.max_nodes=-1 must be 0 or more"),
    ({"lower_kernels": {"min_logits_bytes": -1}}, "min_logits_bytes=-1 must be 0 or more"),
    # contradictions
    ({"bucket": {"cap_bytes": 1, "min_bytes": 2}}, "no bucket can be both"),
    ({"lower_kernels": {"enabled": False, "force": "all"}}, "with the pass off no kernel is used"),
    ({"lower_kernels": {"enabled": False, "table": "t.json"}}, "with the pass off"),
    ({"lower_kernels": {"force": "all,swiglu"}}, "'all' stands alone"),
    # what does not exist
    ({"lower_kernels": {"force": "swiglo"}}, "did you mean 'swiglu'?"),
    ({"lower_kernels": {"force": "rms_norm,swiglo"}}, "did you mean 'swiglu'?"),
    ({"lower_kernels": {"force": "rms_norm swiglu"}}, "lower_kernels.force='rms_norm swiglu'"),
    ({"lower_kernels": {"force": ","}}, "names no kernel"),
    ({"lower_kernels": {"force": " "}}, "names no kernel"),
    ({"lower_kernels": {"force": "ALL"}}, "lower_kernels.force='ALL'"),
    ({"lower_kernels": {"table": "nowhere.json"}}, "cannot be read (FileNotFoundError"),
    ({"lower_kernels": {"table": "."}}, "cannot be read (IsADirectoryError"),
    ({"lower_kernels": {"table": __file__}}, "cannot be read (JSONDecodeError"),
    ({"cost": {"cluster": ""}}, "must be a name in conf/cluster"),
    ({"cost": {"cluster": "dgx_h10"}}, "did you mean 'dgx_h100'?"),
    ({"cost": {"cluster": "../cluster/laptop"}}, "did you mean 'laptop'?"),
    ({"cost": {"cluster": "nowhere.yaml"}}, "there is no such file"),
    ({"cost": {"cluster": "laptop.yaml"}}, "there is no such file"),
    ({"cost": {"cluster": "tests.yml"}}, "there is no such file"),
    ({"lower_regions": {"backend": "inductr"}}, "did you mean 'inductor'?"),
    ({"cost": {"model": "mesured"}}, "did you mean 'measured'?"),
]


def test_there_are_more_than_150() -> None:
    """Types by the dozen, and those that took thought."""
    assert len(TYPES) + len(OTHERS) >= 150
    assert len(OTHERS) >= 60


def shown(value: object) -> str:
    """A test's name."""
    return str(value)[:60].replace(str(id(OBJECT)), "")


def refused(options: Any) -> str:
    """What is said of wrong options."""
    with pytest.raises(ConfigError) as caught:
        Config.from_options(options)
    said = str(caught.value)
    assert len(said) < 400
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("options", "path"), TYPES, ids=lambda value: shown(value))
def test_a_value_of_another_type(options: Any, path: str) -> None:
    """The setting's path, what was given, and what it takes."""
    said = refused(options)
    assert said.startswith(f"options.{path}")
    assert any(word in said for word in ("must be", "Known:", "takes a mapping"))


@pytest.mark.parametrize(("options", "message"), OTHERS, ids=lambda value: shown(value))
def test_wrong_options(options: Any, message: str) -> None:
    """A sentence that says what is right."""
    assert message in refused(options)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, list(range(10_000)), 10**6000, TENSOR.expand(4000)],
    ids=["text", "list", "number", "tensor"],
)
def test_a_large_value_does_not_hide_the_sentence(value: Any) -> None:
    """It is cut."""
    assert "must be a whole number" in refused({"prefetch": {"distance": value}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prefetch(distance="2"),  # type: ignore[arg-type]
        lambda: Prefetch(keep=1),  # type: ignore[arg-type]
        lambda: Bucket(cap_bytes=1.5),  # type: ignore[arg-type]
        lambda: Bucket(cap_bytes=1, min_bytes=2),
        lambda: Recompute(max_nodes=None),  # type: ignore[arg-type]
        lambda: LowerKernels(force=["all"]),  # type: ignore[arg-type]
        lambda: LowerRegions(backend="fast"),  # type: ignore[arg-type]
        lambda: CostSettings(cluster=3),  # type: ignore[arg-type]
        lambda: CostSettings(model="guess"),  # type: ignore[arg-type]
        lambda: Config(strict="yes"),  # type: ignore[arg-type]
        lambda: Config(prefetch={"distanse": 2}),  # type: ignore[arg-type]
        lambda: Config(bucket=Prefetch()),  # type: ignore[arg-type]
    ],
)
def test_settings_made_by_hand_are_checked_alike(make: Any) -> None:
    """A pass is its own settings, whoever makes it."""
    with pytest.raises(ConfigError):
        make()


def test_an_enums_value_becomes_its_member() -> None:
    """Compared by identity later: the bare text would have meant the other backend."""
    assert LowerRegions("eager").backend is RegionBackend.EAGER  # type: ignore[arg-type]
    assert Config(lower_regions={"backend": "eager"}).lower_regions == LowerRegions(  # type: ignore[arg-type]
        RegionBackend.EAGER
    )


def test_none_is_taken_where_it_means_something() -> None:
    """By default, all of these are None."""
    assert all(Config.from_options(nested(p, None)) == Config() for p in OPTIONAL_WHOLE_NUMBERS)


SAMPLE = [*TYPES[::25], *OTHERS[9::6]]


@pytest.mark.parametrize(("options", "_message"), SAMPLE, ids=lambda value: shown(value))
def test_compile_step_refuses_before_it_touches_the_model(options: Any, _message: str) -> None:
    """The model is as it was, and can be used."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        fxzero.compile_step(model, optimizer, options=options)
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize(("options", "_message"), SAMPLE, ids=lambda value: shown(value))
def test_torch_compile_refuses_at_the_first_call(options: Any, _message: str) -> None:
    """As a ConfigError, which Dynamo does not wrap."""
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(2, 2), backend="fxzero", options=options)
    with pytest.raises(ConfigError) as caught:
        compiled(torch.ones(1, 2))
    assert "options" in str(caught.value) or "." in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0 must be a whole number, 1 or more"),
        ({"micro_batches": "2"}, "micro_batches='2' must be a whole number"),
        ({"micro_batches": 2.0}, "micro_batches=2.0 must be a whole number"),
        ({"micro_batches": True}, "micro_batches=True must be a whole number"),
        ({"clip_grad_norm": 0}, "clip_grad_norm=0 must be a positive number, or None"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0 must be a positive number"),
        ({"clip_grad_norm": math.nan}, "clip_grad_norm=nan must be a positive number"),
        ({"clip_grad_norm": -math.inf}, "clip_grad_norm=-inf must be a positive number"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm='1' must be a positive number"),
        ({"clip_grad_norm": True}, "clip_grad_norm=True must be a positive number"),
        ({"precision": "fp8"}, "fp8"),
        ({"precision": 16}, "16"),
        ({"precision": torch.int8}, "int8"),
        ({"options": {"prefech": {}}}, "did you mean 'prefetch'?"),
    ],
    ids=str,
)
def test_compile_steps_own_settings(settings: dict[str, Any], message: str) -> None:
    """Checked before the model is touched."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        fxzero.compile_step(model, optimizer, **settings)
    assert message in str(caught.value)
    assert type(model.weight) is nn.Parameter
