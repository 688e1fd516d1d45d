"""A configuration held against the table of all keys: which are known, of the right type, and what
becomes of each. What is mapped is left to those who map it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxzero.integrations.deepspeed.kinds import Kind
from fxzero.integrations.deepspeed.lines import Found, Verdict
from fxzero.integrations.deepspeed.near import near
from fxzero.integrations.deepspeed.schema import Entry, Feature, Key, Removed, Section, is_off
from fxzero.integrations.deepspeed.schema_top import REMOVED, TOP
from fxzero.integrations.deepspeed.schema_zero import REMOVED_ZERO, REMOVED_ZERO_OFF
from fxzero.integrations.deepspeed.versions import Version

COMPILED = "fxzero compiles anyway: drop it."
MEANT = {
    "max_grad_norm": "did you mean 'gradient_clipping'?",
    "zero": "did you mean 'zero_optimization'?",
    "zero_stage": "did you mean 'stage' in 'zero_optimization'?",
    "fp16.fp16": "did you mean 'enabled'?",
    "bf16.bf16": "did you mean 'enabled'?",
    **{f"compile.{name}": COMPILED for name in ("enabled", "backend", "kwargs")},
}
"""Names that are near none, by path, and what people mean by them."""
DEFAULT_FOR_AUTO = 'DeepSpeed takes its default for an "auto" that nobody resolves'


def walk(config: Mapping[str, Any], version: Version | None) -> Found:
    """Look at every key, at every level."""
    found = Found()
    _section(config, TOP, "", "", found, version)
    return found


def _section(
    config: Mapping[str, Any],
    section: Section,
    path: str,
    canonical: str,
    found: Found,
    version: Version | None,
) -> None:
    for key, value in config.items():
        here = f"{path}{key}"
        entry = section.keys.get(key)
        removed = _removed(path, key)
        if removed is not None:
            _look_at_removed(here, value, removed, found, version)
        elif entry is None:
            hint = near(str(key), section.keys)
            section_name = path.partition(".")[0]
            if here in MEANT:
                hint = MEANT[here]
            elif key == section_name:
                hint = f"there are {', '.join(sorted(section.keys))}."
            elif path and key in TOP.keys:
                hint = f"{key} stands at the top, beside {section_name}."
            found.say(here, value, Verdict.REFUSED, f"DeepSpeed has no such key: {hint}")
        else:
            name = key if isinstance(entry, Feature) else entry.alias or key
            known = f"{canonical}{name}"
            if known in found.written and found.written[known] != here:
                other = found.written[known]
                found.say(here, value, Verdict.REFUSED, f"{other} is the same key. Leave one.")
                continue
            found.written[known] = here
            _entry(value, entry, here, known, found, version, section.auto)


def _removed(path: str, key: str) -> Removed | None:
    if not path:
        return REMOVED.get(key)
    if path == "zero_optimization." and key in REMOVED_ZERO:
        reason = f"DeepSpeed removed it in 0.19.7. {REMOVED_ZERO[key]}."
        return Removed((0, 19, 7), reason, REMOVED_ZERO_OFF[key])
    return None


def _look_at_removed(
    path: str, value: Any, removed: Removed, found: Found, version: Version | None
) -> None:
    gone = version is not None and version >= removed.since
    if gone or not is_off(value, removed):
        found.say(path, value, Verdict.REFUSED, removed.reason)
    else:
        found.say(path, value, Verdict.NEEDLESS, "it is off, and DeepSpeed removed it in 0.19.7")


def _entry(
    value: Any,
    entry: Entry,
    path: str,
    canonical: str,
    found: Found,
    version: Version | None,
    auto: bool,
) -> None:
    if isinstance(entry, Key):
        _key(value, entry, path, canonical, found, auto)
    elif value is None and isinstance(entry, Section) and entry.nullable:
        found.say(path, value, Verdict.NEEDLESS, "null asks for nothing")
    elif path == "zero_optimization" and isinstance(value, bool):
        found.values["zero_optimization.stage"] = int(value)
        found.written["zero_optimization.stage"] = path
        found.say(path, value, Verdict.MAPPED, "the old form of zero_optimization.stage")
    elif not isinstance(value, dict):
        found.say(path, value, Verdict.REFUSED, "must be an object.")
    elif isinstance(entry, Section):
        if not value:
            found.say(path, value, Verdict.NEEDLESS, "it is empty")
        _section(value, entry, f"{path}.", f"{canonical}.", found, version)
    else:
        _feature(value, entry, path, found)


def _key(value: Any, key: Key, path: str, canonical: str, found: Found, auto: bool) -> None:
    if value == "auto" and key.kind.problem(value):
        if path == "bfloat16.enabled":
            reason = '"auto" is resolved under the name bf16 alone: write bf16.'
            found.say(path, value, Verdict.REFUSED, reason)
        elif auto and key.auto:
            found.say(path, value, Verdict.NEEDLESS, DEFAULT_FOR_AUTO)
        else:
            found.say(
                path,
                value,
                Verdict.REFUSED,
                f'"auto" is resolved by nobody here: it {_must(key.kind)}',
            )
        return
    problem = key.kind.problem(value)
    if problem:
        found.say(path, value, Verdict.REFUSED, problem)
        return
    held = key.kind.of(value)
    found.values[canonical] = held
    if key.verdict is Verdict.REFUSED and any(held == off for off in key.off):
        found.say(path, value, Verdict.NEEDLESS, "it asks for nothing")
    elif value is None and key.verdict is not Verdict.REFUSED:
        found.say(path, value, Verdict.NEEDLESS, "null asks for nothing")
    else:
        reason = key.reason if key.verdict is not Verdict.REFUSED else f"{key.reason.rstrip('.')}."
        found.say(path, value, key.verdict, reason)


def _must(kind: Kind) -> str:
    return f"must be {kind.what}."


def _feature(config: dict[str, Any], feature: Feature, path: str, found: Found) -> None:
    switch = config.get(feature.switch, "auto")
    on = switch not in feature.off and switch != "auto"
    _feature_keys(config, feature.keys, f"{path}.", feature if on else None, found)
    if not config:
        found.say(path, config, Verdict.NEEDLESS, "it is empty")


def _feature_keys(
    config: dict[str, Any],
    keys: Mapping[str, Any],
    path: str,
    on: Feature | None,
    found: Found,
) -> None:
    for key, value in config.items():
        here = f"{path}{key}"
        kind = keys.get(key)
        if kind is None:
            hint = near(str(key), keys)
            found.say(here, value, Verdict.REFUSED, f"DeepSpeed has no such key: {hint}")
        elif isinstance(kind, Mapping):
            if isinstance(value, dict):
                _feature_keys(value, kind, f"{here}.", on, found)
            else:
                found.say(here, value, Verdict.REFUSED, "must be an object.")
        elif value != "auto" and kind.problem(value):
            found.say(here, value, Verdict.REFUSED, kind.problem(value))
        elif on is None:
            found.say(here, value, Verdict.NEEDLESS, "its section is off")
        else:
            end = "." if on.verdict is Verdict.REFUSED else ""
            found.say(here, value, on.verdict, f"{on.reason}{end}")
