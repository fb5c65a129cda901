"""Equal inputs give equal simulations, to the last bit: in other processes, under other hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from worlds.sim_worlds import digest_of

TESTS = Path(__file__).parent.parent


def digests_under(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "worlds.sim_worlds"],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_processes_with_two_hash_seeds_make_the_same_decisions() -> None:
    zero, one = digests_under("0"), digests_under("1")
    assert zero == one
    names, digests, events, _ = zip(*(line.split() for line in zero), strict=True)
    assert names == ("heddle", "heddle-paper", "slime", "oracle", "actions", "pods")
    assert len(set(digests)) == 6, "presets differ"
    assert min(int(count) for count in events) > 1500, "the world was not empty"


def test_a_second_run_in_the_same_process_makes_the_same_decisions() -> None:
    assert digest_of("verl-hybrid") == digest_of("verl-hybrid")
