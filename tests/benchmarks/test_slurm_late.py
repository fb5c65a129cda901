"""The bound of engines that join over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.slurm_late import late_jobs, least_makespan_s


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=6).map(lambda later: [0.0, *later]),
    st.integers(1, 16),
    st.floats(0, 5000),
    st.floats(0, 50),
)
def test_the_slots_have_done_the_work_then_and_not_before(
    joined_s: list[float], slots: int, work_s: float, longest_s: float
) -> None:
    end_s = least_makespan_s(joined_s, slots, work_s, longest_s)
    done_s = slots * sum(max(0.0, end_s - at_s) for at_s in joined_s)
    assert done_s == pytest.approx(work_s, abs=1e-6) or (end_s == longest_s and done_s >= work_s - 1e-6)


def test_the_figures_of_a_run_are_those_of_its_journal() -> None:
    class Record:
        generated_tokens = 600

    lines = [
        (["EngineJoined", 5.0, ["a", 8, 4096]], []),
        (["EngineJoined", 9.0, ["b", 8, 4096]], []),
        (["StepFinished", 10.0, ["t", 0, 0], "a", 300, 0, "stop"], []),
        (["StepFinished", 11.0, ["t", 1, 0], "a", 0, 0, "abort"], []),
        (["StepFinished", 20.0, ["t", 1, 1], "b", 300, 0, "stop"], []),
        (["TrajectoryEnded", 21.0, "t", "completed"], []),
    ]
    late = late_jobs(lines, [Record()])
    assert (late.joined_s, late.steps, late.makespan_s) == ((0.0, 4.0), (1, 1), 16.0)
    assert late.bound_s == 12.0, "600 tokens of 20 ms, alone" and late.bound_share == 0.75
