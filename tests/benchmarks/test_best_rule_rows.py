"""The kept rows of 8 GPUs, and what README and the page of the cells say of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
SEARCHED = 340
OURS = {
    "sticky-forecast": "default",
    "heddle": "learned",
    "heddle:admission=benchmarks.deadline.admission:Deadline:predictor=oracle": "exact",
}


def gains() -> dict[str, list[float]]:
    """Over the rule that is best on the searched seed: the median of the other seeds, cell by cell."""
    cells: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in (ROOT / "benchmarks" / "best_rules" / "8_gpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells[row["model"], row["workload"]][row["arm"]][row["seed"]] = row["makespan_s"]
    assert len(cells) == 9
    found = defaultdict(list)
    for arms in cells.values():
        rules = [rule for arm, rule in arms.items() if arm not in OURS and len(rule) > 1]
        best = min(rules, key=lambda rule: rule[SEARCHED])
        for arm, name in OURS.items():
            found[name].append(median(best[seed] / arms[arm][seed] for seed in best if seed != SEARCHED))
    return found


def test_the_pages_quote_the_median_cell_and_the_range() -> None:
    found = {name: (median(each), min(each), max(each)) for name, each in gains().items()}
    readme = (ROOT / "README.md").read_text()
    row = next(line for line in readme.splitlines() if "on 8 H100" in line)
    assert [cell.strip() for cell in row.split("|")[2:5]] == [f"{found[n][0]:.2f}" for n in OURS.values()]
    page = " ".join((ROOT / "benchmarks" / "best_rule_cells.md").read_text().split())
    for title, name in (("`sticky-forecast`", "default"), ("`heddle` learned", "learned"), ("exact lengths", "exact")):
        middle, least, most = found[name]
        assert f"{title} {middle:.2f} ({least:.2f}-{most:.2f})" in page
