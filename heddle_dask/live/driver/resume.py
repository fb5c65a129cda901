"""Which attempts a resumed run still has to make, and what the journal holds of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from heddle_dask.live.driver.run_writer import RunWriter
from heddle_dask.live.driver.runner import Attempt
from heddle_dask.live.driver.services import Recorded

_LATER_BATCH = re.compile(r"b(\d+)/")


def batch_prefix(batch: int) -> str:
    """What the trajectory ids of a batch of a run begin with; those of the first have no prefix."""
    return f"b{batch}/" if batch else ""


def batch_of(trajectory_id: str) -> int:
    """Number of the batch that a trajectory belongs to, from 0."""
    found = _LATER_BATCH.match(trajectory_id)
    return int(found[1]) if found else 0


def unfinished(attempts: Sequence[Attempt], writer: RunWriter) -> list[Attempt]:
    """Attempts that the store lacks, each with its journalled results.

    A program is run again from its beginning with those results. Where they end, it uses engines and tools.
    """
    recorded = recorded_results(writer.recorded())
    missing = [attempt for attempt in attempts if attempt.spec.trajectory_id not in writer]
    return [_continued(attempt, recorded.get(attempt.spec.trajectory_id)) for attempt in missing]


def recorded_results(journal: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Recorded]:
    """The results of steps and actions in a journal, by trajectory."""
    recorded: dict[str, Recorded] = {}
    for kind, body in journal:
        if kind not in ("step", "step-cancelled", "action"):
            continue
        mine = recorded.setdefault(body["trajectory_id"], Recorded()).branch(body.get("branch", ""))
        if kind == "step":
            mine.steps.append(body)
        elif kind == "step-cancelled":
            mine.cancel(body["step_index"])
        else:
            mine.actions[body["action_index"]] = body
    return recorded


def _continued(attempt: Attempt, recorded: Recorded | None) -> Attempt:
    if recorded is None:
        return attempt
    spec = replace(attempt.spec, resumed_tokens=recorded.generated_tokens)
    return replace(attempt, spec=spec, recorded=recorded)
