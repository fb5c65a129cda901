"""Bad command lines of simulations, plans and profiles: exit code 2 and one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.command_lines import check


@pytest.mark.slow
def test_bad_command_lines_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, monkeypatch, 360, 0, ("simulate", "plan", "profile"))
