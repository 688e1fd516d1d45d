"""Why a node is there, what it costs, and whether its value is kept."""

from __future__ import annotations

from collections.abc import Iterator

from fxzero.inspect.detail import NodeRow
from fxzero.inspect.explain import transfers
from fxzero.inspect.explain.explanation import Answer, Explanation, Setting
from fxzero.inspect.explain.view import View
from fxzero.inspect.units import duration, several, size

ROLES = {
    "input": "It is what the step is called with: it is held from the first node to the last",
    "output": "It ends the graph: what it returns outlives the step",
    "compute": "The model computes it",
    "rows": "It takes the rows of one micro-batch out of the batch; it copies nothing",
    "unshard": "Here the full parameter is needed",
    "reshard": "Here a gradient becomes this rank's shard",
    "prepare": "It makes ready what a transfer sends: a cast, or padding",
    "slab": "It makes the memory in which transfers have their places",
    "launch": "It starts a transfer, and does not wait for it",
    "wait": "It joins a transfer: what that brings may be read from here on",
    "part": "It picks one tensor of several; it copies nothing",
    "finish": "It makes of a transfer's part what is read: it takes off padding, or casts",
    "ahead": "It starts a transfer that the next step joins",
    "release": "It ends the life of a full copy: its memory is free from here on",
    "keep": "It keeps a full gradient on this rank, for no_sync",
    "region": "It calls a compiled region",
    "accumulate": "It adds a micro-step's gradient to those of the micro-steps before",
    "update": "It changes parameters and optimizer state in place, as soon as their gradients are "
    "there",
    "start": "It starts an update that the step before has left",
    "join": "It waits for updates that run on the host",
}

KEEPS = (
    ("recompute.repeat", "name its module or operator to have it repeated"),
    ("recompute.policy", "full repeats each block from its input"),
    ("memory_budget", "a bound on the peak: values are repeated until it is met, cheapest first"),
    ("offload_activations.share", "keeps a part of such values on the host"),
)
REPEATS = (
    ("recompute.save", "name its module or operator to have it kept"),
    ("recompute.max_nodes", "most cheap operators to repeat for one value; 0 repeats none"),
    ("recompute.policy", "cheap repeats no more than that, whatever the budget"),
)
KERNELS = (
    ("lower_kernels.force", "names of kernels to use wherever they fit, whatever was measured"),
    ("lower_kernels.table", "a table of measurements of this device"),
)


def of_node(view: View, row: NodeRow) -> Explanation:
    """All that there is to say of a node."""
    return Explanation(
        "node",
        row.name,
        view.graph,
        row.text,
        tuple(_answers(view, row)),
        _settings(view, row),
    )


def _answers(view: View, row: NodeRow) -> Iterator[Answer]:
    yield _what(view, row)
    if row.bucket in view.transfers:
        yield from transfers.answers(view, row.bucket)
        return
    if row.role in ("compute", "region", "update", "accumulate", "prepare", "finish"):
        yield _cost(view, row)
    if row.phase == "forward" and row.lane == "compute" and row.role in ("compute", "part"):
        yield _kept(view, row)
    if row.again:
        yield _repeated(view, row)
    if row.role == "compute" and row.made_by != "lower_kernels":
        yield _lowered(view, row)


def _what(view: View, row: NodeRow) -> Answer:
    if row.text.startswith("return "):
        text = ROLES["output"] if not row.piece else "It is what the piece returns"
    elif row.piece and not row.role:
        text = "It is what the piece is called with"
    else:
        text = ROLES.get(row.role, f"Its role is {row.role}")
    if row.made_by and row.made_by != "capture":
        text += f". The pass {row.made_by} made it"
    if row.role == "input":
        text += f": {size(row.num_bytes)}"
    where = [f"layer {row.layer}"] if row.layer else []
    if row.module and row.module != row.layer:
        where.append(f"module {row.module}")
    if where:
        text += f". It belongs to {', '.join(where)}"
    if row.piece:
        calls = view.calls.get(row.piece, [])
        layers = list(dict.fromkeys(call.layer or "(root)" for call in calls))
        text += f". It is part of the piece {row.piece}, which runs for {several(layers)}"
    if row.source:
        text += f". {row.source}"
    numbers = {
        "made_by": row.made_by,
        "role": row.role,
        "phase": row.phase,
        "num_bytes": row.num_bytes,
    }
    return Answer("What is it?", text + ".", numbers)


def _cost(view: View, row: NodeRow) -> Answer:
    schedule = view.schedule
    step_us = schedule.makespan_us if schedule is not None else 0.0
    text = f"By the cost model {duration(row.us)} by itself"
    if step_us:
        text += f", {row.us / step_us:.2%} of the step"
    if row.start_us is not None:
        text += f"; in the schedule it begins at {duration(row.start_us)}"
    stall_us = view.stall_us.get(row.name, 0.0)
    if stall_us:
        text += f", after {duration(stall_us)} of waiting for a transfer"
    if row.num_bytes:
        text += f". Its value takes {size(row.num_bytes)}"
    return Answer("What does it cost?", text + ".", {"us": row.us, "num_bytes": row.num_bytes})


def _kept(view: View, row: NodeRow) -> Answer:
    question = "Is its value kept for backward?"
    chosen = view.repeated.get(row.name)
    if chosen is not None:
        text = (
            f"No. Backward repeats it: {several(chosen['nodes'])}, {duration(chosen['us'])}, "
            f"instead of holding {size(chosen['saved_bytes'])}."
            if chosen["saved_bytes"]
            else "No: it is a view, which backward makes again for nothing."
        )
        numbers = {"saved_bytes": chosen["saved_bytes"], "repeat_us": chosen["us"]}
        return Answer(question, text, numbers)
    part = view.part_of(row)
    us = row.us
    if part is not None:
        call, made = part
        us = made.us if made is not None else call.us
    if row.piece:
        outputs = [r for r in view.readers(row) if r.text.startswith("return ")]
        if not outputs:
            return Answer(question, "No: it is gone when the piece returns.", {"kept": False})
        return Answer(
            question,
            "The piece returns it. Whether it is kept is said of the node that picks it from a "
            "call's results.",
        )
    readers = view.readers(row)
    in_backward = [reader for reader in readers if reader.phase == "backward"]
    if not in_backward:
        return Answer(question, "No: no node of backward reads it.", {"kept": False})
    text = (
        f"Yes: {several([reader.name for reader in in_backward])} "
        f"{'reads' if len(in_backward) == 1 else 'read'} it, and {size(row.num_bytes)} are held "
        f"until then. To repeat it would take at least {duration(us)} in backward, and free them."
    )
    numbers = {"kept": True, "num_bytes": row.num_bytes, "next_best_us": us}
    return Answer(question, text, numbers)


def _repeated(view: View, row: NodeRow) -> Answer:
    chosen = next((v for v in view.repeated.values() if row.again in v["nodes"]), None)
    text = f"It repeats {row.again} in backward, for {duration(row.us)}"
    numbers: dict[str, object] = {"again": row.again, "us": row.us}
    if chosen is not None:
        asked = ", as torch.utils.checkpoint asked" if chosen["asked"] else ""
        text += (
            f": with it {several(chosen['nodes'])} come to {duration(chosen['us'])}, and "
            f"{size(chosen['saved_bytes'])} need not be held from forward on{asked}"
        )
        numbers |= {"saved_bytes": chosen["saved_bytes"], "repeat_us": chosen["us"]}
    return Answer("Why is it repeated?", text + ".", numbers)


def _lowered(view: View, row: NodeRow) -> Answer:
    chosen = view.decision("lower_kernels")
    sites = chosen.get("places", [])
    question = "Is it one of fxzero's kernels?"
    mine = [site for site in sites if row.name in str(site)]
    if mine:
        return Answer(question, f"It is replaced: {mine[0]}.", {"lowered": True})
    if chosen.get("skipped"):
        text = f"No: {chosen['skipped']}"
    elif chosen.get("no_table_for"):
        text = f"No: nobody has measured kernels on {chosen['no_table_for']}"
    elif not sites:
        text = "No: nothing in this graph is written as one of them, or none wins here"
    else:
        text = f"No: it is not part of what was replaced ({len(sites)} places were)"
    regions = "inductor" in str(view.analysis.settings.get("lower_regions", ""))
    text += "; Inductor compiles it in a region" if regions else "; torch runs it as it is"
    return Answer(question, text + ".", {"lowered": False})


def _settings(view: View, row: NodeRow) -> tuple[Setting, ...]:
    if row.bucket in view.transfers:
        return transfers.settings(view, view.transfers[row.bucket].lane)
    if row.again or row.name in view.repeated:
        return view.settings(REPEATS)
    if row.phase == "forward" and row.lane == "compute" and row.role in ("compute", "part"):
        return view.settings(KEEPS)
    return view.settings(KERNELS) if row.role in ("compute", "update") else ()
