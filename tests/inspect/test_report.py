"""What goes into a report's page, and that a page holds nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import compress

import pytest

from fxzero.compiler.run import PassRecord
from fxzero.inspect import Analysis
from fxzero.inspect.analysis import PassRow, TransferRow
from fxzero.inspect.detail import HeldRow, NodeRow, PassText
from fxzero.inspect.report import data_of, page, report_data
from fxzero.inspect.report.blocks import phase_blocks
from fxzero.inspect.report.data import MOST_POINTS
from fxzero.inspect.report.pass_diffs import LONGEST_DIFF, LONGEST_LINE, pass_diffs
from fxzero.inspect.report.repeats import once, repeats_of
from fxzero.inspect.report.traffic import module_traffic
from fxzero.passes.base import Notes
from tests.inspect.reports import HOSTILE, deep, hostile, measured, small, small_step, with_detail

MOST_BYTES = 5 << 20


def test_a_page_holds_its_data() -> None:
    """There and back, through a file's text."""
    data = report_data(small(), "small")
    assert data_of(page(data)) == json.loads(json.dumps(data, default=str))


def test_two_pages_of_one_analysis_are_the_same() -> None:
    """To the byte: a page can be compared, and kept under version control."""
    assert page(report_data(small(), "small")) == page(report_data(small(), "small"))


def test_an_analysis_that_was_written_makes_the_same_page() -> None:
    """`--json`, and back."""
    text = json.dumps(small().to_json(), default=str)
    again = Analysis.from_json(json.loads(text), "a file")
    assert page(report_data(again, "small")) == page(report_data(small(), "small"))


def test_nothing_is_asked_for_from_elsewhere() -> None:
    """No address, no import; and no way in for markup, in any of the scripts."""
    text = page(report_data(small(), "small"))
    assert re.findall(r"https?://|//cdn|@import|\bimport\s*\(|\bfetch\(|XMLHttpRequest", text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) == []
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "#panels"]


def test_the_policy_names_what_is_in_the_page() -> None:
    """Hashes of the one style and the one script."""
    text = page(report_data(small(), "small"))
    found = re.search(r'Content-Security-Policy" content="(.*?)">', text)
    assert found is not None
    policy = html.unescape(found[1])
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_names_are_no_markup() -> None:
    """Neither the model's, nor the title's."""
    text = page(report_data(hostile(), f"<b>{HOSTILE}", (hostile(), HOSTILE)))
    assert HOSTILE not in text
    assert "<b>" not in text
    assert text.count("</script>") == 2
    data = data_of(text)
    assert HOSTILE in data["strings"]
    assert data["title"] == f"<b>{HOSTILE}"
    assert data["against"]["title"] == HOSTILE


def test_braces_of_names_are_no_places_of_the_template() -> None:
    """A title may look like one."""
    text = page(report_data(small(), "{{script}}"))
    assert "<title>{{script}} · fxzero report</title>" in text


def test_rows_are_columns_with_every_string_once() -> None:
    """Rows read back are the analysis's."""
    data = report_data(small(), "small")
    strings, (graph,) = data["strings"], data["graphs"]
    assert len(strings) == len(set(strings))
    detail = small().details[0]
    nodes, spans = graph["detail"]["nodes"], graph["detail"]["spans"]
    assert [strings[i] for i in nodes["name"]] == [node.name for node in detail.nodes]
    assert [strings[i] for i in nodes["source"]] == [node.source for node in detail.nodes]
    assert [[strings[i] for i in names] for names in nodes["inputs"]] == [
        list(node.inputs) for node in detail.nodes
    ]
    assert [strings[i] for i in spans["lane"]] == [span.lane for span in detail.spans]
    assert spans["us"] == [span.us for span in detail.spans]


def test_figures_are_the_analysis_s() -> None:
    """Peak, kinds, tensors at the peak, traffic: one sum, wherever it is shown."""
    (schedule,) = small().schedules
    data = report_data(small(), "small")
    detail = data["graphs"][0]["detail"]
    columns = detail["held"]["num_bytes"]
    totals = [sum(held) for held in zip(*columns, strict=True)]
    assert max(totals) == schedule.peak_bytes
    at_peak = {
        kind: column[totals.index(max(totals))]
        for kind, column in zip(detail["kinds"], columns, strict=True)
    }
    assert at_peak == {kind: schedule.bytes_by_kind.get(kind, 0) for kind in detail["kinds"]}
    left_out = detail["alive_left_out"][1]
    assert sum(detail["alive"]["num_bytes"]) + left_out == schedule.peak_bytes
    assert sum(data["transfers"]["sent_bytes"]) == pytest.approx(small().sent_bytes(), abs=10)
    assert data["about"]["totals"] == small().totals()
    assert data["settings"] == {"bucket.min_bytes": 0, "prefetch.distance": 1}


def test_traffic_of_modules_sums_up_to_that_of_buckets() -> None:
    """By collective, but for rounding."""
    shares = module_traffic(small().transfers, small().details[0].nodes)
    for lane in ("gather", "reduce"):
        mine = [share for share in shares if share.lane == lane]
        assert sum(s.num_bytes for s in mine) == pytest.approx(
            small().num_bytes(lane), abs=len(mine)
        )
    assert sum(s.sent_bytes for s in shares) == pytest.approx(small().sent_bytes(), abs=len(shares))


def test_a_bucket_is_shared_out_by_size() -> None:
    """A weight of 30 bytes and two biases of 1, of two modules."""
    sizes = {"a.weight": 30, "a.bias": 1, "b.bias": 1}
    nodes = [
        NodeRow(name, "", "", role="input", params=(name,), num_bytes=size)
        for name, size in sizes.items()
    ]
    bucket = TransferRow(
        0, "g.0", "forward", "gather", "all_gather", "a", tuple(sizes), 80, 320, num_ranks=4
    )
    a, b = module_traffic([bucket], nodes)
    assert (a.module, a.tensors, a.num_bytes, a.sent_bytes) == ("a", 2, 310, round(310 * 3 / 4))
    assert (b.module, b.tensors, b.num_bytes, b.sent_bytes) == ("b", 1, 10, round(10 * 3 / 4))


def test_every_node_is_in_one_block() -> None:
    """Of the outline; nodes of pieces are in their pieces."""
    for analysis in (small(), small_step()):
        nodes = analysis.details[0].nodes
        blocks = phase_blocks(nodes)
        seen = Counter(i for b in blocks for g in b.groups for part in g for i in part.nodes)
        assert set(seen.values()) == {1}
        outline = {i for i, n in enumerate(nodes) if not n.piece and n.role != "region"}
        assert set(seen) == outline


def test_equal_layers_are_one_block() -> None:
    """Forward, and backward in its order; what else there is stands by itself."""
    forward, backward = phase_blocks(small().details[0].nodes)[1:]
    layers = ["blocks.0", "blocks.1", "blocks.2"]
    assert [part.layer for part in max(forward.groups, key=len)] == layers
    assert [part.layer for part in max(backward.groups, key=len)] == layers[::-1]
    assert sorted(map(len, forward.groups))[-2:] == [1, 3]


def test_a_layer_that_computes_otherwise_is_apart() -> None:
    """It calls another piece."""
    nodes = [
        replace(node, operator="other")
        if node.layer == "blocks.1" and node.phase == "forward" and node.us
        else node
        for node in small().details[0].nodes
    ]
    _, forward, _ = phase_blocks(nodes)
    named = [[part.layer for part in group] for group in forward.groups]
    assert [g for g in named if "blocks" in g[0]] == [["blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_what_the_timeline_names_is_a_node() -> None:
    """In both doors: regions of a whole step too."""
    for analysis in (small(), small_step()):
        (detail,) = analysis.details
        known = {row.name for row in detail.nodes}
        assert [span.node for span in detail.spans if span.node not in known] == []
        assert [row.node for row in detail.alive if row.node not in known] == []


def test_diffs_are_those_of_inspect() -> None:
    """Line by line, as `PassRecord.diff` has them; lowering once for each side of the cut."""
    (detail,) = small().details
    rows = [row for row in small().passes if row.graph == 0]
    found = pass_diffs(rows, detail.texts)
    assert [diff.row for diff in found] == list(range(len(rows)))
    sides = [(rows[diff.row].name, diff.side) for diff in found if diff.side]
    lowering = ("lower_transfers", "release_saved", "lower_regions")
    assert sides == [(name, side) for side in ("forward", "backward") for name in lowering]
    texts = {text.name: text.text for text in detail.texts[:8]}
    at = [row.name for row in rows].index("shard_params")
    before, after = texts[rows[at - 1].name], texts["shard_params"]
    record = PassRecord("shard_params", "", Notes(), 0.0, 0, 0, before, after)
    theirs = record.diff().splitlines()[2:]
    assert len(found[at].lines) == len(theirs)
    short = [len(line) < LONGEST_LINE for line in theirs]
    assert sum(short) > len(short) / 2
    assert [*compress(found[at].lines, short)] == [*compress(theirs, short)]
    assert found[at].added > found[at].removed > 0
    changed_nothing = [diff for diff in found if rows[diff.row].name == "draw_masks"]
    assert [diff.lines for diff in changed_nothing] == [()]


def test_a_side_is_compared_with_what_was_cut_out_for_it() -> None:
    """Not with the whole graph: lowering transfers takes away what joins them, and little else."""
    (detail,) = small().details
    assert [text.name for text in detail.texts].count("cut") == 2
    rows = [row for row in small().passes if row.graph == 0]
    found = [d for d in pass_diffs(rows, detail.texts) if rows[d.row].name == "lower_transfers"]
    backward = [line for line in found[0].lines if line.startswith("-") and "backward" in line]
    assert backward == []


def test_long_diffs_have_an_end() -> None:
    """And say how much is left out."""
    row = PassRow(0, "grow", "", 0.0, 0, 0, {})
    count = LONGEST_DIFF + 500
    after = "\n".join(f"node_{i}: {'x' * 1000}" for i in range(count))
    (diff,) = pass_diffs([row], [PassText("capture", ""), PassText("grow", after)])
    assert (diff.added, diff.removed) == (count, 0)
    assert len(diff.lines) == LONGEST_DIFF
    assert diff.left_out == count + 1 - LONGEST_DIFF  # a line says where
    assert max(map(len, diff.lines)) < LONGEST_LINE + 10


def test_a_curve_keeps_its_peak_and_runs_forward() -> None:
    """Of more points than can be seen; of a transfer that is launched long before it runs."""
    held = tuple(
        HeldRow(f"n{i}", float(i + 5 * (i % 100 == 7)), (i % 13, 10**6 if i == 7777 else i % 17))
        for i in range(4 * MOST_POINTS)
    )
    analysis = with_detail(small(), kinds=("parameters", "workspace"), held=held)
    curve = report_data(analysis, "small")["graphs"][0]["detail"]["held"]
    assert len(curve["start_us"]) == MOST_POINTS
    assert curve["start_us"] == sorted(curve["start_us"])
    assert max(curve["num_bytes"][1]) == 10**6


def test_micro_steps_that_stand_for_others() -> None:
    """Drawn once, and as long as all of them; what stalls there is that of one run."""
    (detail,), (schedule,) = small_step().details, small_step().schedules
    (repeat,) = repeats_of(detail.spans, schedule.makespan_us)
    assert repeat.runs == 3  # the fourth of seven stands for the fifth and sixth too
    one = repeat.once_us - repeat.start_us
    assert repeat.end_us - repeat.start_us == pytest.approx(repeat.runs * one, rel=0.1)
    inside = [s for s in detail.stalls if repeat.start_us <= s.start_us < repeat.end_us]
    assert inside
    for stall in inside:
        assert once(stall, [repeat]).us == pytest.approx(stall.us / repeat.runs)
        assert once(stall, []) == stall


def test_against_itself_nothing_differs() -> None:
    """Neither figures nor notes, buckets, settings."""
    found = report_data(small(), "small", (small(), "again"))["against"]
    assert (found["notes"], found["buckets"], found["changed"]) == ([], [], [])
    assert all(row["this"] == row["other"] for row in found["figures"])


def test_against_another_stage() -> None:
    """Stage 2 gathers once and keeps parameters; its notes and buckets are others."""
    found = report_data(small(3), "three", (small(2), "two"))["against"]
    figures = {row["name"]: (row["other"], row["this"]) for row in found["figures"]}
    assert figures["peak"] == tuple(small(zero).schedules[0].peak_bytes for zero in (2, 3))
    assert figures["step"] == tuple(small(zero).schedules[0].makespan_us for zero in (2, 3))
    assert figures["sent to other ranks"] == (small(2).sent_bytes(), small(3).sent_bytes())
    two, three = (small(zero).num_bytes("gather") for zero in (2, 3))
    assert figures["moved: all-gather"] == (two, three)
    assert two < three
    assert {(row["pass"], row["name"]) for row in found["notes"]} >= {("bucket", "gathers")}
    only = [row["bucket"] for row in found["buckets"] if row["other"] is None]
    assert any(name.startswith("gather.backward") for name in only)
    assert found["changed"] == []


def test_what_was_measured_is_there() -> None:
    """As a dump of a run has it."""
    data = report_data(measured(small()), "small")
    (run,) = data["graphs"][0]["detail"]["measured"]
    assert run["part"] == "step"
    assert len(run["calls_us"]) == 3
    assert sum(run["spans"]["us"]) == pytest.approx(2 * sum(s.us for s in small().details[0].spans))


def test_an_analysis_without_details_makes_a_page_too() -> None:
    """Of `fxzero inspect --json`: figures, traffic and passes."""
    data = report_data(replace(small(), details=(), memory=()), "small")
    assert data["graphs"][0]["detail"] is None
    assert data["transfers"]["num_bytes"] == [row.num_bytes for row in small().transfers]
    assert data_of(page(data))["passes"]


def test_ninety_six_layers_fit() -> None:
    """Under 5 MB, with a diff of every pass and another one beside it."""
    large = deep(small(), 96)
    assert len(large.details[0].nodes) > 5000
    text = page(report_data(large, "96 layers", (large, "again")))
    assert len(text) < MOST_BYTES
    _, forward, _ = data_of(text)["graphs"][0]["detail"]["blocks"]
    assert [len(group) for group in forward["groups"] if len(group) > 1] == [3, 93]
