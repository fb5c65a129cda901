"""Bad command lines of rollouts and what reads them: exit code 2 and one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.command_lines import check


@pytest.mark.slow
def test_bad_command_lines_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, monkeypatch, 200, 0, ("rollout", "show", "replay", "doctor"))
