"""The kept rows about what the forecast assumes at first, and the figures that the list of experiments quotes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]
TODAY, TRIED = "0.5 per e-fold", "0.35 of the longest"


def test_the_list_quotes_the_mean_ratio_of_each_cell() -> None:
    cells: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in (ROOT / "benchmarks" / "forecast_prior.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells[row["cell"]][row["seed"]][row["prior"]] = row["makespan_s"]

    def ratio(cell: str, *seeds: int) -> str:
        found = cells[cell]
        return f"{fmean(found[seed][TRIED] / found[seed][TODAY] for seed in seeds or found):.2f}"

    said = " ".join((ROOT / "docs" / "experiments" / "README.md").read_text().split())
    assert f"search {ratio('search')}, math {ratio('math')}, the pair on an H100 {ratio('pair')}" in said
    assert f"but coding {ratio('coding')}, beyond" in said and f"({ratio('coding', 330, 331, 332)})" in said
