"""``python -m benchmarks records``: the journal does not grow with what the store has, and memory not with the run."""

from __future__ import annotations

import pytest

from benchmarks.run_files import CONTROL_BYTES_PER_STEP, STEPS, measure_run_files
from heddle_dask.core.errors import BadInput


def test_a_row_says_what_was_written_and_what_stayed(tmp_path) -> None:
    (row,) = measure_run_files([130], 8_000, tmp_path)
    assert (row.trajectories, row.tokens) == (130, 8_000)
    assert row.control_bytes == 130 * STEPS * CONTROL_BYTES_PER_STEP
    # Sampled tokens twice, the others once: base64 of ids, and of logprobs of those that are sampled.
    assert row.results_bytes > 130 * 8_000 * (4 + 4 + 2 + 2)
    assert row.journal_bytes == pytest.approx(row.results_bytes + row.control_bytes, rel=0.02), "too few to drop any"
    assert row.store_bytes > 130 * 8_000 * 4
    assert row.trajectories == 130
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_without_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match="--tokens 10: use at least 40"):
        list(measure_run_files([1], 10))
