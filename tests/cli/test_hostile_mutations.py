"""Mutated files of runs, trainings and weights, and those that people hand on: an answer or one line, in bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.command_lines import FUZZ_TIMES
from worlds.hostile_mutations import check_hostile


@pytest.mark.timeout(120 * FUZZ_TIMES)
@pytest.mark.parametrize(
    ("kind", "count"), [("run", 12), ("handed", 60), ("training", 40), ("weights", 40), ("trace", 40)]
)
def test_a_mutated_file_gives_one_line_or_an_answer(kind: str, count: int, tmp_path: Path) -> None:
    check_hostile(tmp_path, kind, count * FUZZ_TIMES, 0)
