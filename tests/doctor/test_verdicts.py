"""What a check says, also one that raises."""

from __future__ import annotations

from fxzero.doctor.verdicts import Checked, Verdict, ok, reason, run


def test_one_or_several() -> None:
    """A check says one thing, or yields more."""
    assert list(run("a", lambda: ok("a", "1"))) == [ok("a", "1")]
    assert list(run("a", lambda: [ok("a", "1"), ok("b", "2")])) == [ok("a", "1"), ok("b", "2")]
    assert list(run("a", list)) == []


def test_one_that_raises_has_failed() -> None:
    """The others have their say."""

    def broken() -> Checked:
        raise RuntimeError("\n  no driver\nand much more")

    (checked,) = run("gpu", broken)
    assert (checked.name, checked.verdict) == ("gpu", Verdict.FAIL)
    assert checked.found == "the check raised RuntimeError: no driver"


def test_reasons_are_one_line() -> None:
    """However long."""
    assert reason(ValueError()) == "ValueError"
    assert len(reason(ValueError("x" * 1000))) < 330
    assert "\n" not in reason(ValueError("a\nb"))
