"""Converts recorded trajectories to decision points with the facts known at each.

A decision point is where a step is about to be queued: the steps before it and their tools have ended. If the
recorder derived a tool's time from the next call (`gap_s`), that time is unknown at the point before that call, and
the clock of the point stops at the end of the step.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.predictors.features import NAN, RECENT, Finished, Progress
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.traces import TracedStep, TracedTrajectory, read_traces


def read_finished(path: Path) -> list[Finished]:
    """All trajectories of a trace, by name or file, in order; truncated ones are censored.

    Raises
    ------
    BadInput
        The file cannot be read, holds no trajectory, or lacks a field that the predictor needs.
    """
    path = trace_file(path)
    traced = list(read_traces(path))
    if not traced:
        raise BadInput(f"trace file {str(path)!r} holds no trajectory: give a file with one per line")
    for number, one in enumerate(traced):
        if one.prompt_tokens is None or any(step.generated_tokens is None for step in one.steps):
            raise BadInput(
                f"trace file {str(path)!r}, trajectory {number + 1}: the predictor needs prompt_tokens and gen_tokens,"
                " and one is null: leave that trajectory out"
            )
    origins = _origins(path)
    policies = {name: version for version, name in enumerate(sorted({one.policy for one in traced}))}
    return [finished(one, origin, policies[one.policy]) for one, origin in zip(traced, origins, strict=True)]


def _origins(path: Path) -> list[dict[str, Any]]:
    """The raw lines, with fields that only the predictor uses."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def finished(one: TracedTrajectory, origin: Mapping[str, Any], policy_version: int) -> Finished:
    """The trajectory with all its decision points."""
    walker = _Walker(one, origin, policy_version)
    points = []
    for index in range(len(one.steps)):
        points.append(walker.point())
        walker.pass_step(one.steps[index], origin["steps"][index])
    last = walker.point()
    return Finished(
        trajectory_id=last.trajectory_id,
        group_id=last.group_id,
        domain=last.domain,
        policy_version=policy_version,
        prompt_tokens=last.prompt_tokens,
        message_tokens=last.message_tokens,
        max_steps=last.max_steps,
        generated_tokens=last.generated_tokens,
        observed_tokens=last.context_tokens - last.prompt_tokens - last.generated_tokens,
        tools_s=last.tools_s,
        duration_s=last.elapsed_s,
        censored=not one.complete,
        started_at_s=points[0].at_s,
        ended_at_s=walker.clock_s,
        points=tuple(points),
        steps_finished=last.steps_finished,
    )


class _Walker:
    """Iterates over a trajectory's steps and makes the decision points."""

    def __init__(self, one: TracedTrajectory, origin: Mapping[str, Any], policy_version: int) -> None:
        start_s = origin.get("t0_s")
        timed = all(step.llm_s is not None for step in one.steps)
        self.clock_s = float(start_s) if start_s is not None and timed else NAN
        self._at_s = self.clock_s
        # Seconds of the last tool if they are known only from the next call.
        self._pending_s: float | None = None
        self._now = Progress(
            trajectory_id=one.trajectory_id,
            group_id=one.group_id,
            domain=one.domain,
            policy_version=policy_version,
            prompt_tokens=one.prompt_tokens or 0,
            context_tokens=one.prompt_tokens or 0,
            message_tokens=one.message_tokens,
            max_steps=one.max_steps,
            elapsed_s=0.0 if timed else NAN,
        )

    def point(self) -> Progress:
        """The decision point with the facts known now."""
        return replace(self._now, at_s=self._at_s)

    def pass_step(self, step: TracedStep, origin: Mapping[str, Any]) -> None:
        """Add a step and its tool."""
        now, tokens = self._now, step.generated_tokens or 0
        # The time of the previous tool is known by now, even if derived from this call.
        times = now.tool_times_s
        pending_s = 0.0 if self._pending_s is None or math.isnan(self._pending_s) else self._pending_s
        if self._pending_s is not None and times:
            times = (*times[:-1], self._pending_s)
        llm_s = step.llm_s if step.llm_s is not None else NAN
        tool_s = NAN if step.tool_s is None or step.human else step.tool_s
        spent_s = 0.0 if math.isnan(tool_s) else tool_s
        derived = "gap_s" in origin
        self._at_s = self.clock_s + llm_s
        self.clock_s = self._at_s + float((origin["gap_s"] if derived else step.tool_s) or 0.0)
        if not derived:
            self._at_s = self.clock_s
        now_s = now.elapsed_s + pending_s + llm_s
        failed = int(origin.get("err") or 0)
        self._now = replace(
            now,
            context_tokens=now.context_tokens + tokens + (step.observation_tokens or 0),
            generated_tokens=now.generated_tokens + tokens,
            steps_finished=now.steps_finished + 1,
            step_tokens=(*now.step_tokens, tokens)[-RECENT:],
            observed_tokens=(*now.observed_tokens, step.observation_tokens or 0)[-RECENT:],
            tool_labels=(*now.tool_labels, step.tool or "none")[-RECENT:],
            tool_times_s=(*times, NAN if derived else tool_s)[-RECENT:],
            tools_s=now.tools_s + pending_s + (0.0 if derived else spent_s),
            tool_errors=now.tool_errors + failed,
            last_tool_failed=failed > 0,
            elapsed_s=now_s + (0.0 if derived else spent_s),
        )
        self._pending_s = tool_s if derived else None


def by_group(finished: Sequence[Finished]) -> dict[str, list[Finished]]:
    """The members of each group, in order."""
    groups: dict[str, list[Finished]] = {}
    for one in finished:
        groups.setdefault(one.group_id, []).append(one)
    return groups
