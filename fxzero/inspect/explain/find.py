"""What somebody names: a pass, a bucket, a parameter, a node or a module, in that order."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from fxzero.errors import ConfigError, nearest
from fxzero.inspect.analysis import Analysis
from fxzero.inspect.explain import nodes, subjects
from fxzero.inspect.explain.explanation import Explanation
from fxzero.inspect.explain.view import View


def explain(analysis: Analysis, what: str) -> list[Explanation]:
    """Say why something is as it is, in each graph that has it.

    Args:
        analysis: with details.
        what: a name; of modules also a pattern, ``blocks.*.mlp``.

    Raises:
        ConfigError: nothing is called so; the message names what is nearest.
    """
    views = [View(analysis, detail) for detail in analysis.details]
    found = [one for view in views for one in _in_graph(view, what)]
    if found:
        return found
    owner = analysis.names.get(what)
    if owner and owner != what:
        return explain(analysis, owner)  # tied: a graph knows it by its first name
    if owner:
        raise ConfigError(
            f"{what!r} is a parameter, and no transfer of this step moves it: on one rank nothing "
            "is gathered or reduced. Ask with --world-size 2, or for a node that reads it."
        )
    below = [name for name in analysis.names if name == what or name.startswith(f"{what}.")]
    if below and not any(analysis.names[name] for name in below):
        raise ConfigError(
            f"{what!r} is in the model, and this step reads no parameter of it: nothing is "
            "gathered for it, and no gradient reaches it."
        )
    names = {name for view in views for name in _names(view)}
    raise ConfigError(
        f"{what!r} is no pass, bucket, parameter, node or module of this step: "
        f"{nearest(what, names)} fxzero inspect shows passes and buckets, with --code the nodes."
    )


def _in_graph(view: View, what: str) -> list[Explanation]:
    """What has a name in one graph: one, but several modules may fit a pattern, and several pieces
    have a node of a name."""
    passes = dict(subjects.passes_of(view))
    if what in passes:
        return [subjects.of_pass(view, what, passes[what])]
    if what in view.transfers or what in view.kept:
        return [subjects.of_bucket(view, what)]
    if any(what in transfer.params for transfer in view.transfers.values()):
        return [subjects.of_parameter(view, what)]
    rows = [row for row in view.detail.nodes if row.name == what]
    outline = [row for row in rows if not row.piece]
    if rows:
        return [nodes.of_node(view, row) for row in outline or rows]
    modules = [name for name in _modules(view) if what == name or fnmatchcase(name, what)]
    return [subjects.of_module(view, name) for name in modules]


def _modules(view: View) -> list[str]:
    """Modules that nodes belong to, and those around them."""
    found: dict[str, None] = {}
    for row in (*view.detail.nodes, *view.inside("")):
        for name in (row.layer, row.module):
            parts = name.split(".") if name else []
            for count in range(1, len(parts) + 1):
                found[".".join(parts[:count])] = None
    return list(found)


def _names(view: View) -> Iterator[str]:
    yield from (row.name for row in view.detail.nodes)
    yield from _modules(view)
    yield from view.transfers
    yield from (param for transfer in view.transfers.values() for param in transfer.params)
    yield from (name for name, _ in subjects.passes_of(view))
