"""Which attempts a resumed run still has to make, and what the journal holds of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.value_types import read_from
from heddle_dask.live.driver.programs.action_results import can_be_replayed, key_path
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.programs.branch import Recorded
from heddle_dask.records.journal_lines import GATEWAY_OPENED, RESULTS
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED

if TYPE_CHECKING:
    from heddle_dask.live.driver.files.run_writer import RunWriter

_REPLAYED = RESULTS - {TRAJECTORY_FINISHED}
_LATER_BATCH = re.compile(r"b(\d+)/")


def batch_prefix(batch: int) -> str:
    """What the trajectory ids of a batch of a run begin with; those of the first have no prefix."""
    return f"b{batch}/" if batch else ""


def batch_of(trajectory_id: str) -> int:
    """Number of the batch that a trajectory belongs to, from 0."""
    found = _LATER_BATCH.match(trajectory_id)
    return int(found[1]) if found else 0


def unfinished(attempts: Sequence[Attempt], writer: RunWriter, note: Callable[[str], None]) -> list[Attempt]:
    """Attempts that the store lacks, each with its journalled results.

    A program is run again from its beginning with those results. Where they end, it uses engines and tools. A call
    whose value cannot be replayed is made again. A program whose agent asked for steps itself (`Context.gateway`)
    begins again, in a fresh environment and without those results: the agent would ask otherwise.

    Parameters
    ----------
    note
        Takes one line if there are such calls.
    """
    missing = [attempt for attempt in attempts if attempt.name not in writer]
    wanted = {attempt.name for attempt in missing}
    with read_from(writer.journal_path):
        recorded = recorded_results(((kind, body) for kind, body, _ in writer.recorded()), wanted)
    made_again = sum(results.calls_made_again for results in recorded.values())
    if made_again:
        note(
            f"note: {made_again} tool calls are made again: their values are neither plain data nor signed with the "
            f"key {key_path()}"
        )
    begin_again = sum(results.begun_again for results in recorded.values())
    if begin_again:
        note(f"note: {begin_again} agents were interrupted, and begin again: what they had done does not count")
    return [_continued(attempt, recorded.get(attempt.name), writer) for attempt in missing]


def recorded_results(
    journal: Iterable[tuple[str, Mapping[str, Any]]], wanted: Container[str] | None = None
) -> dict[str, Recorded]:
    """The results of steps and actions in a journal, by trajectory; of those `wanted`, if given."""
    recorded: dict[str, Recorded] = {}
    for kind, body in journal:
        name = body["trajectory_id"]
        if kind not in _REPLAYED or (wanted is not None and name not in wanted):
            continue
        whole = recorded.setdefault(name, Recorded())
        if kind == "environment-failed":
            whole.environment_failures = body["failures"]
            whole.failed.add(body["failures"])
            whole.lost_tokens += body["tokens"]
            continue
        if kind == GATEWAY_OPENED:
            whole.agents_at[body.get("branch", "")] = None
            continue
        mine = whole.branch(body.get("branch", ""))
        if kind in ("step", "step-lost"):
            mine.steps.append(body)
        elif kind == "step-cancelled":
            mine.cancel(body["step_index"])
        elif kind == "reward":
            mine.reward = body
            for other, reward in body.get("group", {}).items():
                if wanted is None or other in wanted:
                    recorded.setdefault(other, Recorded()).reward = reward
        else:
            _take_action(mine, body)
    for whole in recorded.values():
        if whole.begun_again:
            whole.forget_reward()
    return recorded


def _take_action(mine: Recorded, body: Mapping[str, Any]) -> None:
    """Take one journalled action; of one whose value cannot be replayed, its idempotency key."""
    index = body["action_index"]
    call = f"{body['trajectory_id']}{body.get('branch', '')}/a{index}"
    key = body.get("idempotency_key")
    if can_be_replayed(call, body):
        mine.actions[index] = body
        mine.idempotency_keys.pop(index, None)
    elif isinstance(key, str):
        mine.idempotency_keys[index] = key


def _continued(attempt: Attempt, recorded: Recorded | None, writer: RunWriter) -> Attempt:
    if recorded is None:
        return attempt
    try:
        return attempt.continued(recorded)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError):
        raise BadInput(
            f"{writer.journal_path} has results of {attempt.name} that heddle did not write: it cannot be resumed"
        ) from None
