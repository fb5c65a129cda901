"""The kept rows about the first fill and the overfill of `kv-forecast`, and the figures that pages quote."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]


def test_the_list_quotes_the_mean_ratio_of_each_cell() -> None:
    cells: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in (ROOT / "benchmarks" / "forecast_prior.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells[row["cell"]][row["seed"]][row["arm"]] = row["makespan_s"]

    def ratio(cell: str, of: str = "now", over: str = "before") -> str:
        assert len(cells[cell]) >= 6
        return f"{fmean(arms[of] / arms[over] for arms in cells[cell].values()):.3f}"

    said = " ".join((ROOT / "benchmarks" / "experiments.md").read_text().split())
    assert f"pair on an H100 {ratio('pair')}, 8B search {ratio('search')}, math {ratio('math')}" in said
    assert f"coding {ratio('coding')} of before" in said
    assert f"{ratio('pair', over='capped 112')} of the time of `cache-aware` with 112 alive" in said
    assert f"and {ratio('pair', over='capped 128')} with 128" in said
    unseen = [ratio("pair, unseen", over=capped) for capped in ("capped 112", "capped 128")]
    assert f"on 32 others (104 to 135) it takes {' and '.join(unseen)}" in said
    assert f"it was {ratio('pair', 'before', 'capped 112')} and {ratio('pair', 'before', 'capped 128')}" in said
