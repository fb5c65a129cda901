"""The page of recipes: its figures are those of the rows, and its memory is that of the cost model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from heddle_dask.cost.engine_cost import gpu_of, model_of
from heddle_dask.cost.hardware import kv_capacity_tokens

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "plan_recipes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["conditions"]["model"])
def test_steps_per_second_are_those_of_the_rows(row: dict) -> None:
    times = "\N{MULTIPLICATION SIGN}"
    chosen = [budget["chosen"] for budget in row["budgets"]]
    cells = [
        "-" if one is None else f"{one['engines']} {times} TP {one['degrees'][0]}: {one['steps_per_s']:.1f}"
        for one in chosen
    ]
    assert f"| {row['conditions']['model']} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", [row["conditions"]["model"] for row in ROWS])
def test_memory_is_that_of_the_cost_model(name: str) -> None:
    (line,) = re.findall(rf"^\| `Qwen/{name}` \|.*$", PAGE, re.MULTILINE | re.IGNORECASE)
    model, told = model_of(name), line.split("|")[4].split(", ")
    assert f"{model.weight_bytes / 1e9:.1f} GB" in line
    for tp, text in zip((1, 2, 4, 8), told, strict=True):
        tokens = kv_capacity_tokens(model, gpu_of("h100"), tp)
        number, _, unit = text.strip().partition(" ")
        if unit not in ("k", "M"):
            assert text.strip() == "too little for a context" and tokens < 32_768
        else:
            assert float(number) * {"k": 1e3, "M": 1e6}[unit] == pytest.approx(tokens, rel=0.04)
