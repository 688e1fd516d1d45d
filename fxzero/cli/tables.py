"""A compilation as a person reads it: tables, diffs and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from fxzero.cli.terminal import visible
from fxzero.compiler.run import unified
from fxzero.errors import ConfigError, nearest
from fxzero.inspect import Analysis, MemoryReport, ScheduleRow
from fxzero.inspect.estimate_rows import Estimate, PipelineEstimate, StageEstimate
from fxzero.inspect.formulas import DeepSpeedRow
from fxzero.inspect.pipeline import PipelineReport
from fxzero.inspect.units import size


def print_analysis(console: Console, analysis: Analysis) -> None:
    """The passes, the buckets on the wire, and the sums."""
    console.print(
        f"ZeRO-{analysis.zero}, {analysis.world_size} ranks, "
        f"{analysis.num_parameters:,} parameters, "
        f"{len({row.graph for row in analysis.passes})} graph(s)\n"
    )
    console.print(passes_table(analysis))
    if analysis.transfers:
        console.print(transfers_table(analysis))
    gathered = analysis.num_bytes("gather")
    reduced = analysis.num_bytes("reduce")
    ratio = analysis.wire_elements() / max(analysis.num_parameters, 1)
    console.print(
        f"per step and rank: {size(gathered)} gathered, {size(reduced)} reduced, "
        f"{analysis.wire_elements():,} elements on the wire = {ratio:.3f} P"
    )
    up, down = analysis.num_bytes("h2d"), analysis.num_bytes("d2h")
    read, written = analysis.num_bytes("read"), analysis.num_bytes("write")
    if up or down or read:
        moved = f"{size(up)} copied to the device, {size(down)} to the host"
        disk = f", {size(read)} read from disk, {size(written)} written" if read else ""
        console.print(f"and of its own: {moved}{disk}")
    for row in analysis.schedules:
        print_schedule(console, row)
    for report in analysis.memory:
        print_memory(console, report)


def print_schedule(console: Console, row: ScheduleRow) -> None:
    """What a graph takes and holds, by simulation."""
    busy = ", ".join(f"{lane} {us / 1e3:,.2f} ms" for lane, us in row.busy_us.items())
    kinds = sorted(row.bytes_by_kind.items(), key=lambda item: -item[1])
    held = ", ".join(f"{kind} {size(amount)}" for kind, amount in kinds if amount)
    console.print(
        f"graph {row.graph}, simulated ({row.costs}): {row.makespan_us / 1e3:,.2f} ms, of which "
        f"{row.exposed_us / 1e3:,.2f} waiting for transfers; busy: {busy or 'nothing'}\n"
        f"  peak {size(row.peak_bytes)} at {row.peak_node}: {held}"
        + (f"\n  in the host's memory: {size(row.host_bytes)}" if row.host_bytes else "")
        + (f", on disk: {size(row.disk_bytes)}" if row.disk_bytes else "")
        + (f"\n  not counted: what {' and '.join(row.left_out)} holds" if row.left_out else ""),
        highlight=False,
    )


def print_memory(console: Console, report: MemoryReport) -> None:
    """A row a layer, equal ones folded, and what is held over time."""
    if report.rungs:
        console.print(_rungs_table(report))
    has_parts = any(row.partitioned for row in report.rows)
    has_moved = any(row.moved_bytes for row in report.rows)
    parts = ["in parts", "not kept", "gathering takes"] if has_parts else []
    moved = ["on the host"] if has_moved else []
    columns = ["kept", *moved, "repeated", "not kept", "repeating takes", *parts, "gathered"]
    table = Table("layers", *columns)
    for column in range(1, 1 + len(columns)):
        table.columns[column].justify = "right"
    for row in report.rows:
        count = len(row.layers)
        name = row.layers[0] or "(root)"
        in_parts = [
            str(row.partitioned),
            size(row.partitioned_bytes),
            f"{row.partitioned_us / 1e3:,.2f} ms",
        ]
        table.add_row(
            name if count == 1 else f"{name} … {row.layers[-1]} ({count})",
            size(row.kept_bytes),
            *([size(row.moved_bytes)] if has_moved else []),
            str(row.repeated),
            size(row.repeated_bytes),
            f"{row.repeated_us / 1e3:,.2f} ms",
            *(in_parts if has_parts else []),
            size(row.gathered_bytes),
        )
    console.print(table)
    level = "" if report.num_levels is None else f", level {report.level} of {report.num_levels}"
    room = "" if report.num_levels is None else f", room for transfers: {report.room}"
    console.print(
        f"graph {report.graph}, memory_budget={report.budget}{level}{room}; figures are for each "
        f"layer\n|{report.curve_text()}| {size(max(report.curve, default=0))}",
        highlight=False,
    )


def print_pipeline(console: Console, report: PipelineReport) -> None:
    """The stages, what travels between them, and the schedule as a picture."""
    columns = ["stage", "rank", "layers", "parameters", "forward", "backward", "of it weights'"]
    table = Table(*columns, "to the next stage")
    for column in (0, 1, 3, 4, 5, 6, 7):
        table.columns[column].justify = "right"
    for number, stage in enumerate(report.found.stages):
        last = number == len(report.found.stages) - 1
        crossing = None if last else report.found.crossings[number]
        layers = [layer or "(root)" for layer in stage.layers]
        table.add_row(
            str(number),
            str(report.rank_of[number]),
            layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}",
            f"{stage.num_parameters:,}",
            *(f"{us / 1e3:,.2f} ms" for us in (stage.forward_us, stage.us - stage.forward_us)),
            f"{stage.weight_us / 1e3:,.2f} ms",
            f"{size(crossing.num_bytes)}, back {size(crossing.gradient_bytes)}" if crossing else "",
        )
    console.print(table)
    ranks = zip(report.idle_shares, report.in_flight, report.peak_bytes, strict=True)
    shared = ", ".join(report.found.shared)
    console.print(
        f"{report.schedule}, {report.num_micro_batches} micro-batches: "
        f"{report.step_us / 1e3:,.2f} ms a step ({report.costs}); slowest stage over mean "
        f"{report.found.imbalance:.3f}" + (f"; held by several stages: {shared}" if shared else ""),
        highlight=False,
    )
    for rank, (idle, flights, held) in enumerate(ranks):
        console.print(
            f"rank {rank}: idle {idle:.1%}, {flights} micro-batches in flight, {size(held)} of "
            "model states and what they save",
            highlight=False,
        )
    console.print(report.picture, highlight=False, markup=False, soft_wrap=True)


def print_estimate(console: Console, found: Estimate) -> None:
    """A table for all ranks as one group and for each mesh, with a column a ZeRO stage."""
    fed = found.batch if found.micro_batches == 1 else f"{found.batch}, {found.micro_batches} parts"
    console.print(
        f"{escape(found.target)}: {found.num_parameters:,} parameters, {found.world_size} ranks of "
        f"{found.cluster} ({found.device}, {size(found.device_memory_bytes)}), computed in "
        f"{found.param_dtype}\neach rank's batch: {escape(fed)}",
        emoji=False,  # a target may be hf:llama:
        highlight=False,
        soft_wrap=True,
    )
    flat = f"shard={found.world_size}" if found.meshes else "of each rank"
    console.print(_estimate_table(flat, found.stages))
    for name, mesh in found.meshes.items():
        console.print(_estimate_table(name, mesh.stages))
        if mesh.batches < found.world_size:
            console.print(
                f"a batch for the {found.world_size // mesh.batches} ranks of each pipeline; "
                "memory is that of the ranks that hold most",
                highlight=False,
                soft_wrap=True,
            )
    if found.suggestion:
        console.print(escape(found.suggestion), highlight=False, soft_wrap=True)


def _estimate_table(name: str, of: Mapping[int, StageEstimate]) -> Table:
    """A column a stage."""
    table = Table(name, *(f"ZeRO-{zero}" for zero in of))
    for column in range(1, 1 + len(of)):
        table.columns[column].justify = "right"
    stages = list(of.values())
    piped = [stage for stage in stages if isinstance(stage, PipelineEstimate)]
    table.add_row("model states", *(size(s.model_state_bytes) for s in stages))
    table.add_row("  parameters", *(size(s.states.parameter_bytes) for s in stages))
    table.add_row("  gradients", *(size(s.states.gradient_bytes) for s in stages))
    table.add_row("  optimizer state", *(size(s.states.optimizer_bytes) for s in stages))
    table.add_row("peak in a step", *(size(s.peak_bytes) for s in stages))
    kinds = dict.fromkeys(kind for s in stages for kind in s.bytes_by_kind)
    for kind in kinds:
        named = "  of it " + kind.replace("_", " ")
        table.add_row(named, *(size(s.bytes_by_kind.get(kind, 0)) for s in stages))
    for held, key in (("on the host", "host_bytes"), ("on disk", "disk_bytes")):
        if any(getattr(s, key) for s in stages):
            table.add_row(held, *(size(getattr(s, key)) for s in stages))
    table.add_row("fits", *("yes" if s.fits else "no" for s in stages))
    table.add_row("sent in a step", *(size(s.traffic_bytes) for s in stages))
    if piped:
        table.add_row("  of it between stages", *(size(s.message_bytes) for s in piped))
    table.add_row("step", *(f"{s.step_ms:,.1f} ms" for s in stages))
    table.add_row("  waiting for transfers", *(f"{s.exposed_ms:,.1f} ms" for s in stages))
    if piped:
        table.add_row("  schedule", *(s.schedule for s in piped))
        table.add_row("  ranks idle", *(f"{s.idle_share:.1%}" for s in piped))
    table.add_row("MFU", *(f"{s.mfu:.1%}" for s in stages))
    table.add_row("all ranks", *map(_rate, stages))
    return table


def _rate(stage: StageEstimate) -> str:
    """What all ranks read in a second."""
    if stage.tokens_per_s is None:
        return f"{stage.samples_per_s:,.1f} rows/s"
    return f"{stage.tokens_per_s:,.0f} tokens/s"


def print_formulas(
    console: Console,
    num_parameters: float,
    world_size: int,
    paper: Mapping[int, float],
    deepspeed: Sequence[DeepSpeedRow],
) -> None:
    """Model states by the ZeRO paper's formulas, and by DeepSpeed's; in GB of 10⁹ bytes, as they
    have them."""
    console.print(
        f"{num_parameters:,.0f} parameters, mixed precision with Adam, {world_size} ranks: model "
        "states by the formulas of the ZeRO paper. Activations, what is gathered and temporaries "
        "come on top: estimate a model for those.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("", *(f"ZeRO-{zero}" for zero in paper))
    table.add_row("GB a rank", *(f"{num_bytes / 1e9:,.3g}" for num_bytes in paper.values()))
    console.print(table)
    if not deepspeed:
        return
    table = Table("DeepSpeed", "optimizer", "parameters", "zero.Init", "GB a device", "GB a host")
    for row in deepspeed:
        table.add_row(
            f"ZeRO-{row.zero}",
            "host" if row.offload_optimizer else "device",
            "host" if row.offload_params else "device",
            "" if row.zero_init is None else ("yes" if row.zero_init else "no"),
            *(f"{num_bytes / 1e9:,.3g}" for num_bytes in (row.device_bytes, row.host_bytes)),
        )
    console.print(table)
    console.print(
        "as its estimators have it: no activations, no buckets, no temporaries, no fragmentation; "
        "1.5 times what is on the host",
        highlight=False,
        soft_wrap=True,
    )


def _rungs_table(report: MemoryReport) -> Table:
    """What was tried to find out what leaves the device."""
    table = Table("", "saved values", "state", "parameters", "peak", "step")
    for column in range(1, 6):
        table.columns[column].justify = "right"
    for tried in report.rungs:
        rung = tried.rung
        table.add_row(
            "taken" if tried.taken else "",
            *(f"{share:.0%}" for share in (rung.activations, rung.states, rung.params)),
            size(tried.peak_bytes),
            f"{tried.step_us / 1e3:,.2f} ms",
        )
    return table


def passes_table(analysis: Analysis) -> Table:
    """A row a pass."""
    table = Table("graph", "pass", "ms", "nodes before", "after", "what it noted")
    for column in (0, 2, 3, 4):
        table.columns[column].justify = "right"
    for row in analysis.passes:
        notes = ", ".join(f"{k}={v}" for k, v in row.notes.items()) or "nothing to do"
        table.add_row(
            str(row.graph),
            row.name,
            f"{row.time_ms:.1f}",
            str(row.nodes_before),
            str(row.nodes_after),
            escape(notes),
        )
    return table


def transfers_table(analysis: Analysis) -> Table:
    """A row a bucket, in launch order."""
    table = Table("bucket", "operator", "layer", "params", "elements", "bytes")
    for column in (3, 4, 5):
        table.columns[column].justify = "right"
    for row in analysis.transfers:
        table.add_row(
            row.bucket,
            row.operator,
            row.layer or "(root)",
            str(len(row.params)),
            f"{row.num_elements:,}",
            size(row.num_bytes) + (f" x {row.runs}" if row.runs > 1 else ""),
        )
    return table


def diffs(analysis: Analysis, name: str) -> list[str]:
    """What a pass changed, in each graph.

    Raises:
        ConfigError: no pass of that name ran.
    """
    found = []
    for detail in analysis.details:
        rows = (r for r in analysis.passes if (r.graph, r.name) == (detail.graph, name))
        for number, text in enumerate(detail.texts):
            if text.name == name:
                changed = unified(name, detail.texts[number - 1].text, text.text)
                row = next(rows)
                notes = ", ".join(f"{key}={value}" for key, value in row.notes.items())
                found.append(
                    changed or f"# {name} changed nothing here: {notes or 'nothing to do'}"
                )
    if not found:
        known = {text.name for detail in analysis.details for text in detail.texts}
        raise ConfigError(f"no pass {name!r} ran: {nearest(name, known)}")
    return found


def print_text(console: Console, text: str, language: str) -> None:
    """Coloured on a terminal; elsewhere every line whole, for pipes."""
    if console.is_terminal:
        console.print(Syntax(visible(text), language, background_color="default"))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
