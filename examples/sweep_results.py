"""What a sweep came to: a table, a CSV and a JSON file, and a plot.

    python examples/sweep_results.py outputs/sweep/2026-01-31/12-00-00

The table has the best job first, and jobs without a value last, with the reason. Beside it, in
the folder: results.csv, results.json, and results.png, a point a job over the setting with most
values.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

from examples.sweeps import RESULT, Result

Jobs = Mapping[str, Result]


def gathered(folder: Path) -> Jobs:
    """The results of a sweep's jobs by their folders, the best first; unfinished ones last.

    Raises:
        SystemExit: there are none.
    """
    told = sorted(folder.glob("**/.hydra/overrides.yaml"))
    folders = {p.parent.parent for p in told} | {p.parent for p in folder.glob(f"**/{RESULT}")}
    jobs = {
        str(job.relative_to(folder)): Result.read(job)
        if (job / RESULT).exists()
        else Result(_told(job), None, reason="it has not ended, or was ended from outside")
        for job in sorted(folders - {folder})
    }
    if not jobs:
        sys.exit(f"{folder} has no jobs of a sweep: name the folder that hydra.sweep.dir named")
    return dict(sorted(jobs.items(), key=lambda item: item[1].objective))


def _told(job: Path) -> list[str]:
    """What Hydra has noted that a job was told."""
    return [str(override) for override in OmegaConf.load(job / ".hydra" / "overrides.yaml")]


def settings_of(result: Result) -> dict[str, str]:
    """What a job was told, by setting."""
    return dict(override.split("=", 1) for override in result.overrides)


def varied(jobs: Jobs) -> list[str]:
    """The settings in which jobs differ."""
    told = [settings_of(result) for result in jobs.values()]
    names = dict.fromkeys(name for settings in told for name in settings)
    return [name for name in names if len({settings.get(name) for settings in told}) > 1]


def rows_of(jobs: Jobs) -> list[dict[str, Any]]:
    """A row a job: folder, what it was told, value, figures, reason."""
    names = varied(jobs)
    figures = list(dict.fromkeys(name for result in jobs.values() for name in result.figures))
    return [
        {
            "job": folder,
            **{name: settings_of(result).get(name) for name in names},
            "value": result.value,
            **{name: result.figures.get(name) for name in figures},
            "reason": result.reason,
        }
        for folder, result in jobs.items()
    ]


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """The figures, and below them why a job has none."""
    shown = [name for name in rows[0] if name != "reason"]
    table = Table(*shown)
    for row in rows:
        table.add_row(*(_shown(name, row[name]) for name in shown))
    console.print(table)
    for row in rows:
        if row["reason"]:
            why = row["reason"].splitlines()[-1]
            console.print(f"job {row['job']}: {why}", markup=False, highlight=False)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(jobs: Jobs, rows: list[dict[str, Any]], folder: Path) -> None:
    """`results.csv` and `results.json`."""
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    data = {name: asdict(result) for name, result in jobs.items()}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def plot(rows: list[dict[str, Any]], file: Path, names: list[str]) -> None:
    """A point a job: the setting with most values to the right, another one as colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {name: sorted({str(row[name]) for row in rows}, key=_order) for name in names}
    by_count = sorted(names, key=lambda name: -len(values[name]))
    across = by_count[0] if by_count else "job"
    places = values.get(across) or sorted({str(row["job"]) for row in rows}, key=_order)
    colour = by_count[1] if len(by_count) > 1 else None
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for shown in values[colour] if colour else [None]:
        some = [row for row in rows if colour is None or str(row[colour]) == shown]
        done = [row for row in some if row["value"] is not None]
        axes.plot(
            [places.index(str(row[across])) for row in done],
            [row["value"] for row in done],
            "o",
            label=None if colour is None else f"{colour}={shown}",
        )
    lost = [row for row in rows if row["value"] is None]
    axes.plot(
        [places.index(str(row[across])) for row in lost],
        [0.02] * len(lost),
        "x",
        color="grey",
        transform=axes.get_xaxis_transform(),
        label="no result" if lost else None,
    )
    axes.set(xlabel=across, ylabel="value, less is better", xticks=range(len(places)))
    axes.set_xticklabels(places, rotation=30 if len(places) > 6 else 0)
    if colour or lost:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def main() -> None:
    """Gather, print, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a sweep: what hydra.sweep.dir named")
    folder = parser.parse_args().folder
    jobs = gathered(folder)
    rows = rows_of(jobs)
    print_table(rows, Console())
    write(jobs, rows, folder)
    plot(rows, folder / "results.png", varied(jobs))
    print(f"results.csv, results.json and results.png are in {folder}")


if __name__ == "__main__":
    main()
