"""The best simple rule of each cell, and other strategies over it: searched on some seeds, reported on others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.paper.degrees import fleets_that_fit
from benchmarks.paper.results import ratios
from benchmarks.paper.rule_search import ROUTERS, RuleSearch, SimpleRule
from benchmarks.paper.sweep import PaperArm, PaperCell, PaperConditions, paper_run, told
from benchmarks.row_file import Row, RowFile
from benchmarks.runner import Runner
from benchmarks.tables import markdown, spread
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.published import model_of
from heddle_dask.sim.rollout import Arm


@dataclass(frozen=True, slots=True)
class BestRule:
    """The best simple rules of a cell with their rows on the report seeds, and those of other strategies.

    Attributes
    ----------
    rules
        Best first, by the search seeds: the first one is the best simple rule; the others show how near they came.
    rows, ours
        Rows of the report seeds: by the order of `rules`, and by the text of what is compared with them.
    """

    cell: PaperCell
    rules: tuple[SimpleRule, ...]
    rows: tuple[tuple[Row, ...], ...]
    ours: dict[str, tuple[Row, ...]]


class BestRules:
    """Searches cell by cell; runs that the file has are not repeated.

    Parameters
    ----------
    arms
        What is compared with the rules, each on its own best uniform degree by the search seeds.
    degrees
        TP degrees to try; empty: all at which the model fits.

    Raises
    ------
    BadInput
        A seed is both searched and reported, or no degree is left.
    """

    def __init__(
        self,
        conditions: PaperConditions,
        cells: Sequence[PaperCell],
        arms: Sequence[Arm],
        runner: Runner,
        *,
        search_seeds: Sequence[int],
        seeds: Sequence[int],
        routers: Sequence[str] = ROUTERS,
        degrees: Sequence[int] = (),
    ) -> None:
        both = sorted({*search_seeds} & {*seeds})
        if both:
            raise BadInput(f"seed {both[0]} is both searched and reported: choose other --search-seed or --seed")
        self._conditions, self._cells, self._arms, self._runner = conditions, cells, arms, runner
        self._search_seeds, self._seeds = tuple(search_seeds), tuple(seeds)
        self._routers = routers
        self._degrees = {cell.model: self._degrees_of(cell.model, degrees) for cell in cells}

    def results(self) -> Iterator[BestRule]:
        """Yield every cell when it is done."""
        for cell in self._cells:
            degrees, count = self._degrees[cell.model], self._conditions.drawn(cell).trajectories

            def seconds(rule: SimpleRule, seed: int, cell: PaperCell = cell) -> float:
                return float(self._row(cell, rule.arm, rule.tp_degree, seed)["makespan_s"])

            rules = RuleSearch(self._routers, degrees, count, self._search_seeds).best(seconds)
            rows = [self._rows(cell, rule.arm, rule.tp_degree) for rule in rules]
            ours = {arm.name: self._rows(cell, arm.name, self._best_degree(cell, arm.name)) for arm in self._arms}
            yield BestRule(cell, tuple(rules), tuple(rows), ours)

    def _degrees_of(self, model: str, wanted: Sequence[int]) -> tuple[int, ...]:
        conditions = self._conditions
        fit = tuple(fleets_that_fit(model_of(model), conditions.cluster, conditions.max_context_tokens))
        found = tuple(degree for degree in fit if degree in wanted or not wanted)
        if not found:
            raise BadInput(f"--degrees: {model} fits at {', '.join(map(str, fit))}")
        return found

    def _best_degree(self, cell: PaperCell, text: str) -> int:
        degrees = self._degrees[cell.model]
        if len(degrees) == 1:
            return degrees[0]
        return min(
            degrees,
            key=lambda degree: statistics.fmean(
                self._row(cell, text, degree, seed)["makespan_s"] for seed in self._search_seeds
            ),
        )

    def _rows(self, cell: PaperCell, text: str, degree: int) -> tuple[Row, ...]:
        return tuple(self._row(cell, text, degree, seed) for seed in self._seeds)

    def _row(self, cell: PaperCell, text: str, degree: int, seed: int) -> Row:
        arm = PaperArm(text, "baselines", Arm.parse(text))
        degrees = replace(self._conditions.cluster, tp=degree).tp_degrees
        return self._runner.row(paper_run(self._conditions, cell, seed, arm, degrees), told)


def best_rule_tables(found: Sequence[BestRule]) -> Iterator[str]:
    """A Markdown table: the best simple rules of each cell, and the other strategies over the first of them."""
    heads = (
        "cell",
        "strategy",
        "engines",
        "makespan s, median (least-most)",
        "of bound",
        "best rule over it",
    )
    yield from markdown(heads, _best_rule_lines(found))


def _best_rule_lines(found: Sequence[BestRule]) -> Iterator[Sequence[str]]:
    for each in found:
        lines = [(f"{place}. {rule.arm}", rows) for place, (rule, rows) in _placed(each)]
        lines += list(each.ours.items())
        for name, rows in lines:
            seconds = [row["makespan_s"] for row in rows]
            share = statistics.median(row["bound_share"] for row in rows)
            gains = ratios(each.rows[0], rows)
            yield (
                each.cell.name,
                f"`{name}`" if name in each.ours else name.replace(" ", " `", 1) + "`",
                str(rows[0]["engines"]),
                spread(seconds, 0),
                f"{share:.0%}",
                spread(gains),
            )


def _placed(found: BestRule) -> Iterator[tuple[int, tuple[SimpleRule, tuple[Row, ...]]]]:
    return enumerate(zip(found.rules, found.rows, strict=True), start=1)


def as_json_object(found: Sequence[BestRule], rows: RowFile) -> dict[str, object]:
    """The rules of each cell, and all rows, those of the search included."""
    cells = [
        {
            "model": each.cell.model,
            "workload": each.cell.workload,
            "rules": [{"arm": rule.arm, "tp_degree": rule.tp_degree} for rule in each.rules],
            "gains": {
                name: [round(gain, 4) for gain in ratios(each.rows[0], rows)] for name, rows in each.ours.items()
            },
        }
        for each in found
    ]
    return {"cells": cells, "rows": rows.rows("run")}
