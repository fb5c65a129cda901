"""Work that waits for engines or tool workers which are gone."""

from __future__ import annotations

from typing import Any

from heddle_dask.live.driver.missing_capacity import MissingCapacity


def counts(**values: int) -> dict[str, Any]:
    none_wait = {"queued": 0, "not_admitted": 0, "actions_waiting": 0}
    return {**none_wait, "engines_ready": 1, "tool_cpus": 4, **values}


def test_what_is_missing_is_named_after_the_limit_and_a_return_begins_the_wait_again() -> None:
    missing = MissingCapacity(10.0)
    assert missing.too_long({}, 0.0) == ""
    assert missing.too_long(counts(engines_ready=0, queued=1), 1.0) == ""
    assert missing.too_long(counts(queued=1), 9.0) == ""
    assert missing.too_long(counts(engines_ready=0, not_admitted=3), 10.0) == ""
    assert missing.too_long(counts(engines_ready=0, queued=3), 19.9) == ""
    lost = "the last engine is gone, and none has come back for 10 s"
    assert missing.too_long(counts(engines_ready=0, queued=3), 20.0) == lost
    assert missing.too_long(counts(), 21.0) == ""
    assert missing.too_long(counts(tool_cpus=0, actions_waiting=1), 22.0) == ""
    lost = "the last tool worker is gone, and none has come back for 10 s"
    assert missing.too_long(counts(tool_cpus=0, actions_waiting=1), 32.0) == lost


def test_nothing_is_missing_while_no_work_waits_for_it() -> None:
    missing = MissingCapacity(1.0)
    for now_s in range(5):
        assert missing.too_long(counts(engines_ready=0, tool_cpus=0), float(now_s)) == ""
