"""The strategy of the tutorial does what its page says of it, in the simulation of the page with fewer trajectories."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from worlds.markdown_blocks import DOCS, blocks_of

from heddle_dask.cli.main import heddle

PAGE = DOCS / "own-strategy.md"


def test_the_half_way_mark_comes_earlier_and_the_end_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = [block for block in blocks_of(PAGE) if block.words == ("file=shortest_first.py",)]
    (tmp_path / "shortest_first.py").write_text(file.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shortest_first", raising=False)
    base = "heddle:predictor=oracle:admission=unlimited"
    options = "--workload coding --cluster hopper8 --tp 2 --slots 16 --trajectories 208 --seeds 1 --json"
    arms = f"{base},{base}:scheduling=shortest_first:ShortestFirst"
    ended = CliRunner().invoke(heddle, ["simulate", *options.split(), "--strategy", arms], catch_exceptions=False)
    longest, shortest = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert shortest["strategy"].endswith(":scheduling=shortest_first:ShortestFirst")
    assert shortest["median_finish_s"] < longest["median_finish_s"] / 2
    assert shortest["makespan_s"] > longest["makespan_s"]
