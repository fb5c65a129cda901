"""Tool workers of one machine never claim the same core, and a claim ends with its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from heddle_dask.isolation.cores import claim_cores

CORES = {0: 0, 1: 0, 2: 1, 3: 1}
CLAIMS_AND_WAITS = """
import sys
from pathlib import Path
from heddle_dask.isolation.cores import claim_cores
claim = claim_cores(Path(sys.argv[1]), 3, {0: 0, 1: 0, 2: 1, 3: 1})
print(*claim.cores, flush=True)
sys.stdin.read()
"""


def test_workers_share_a_machine_without_sharing_a_core(tmp_path: Path) -> None:
    first, second = claim_cores(tmp_path, 2, CORES), claim_cores(tmp_path, 2, CORES)
    assert (first.cores, second.cores) == ({0: 0, 1: 0}, {2: 1, 3: 1})
    third = claim_cores(tmp_path, 1, CORES)
    assert third.cores == {} and "other tool workers have 4 of its 4 cores" in third.shared_because
    first.close()
    assert claim_cores(tmp_path, 2, CORES).cores == {0: 0, 1: 0}


def test_more_cpus_than_cores_are_declared(tmp_path: Path) -> None:
    claim = claim_cores(tmp_path, 64, CORES)
    assert claim.cores == {} and claim.shared_because == "64 CPUs are declared, and it may run on 4"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_worker_leaves_its_cores(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIMS_AND_WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline().split() == ["0", "1", "2"]
        assert claim_cores(tmp_path, 2, CORES).cores == {}
        worker.kill()
    assert claim_cores(tmp_path, 4, CORES).cores == CORES
