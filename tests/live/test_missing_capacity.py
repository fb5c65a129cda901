"""Work that waits for engines or tool workers which are gone."""

from __future__ import annotations

from typing import Any

from heddle_dask.live.driver.connection.missing_capacity import MissingCapacity


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


def test_time_in_which_a_job_waits_in_the_queue_does_not_count() -> None:
    missing = MissingCapacity(10.0)
    gone = {"engines_ready": 0, "queued": 1}
    assert missing.too_long(counts(**gone), 0.0) == ""
    assert missing.too_long(counts(**gone), 9.0) == ""
    assert missing.too_long(counts(**gone, engines_queued=1), 5000.0) == ""
    assert missing.too_long(counts(**gone, tool_workers_queued=1), 5000.9) == ""
    assert missing.too_long(counts(**gone), 5001.0) != ""


def test_a_queued_job_of_the_other_kind_is_no_reason_to_wait() -> None:
    missing = MissingCapacity(10.0)
    no_tools = {"tool_cpus": 0, "actions_waiting": 2, "engines_queued": 3}
    assert missing.too_long(counts(**no_tools), 0.0) == ""
    assert missing.too_long(counts(**no_tools), 10.0) != ""
