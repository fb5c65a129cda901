"""Memory and time in cluster files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.amounts import memory_bytes_of, seconds_of, slurm_memory, slurm_time

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("16GB", 16 * 10**9),
        ("16 gb", 16 * 10**9),
        ("16GiB", 16 << 30),
        ("16G", 16 << 30),  # as in #SBATCH --mem=16G
        ("500MB", 5 * 10**8),
        ("1.5T", 3 << 39),
        ("4096M", 4096 << 20),
    ],
)
def test_memory(text, memory_bytes):
    assert memory_bytes_of(text, "memory") == memory_bytes


@pytest.mark.parametrize("text", ["", "16", 16, "GB", "-1GB", "0GB", "16XB", "16GBs", "1e3GB", None, True, "9999999P"])
def test_memory_is_refused(text):
    with pytest.raises(BadInput, match=r"^memory is .*: (give a number with a unit|use more than nothing)"):
        memory_bytes_of(text, "memory")


@given(st.integers(1, 1 << 50))
def test_slurm_gets_the_memory_and_less_than_a_mebibyte_more(memory_bytes):
    asked = memory_bytes_of(slurm_memory(memory_bytes), "memory")
    assert 0 <= asked - memory_bytes < MIB


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("02:00:00", 7200),
        ("1-00:00:00", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("05:30", 330),  # minutes and seconds, as SLURM reads it
        ("90s", 90),
        ("30min", 1800),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1d", 86400),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_seconds(text, seconds):
    assert seconds_of(text, "walltime") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "90", "UNLIMITED", "1:2:3:4", "-5", "-1-00", "0s", 0, -3, True, None, float("nan"), "2 hours", "1-"],
)
def test_seconds_are_refused(text):
    with pytest.raises(BadInput, match=r"^walltime is .*: (give HH:MM:SS|use more than 0)"):
        seconds_of(text, "walltime")


@given(st.integers(1, 2**31 - 1))
def test_a_time_in_slurms_form_is_read_back(seconds):
    assert seconds_of(slurm_time(seconds), "walltime") == seconds


@given(st.floats(0.001, 10**6))
def test_a_time_is_never_shortened(seconds):
    assert 0 <= seconds_of(slurm_time(seconds), "walltime") - seconds < 1


@given(st.text(max_size=12) | st.from_regex(r"\A[0-9:. -]{0,12}\Z"))
def test_any_text_is_read_or_refused_in_one_line(text):
    for read in (memory_bytes_of, seconds_of):
        try:
            assert read(text, "value") > 0
        except BadInput as error:
            assert "\n" not in str(error)
