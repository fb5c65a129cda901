"""Nothing is decided by iterating over a set: every hash seed gives the same journal, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from worlds.core_world import WORLDS

TESTS = Path(__file__).parent.parent


def journal_under(hash_seed: str) -> bytes:
    """What `core_world` prints under that hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "worlds.core_world"],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_journals_are_identical_under_every_hash_seed_for_every_preset() -> None:
    zero = journal_under("0")
    assert journal_under("4294967295") == zero
    lines = [json.loads(line) for line in zero.splitlines()]
    assert {preset for preset, _ in lines} == set(WORLDS)
    commands = [command[0] for _, (_, rows) in lines for command in rows]
    assert commands.count("StartStep") > 100, "the world was not empty"
    assert commands.count("RunAction") > 100
    assert commands.count("PredictRemaining") > 100
    assert commands.count("MoveContext") > 10
