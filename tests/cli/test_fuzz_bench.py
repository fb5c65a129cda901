"""Bad command lines of measurements, and every command that no other file names: exit code 2 and one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.command_lines import ALL, check

ELSEWHERE = ("rollout", "show", "replay", "doctor", "simulate", "plan", "profile")


@pytest.mark.slow
def test_bad_command_lines_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, monkeypatch, 180, 0, [name for name in ALL.commands if name not in ELSEWHERE])
