"""The soak under faults: what counts as survived."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.soak_faults.names import NAMES
from benchmarks.soak_faults.play import FaultRow, faults_named

GOOD = FaultRow("none", "none", trajectories=3, exit_code=1, finished=2, intact=2, resume_code=0, total=3)


def test_a_fault_is_survived_when_all_that_was_finished_is_there_and_the_rest_came() -> None:
    assert GOOD.succeeded and replace(GOOD, exit_code=0, resume_code=None).succeeded
    for bad in (
        replace(GOOD, exit_code=None),
        replace(GOOD, intact=1),
        replace(GOOD, total=2),
        replace(GOOD, resume_code=1),
        replace(GOOD, left=["heddle rollout"]),
        replace(GOOD, tracebacks=["OSError"]),
    ):
        assert not bad.succeeded and bad.line().startswith("NOT SO: ")


def test_every_name_has_its_fault() -> None:
    assert [name for name, _ in faults_named(NAMES)] == list(NAMES)
    assert len({fault.told for _, fault in faults_named(NAMES)}) == len(NAMES)
