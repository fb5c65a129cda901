"""What a journal says of attempts whose agents asked for steps themselves: none is replayed, each begins again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.engines.contract import GenerateResult
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.files.resume import recorded_results
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.wire.messages import StepResult
from heddle_dask.live.wire.result_codec import step_body
from heddle_dask.records.journal_lines import GATEWAY_OPENED


def opened(path: str) -> tuple[str, dict[str, Any]]:
    return GATEWAY_OPENED, {"trajectory_id": "t", "branch": path}


def sampled(path: str, tokens: int) -> tuple[str, dict[str, Any]]:
    made = GenerateResult(tuple(range(tokens)), (-0.5,) * tokens, "stop", 0, 0, 0.0, 0.0, 0.0)
    return "step", {"trajectory_id": "t", "branch": path, **step_body(0, [1, 2], StepResult("ok", "e", made))}


def failed(failures: int, tokens: int) -> tuple[str, dict[str, Any]]:
    return "environment-failed", {"trajectory_id": "t", "failures": failures, "tokens": tokens}


@pytest.mark.parametrize(
    ("journal", "path", "begun_again", "lost_tokens"),
    [
        ([sampled("", 3)], "", 0, 0),
        ([opened(""), sampled("", 3), sampled("#1", 4), sampled("#1#1", 5)], "~1", 1, 12),
        # Interrupted twice; the second time before its agent had begun, or after.
        ([opened(""), sampled("", 3), sampled("~1", 2)], "~1", 1, 3),
        ([opened(""), sampled("", 3), opened("~1"), sampled("~1", 2), sampled("~1#2", 1)], "~2", 2, 6),
        # Its environment has failed, and then it was interrupted; and the other way round.
        ([opened(""), sampled("", 3), failed(1, 3), opened("~1"), sampled("~1", 2)], "~2", 1, 5),
        ([opened(""), sampled("", 3), opened("~1"), sampled("~1", 2), failed(2, 2)], "~2", 1, 5),
        ([opened(""), sampled("", 3), opened("~1"), sampled("~1", 2), failed(2, 2), opened("~2")], "~3", 2, 5),
    ],
)
def test_an_attempt_goes_on_in_a_fresh_environment(
    journal: Sequence[tuple[str, dict[str, Any]]], path: str, begun_again: int, lost_tokens: int
) -> None:
    spec = TrajectorySpec(TrajectoryId("t"), GroupId("g"))
    recorded = recorded_results(journal)["t"]
    attempt = Attempt(Task("t", ""), spec, 0, None, "t").continued(recorded)  # type: ignore[arg-type]
    assert (attempt.path, attempt.begun_again) == (path, begun_again)
    assert recorded.lost_tokens + recorded.interrupted_tokens == lost_tokens
    assert attempt.spec.resumed_tokens == attempt.replayed.generated_tokens


def test_the_reward_of_an_attempt_that_begins_again_is_computed_again() -> None:
    reward = ("reward", {"trajectory_id": "t", "reward": 1.0})
    action = ("action", {"trajectory_id": "t", "branch": "!", "action_index": 0, "idempotency_key": "k"})
    kept = recorded_results([sampled("", 3), reward, action])["t"]
    assert kept.reward is not None and "!" in kept.branches
    recorded = recorded_results([opened(""), sampled("", 3), reward, action])["t"]
    assert recorded.reward is None and "!" not in recorded.branches
