"""The tables of `python -m benchmarks paper` from its rows: Markdown lines, and one JSON object.

A ratio compares two runs of the same trajectories: makespan of the other over makespan of heddle, above 1 if heddle
ends first; it is also the ratio of their tokens per second. Tables show its median over seeds, minimum and maximum.
Forms of heddle run on the degrees that the resource manager chose, unless others are named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.paper.results import BASELINES, OURS, PaperResults, median_of, ratios
from benchmarks.paper.sweep import PAPER_ARMS, PAPER_DEGREES, PaperCell
from benchmarks.row_file import Row
from benchmarks.tables import spread, titled_table

# Throughput of heddle over theirs (7.4).
PAPER_RANGES = {"verl": (1.4, 2.3), "verl-hybrid": (1.1, 2.4), "slime": (1.2, 2.5)}
# Gain of each part of heddle over another choice, Qwen3-14B (7.5).
PART_RANGES = {"scheduling": (1.1, 1.26), "placement and migration": (1.2, 1.5), "degrees": (1.1, 1.3)}

# Columns of the table of an arm's figures; medians over seeds.
_HEADS = (
    "arm",
    "engines",
    "makespan s",
    "tokens/s",
    "of bound",
    "bound that binds",
    "median end s",
    "queued s mean / p99 / longest",
    "preempted / by KV",
    "prefilled per sampled",
    "cached",
    "moves",
    "busy mean / least",
)

Ratios = Sequence[float]


def main_tables(results: PaperResults) -> Iterator[str]:
    """The main result of the evaluation: heddle against the baselines."""
    yield from _conditions(results)
    yield from _at_paper_degree(results)
    yield from _at_best_degree(results)
    yield from _forms(results)


def all_tables(results: PaperResults) -> Iterator[str]:
    """`main_tables`, ablations, degrees, and the figures of all arms."""
    yield from main_tables(results)
    yield from _ablations(results)
    yield from _choices(results)
    yield from _by_degree(results)
    yield from _figures(results)


def _conditions(results: PaperResults) -> Iterator[str]:
    codes = ", ".join(sorted({row["code"] for row in results.runs}))
    yield f"Runs: {len(results.runs)}; seeds {', '.join(map(str, results.seeds))}; code {codes}."
    for model, its in results.conditions.items():
        yield f"{model}: " + ", ".join(f"{name} {value}" for name, value in its.items()) + "."


def _beside(found: Ratios, span: tuple[float, float] | None) -> str:
    """The spread, and its position relative to the paper's range."""
    if not found or span is None:
        return spread(found)
    middle = statistics.median(found)
    where = "below" if middle < span[0] else "above" if middle > span[1] else "inside"
    return f"{spread(found)} {where}"


def _head(name: str, span: tuple[float, float] | None) -> str:
    return name if span is None else f"{name} (paper {span[0]}-{span[1]})"


def _over_cells(results: PaperResults, of: Callable[[PaperCell], Ratios]) -> str:
    """Median and minimum over the cells of the medians over seeds."""
    middles = [statistics.median(found) for cell in results.cells if (found := of(cell))]
    return f"{statistics.median(middles):.2f}, least {min(middles):.2f}" if middles else "-"


def _engines(rows: Sequence[Row]) -> str:
    return rows[0]["engines"] if rows else "-"


def _at_paper_degree(results: PaperResults) -> Iterator[str]:
    def found(arm: str, name: str, cell: PaperCell) -> Ratios:
        theirs = results.at_degree(cell, name, PAPER_DEGREES[cell.model])
        return ratios(theirs, results.chosen(cell, arm))

    lines = []
    for arm in OURS:
        cells = [cell for cell in results.cells if results.chosen(cell, arm)]
        for cell in cells:
            each = [_beside(found(arm, name, cell), PAPER_RANGES.get(name)) for name in BASELINES]
            its = _engines(results.chosen(cell, arm))
            lines.append([arm, cell.name, its, f"TP {PAPER_DEGREES[cell.model]}", *each])
        if cells:
            middles = [_over_cells(results, partial(found, arm, name)) for name in BASELINES]
            lines.append([arm, f"median of {len(cells)}", "", "", *middles])
    heads = ["form", "cell", "its engines", "theirs"]
    heads += [_head(f"over {name}", PAPER_RANGES.get(name)) for name in BASELINES]
    yield from titled_table("Over each baseline at the paper's degree", heads, lines)


def _at_best_degree(results: PaperResults) -> Iterator[str]:
    def found(arm: str, name: str, cell: PaperCell) -> Ratios:
        return ratios(results.at_best(cell, name), results.chosen(cell, arm))

    def over_best(arm: str, cell: PaperCell) -> Ratios:
        best = results.best_baseline(cell)
        return [] if best is None else found(arm, best, cell)

    lines = []
    for arm in OURS:
        cells = [cell for cell in results.cells if results.chosen(cell, arm)]
        for cell in cells:
            each = [f"{spread(found(arm, name, cell))} at {results.best_degree(cell, name)}" for name in BASELINES]
            best = results.best_baseline(cell)
            share = f"{median_of(results.at_best(cell, best), 'bound_share'):.0%}" if best else "-"
            lines.append([arm, cell.name, *each, best or "-", share, spread(over_best(arm, cell))])
        if cells:
            middles = [_over_cells(results, partial(found, arm, name)) for name in BASELINES]
            last = _over_cells(results, partial(over_best, arm))
            lines.append([arm, f"median of {len(cells)}", *middles, "", "", last])
    heads = [
        "form",
        "cell",
        *(f"over {name}" for name in BASELINES),
        "best of them",
        "its share of the bound",
    ]
    heads.append("over the best")
    yield from titled_table("Over each baseline at that baseline's best uniform degree", heads, lines)


def _forms(results: PaperResults) -> Iterator[str]:
    """Every form of heddle over the best baseline at its best uniform degree."""

    def rows(arm: str, chosen: bool, cell: PaperCell) -> list[Row]:
        return results.chosen(cell, arm) if chosen else results.at_best(cell, arm)

    def found(arm: str, chosen: bool, cell: PaperCell) -> Ratios:
        best = results.best_baseline(cell)
        return [] if best is None else ratios(results.at_best(cell, best), rows(arm, chosen, cell))

    lines = []
    for arm in OURS:
        for cell in results.cells:
            line = [arm, cell.name]
            for chosen in (True, False):
                its = rows(arm, chosen, cell)
                share = f"{median_of(its, 'bound_share'):.0%}" if its else "-"
                line += [_engines(its), spread(found(arm, chosen, cell)), share]
            if line[2:] != ["-"] * 6:
                lines.append(line)
        middles = [_over_cells(results, partial(found, arm, chosen)) for chosen in (True, False)]
        if middles != ["-", "-"]:
            lines.append([arm, "median cell", "", middles[0], "", "", middles[1], ""])
    heads = ["form", "cell", "chosen engines", "over the best baseline", "of bound"]
    heads += ["best uniform", "over the best baseline", "of bound"]
    yield from titled_table("Forms of heddle, over the best baseline at its best uniform degree", heads, lines)


def _ablations(results: PaperResults) -> Iterator[str]:
    arms = [arm for arm in PAPER_ARMS if arm.role == "ablations"]
    lines = []
    for cell in results.cells:
        ours = results.chosen(cell, "heddle-oracle")
        gains = [ratios(results.chosen(cell, arm.name), ours) for arm in arms]
        fixed = [
            ratios(rows, ours)
            for rows in (
                results.at_degree(cell, "heddle-oracle", PAPER_DEGREES[cell.model]),
                results.at_degree(cell, "heddle-oracle", 8),
                results.at_best(cell, "heddle-oracle"),
            )
        ]
        if not any(gains) and not any(fixed):
            continue
        spans = [PART_RANGES.get(arm.replaced) for arm in arms] + [PART_RANGES["degrees"]] * 3
        lines.append([cell.name, *(_beside(*pair) for pair in zip([*gains, *fixed], spans, strict=True))])
    heads = [_head(f"{arm.replaced}: {arm.name}", PART_RANGES.get(arm.replaced)) for arm in arms]
    heads += [
        _head(f"degrees: {name}", PART_RANGES["degrees"])
        for name in ("all at the paper's", "all at 8", "all at the best uniform")
    ]
    title = "Ablations: heddle over heddle with a part replaced, exact predictions"
    yield from titled_table(title, ["cell", *heads], lines)


def _choices(results: PaperResults) -> Iterator[str]:
    """Makespans expected by the resource manager, and those of the runs."""
    lines = []
    for row in results.choices:
        cell = PaperCell(row["model"], row["workload"])
        arm = "heddle-oracle" if row["predictor"] == "oracle" else "heddle"
        uniform = {int(degree): seconds for degree, seconds in row["uniform_s"].items()}
        foreseen = min(uniform, key=lambda degree: uniform[degree])
        ran = [run for run in results.chosen(cell, arm) if run["seed"] == row["seed"]]
        best = [run for run in results.at_best(cell, arm) if run["seed"] == row["seed"]]
        came = [
            f"{its[0]['makespan_s']:,.0f}{where}" if its else "-"
            for its, where in ((ran, ""), (best, f" at {results.best_degree(cell, arm)}"))
        ]
        said = [f"{row['predicted_s']:,.0f}", f"{uniform[foreseen]:,.0f} at {foreseen}"]
        lines.append([cell.name, arm, str(row["seed"]), row["engines"], *said, *came])
    heads = [
        "cell",
        "arm",
        "seed",
        "chosen",
        "foreseen s",
        "foreseen best uniform s",
        "came s",
        "best uniform s",
    ]
    yield from titled_table("What the resource manager foresaw", heads, lines)


def _by_degree(results: PaperResults) -> Iterator[str]:
    degrees = sorted({d for cell in results.cells for name in _arms() for d in results.degrees(cell, name)})
    lines = []
    for cell in results.cells:
        for name in _arms():
            first = {
                d: row["makespan_s"]
                for d in results.degrees(cell, name)
                for row in results.at_degree(cell, name, d)
                if row["seed"] == results.seeds[0]
            }
            if first:
                shown = [f"{first[d]:,.0f}" if d in first else "-" for d in degrees]
                lines.append([cell.name, name, *shown])
    title = f"Makespan in seconds at each uniform degree, seed {results.seeds[0]}" if results.seeds else ""
    yield from titled_table(title, ["cell", "arm", *(f"TP {d}" for d in degrees)], lines)


def _arms() -> tuple[str, ...]:
    return (*BASELINES, *OURS)


def _figures(results: PaperResults) -> Iterator[str]:
    """Details of a run that explain its makespan."""
    for cell in results.cells:
        lines = []
        for arm in PAPER_ARMS:
            places: list[list[Row]] = []
            if arm.role != "ablations":
                places.append(results.at_degree(cell, arm.name, PAPER_DEGREES[cell.model]))
                if results.best_degree(cell, arm.name) != PAPER_DEGREES[cell.model]:
                    places.append(results.at_best(cell, arm.name))
            if arm.predictor and results.chosen(cell, arm.name) not in places:
                places.append(results.chosen(cell, arm.name))
            lines += [_figures_of(arm.name, rows) for rows in places if rows]
        yield from titled_table(cell.name, _HEADS, lines)


def _figures_of(name: str, rows: Sequence[Row]) -> list[str]:
    """Medians over seeds."""
    prompt = [row["prefilled_tokens"] + row["cached_tokens"] for row in rows]
    cached = [row["cached_tokens"] / max(1, whole) for row, whole in zip(rows, prompt, strict=True)]
    moves = [sum(kind["started"] for kind in row["moves"].values()) for row in rows]
    queued = " / ".join(f"{median_of(rows, f'queue_{figure}_s'):,.1f}" for figure in ("mean", "p99", "longest"))
    return [
        name,
        _engines(rows),
        spread([row["makespan_s"] for row in rows], 0),
        f"{median_of(rows, 'tokens_per_s'):,.0f}",
        f"{median_of(rows, 'bound_share'):.0%}",
        str(rows[0]["bound_binding"]),
        f"{median_of(rows, 'median_finish_s'):,.0f}",
        queued,
        f"{median_of(rows, 'preemptions'):,.0f} / {median_of(rows, 'kv_preemptions'):,.0f}",
        f"{statistics.median(row['prefilled_tokens'] / row['tokens'] for row in rows):.2f}",
        f"{statistics.median(cached):.0%}",
        f"{statistics.median(moves):,.0f}",
        f"{median_of(rows, 'busy_share_mean'):.0%} / {median_of(rows, 'busy_share_least'):.0%}",
    ]


def as_json_object(results: PaperResults) -> dict[str, object]:
    """All rows, and the gains of heddle for each cell."""
    cells = []
    for cell in results.cells:
        ours, best = results.chosen(cell, "heddle"), results.best_baseline(cell)
        paper = {name: ratios(results.at_degree(cell, name, PAPER_DEGREES[cell.model]), ours) for name in BASELINES}
        own = {name: ratios(results.at_best(cell, name), ours) for name in BASELINES}
        cells.append(
            {
                "model": cell.model,
                "workload": cell.workload,
                "best_baseline": best,
                "over_paper_degree": {name: _rounded(found) for name, found in paper.items()},
                "over_best_degree": {name: _rounded(found) for name, found in own.items()},
                "best_degree": {name: results.best_degree(cell, name) for name in BASELINES},
            }
        )
    return {"cells": cells, "degrees": list(results.choices), "rows": list(results.runs)}


def _rounded(found: Ratios) -> list[float]:
    return [round(one, 4) for one in found]
