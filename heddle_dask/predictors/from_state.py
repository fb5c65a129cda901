"""Converts the controller's records of a trajectory to the inputs of predictors."""

from __future__ import annotations

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.predictors.features import NAN, RECENT, Finished, Progress


def progress_of(trajectory: Trajectory, at: float) -> Progress:
    """The current decision point of a trajectory; of a running tool only the label is known."""
    done, running = trajectory.actions_done, trajectory.open_labels[-RECENT:]
    labels = [label for label, _, _ in done[-RECENT:]] + running
    times_s = [seconds for _, seconds, _ in done[-RECENT:]] + [NAN] * len(running)
    return Progress(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.spec.group_id,
        domain=trajectory.spec.domain,
        policy_version=trajectory.policy_version,
        prompt_tokens=trajectory.spec.prompt_tokens or trajectory.first_context_tokens,
        message_tokens=trajectory.spec.message_tokens,
        context_tokens=trajectory.context_tokens,
        generated_tokens=trajectory.generated_tokens,
        steps_finished=trajectory.steps_finished,
        max_steps=trajectory.spec.max_steps,
        step_tokens=tuple(trajectory.step_tokens[-RECENT:]),
        observed_tokens=tuple(trajectory.observed_tokens[-RECENT:]),
        tool_labels=tuple(labels[-RECENT:]),
        tool_times_s=tuple(times_s[-RECENT:]),
        tools_s=trajectory.tools_s,
        tool_errors=sum(not ok for _, _, ok in done),
        last_tool_failed=bool(done) and not done[-1][2],
        elapsed_s=_elapsed_s(trajectory, at),
        at_s=at,
        prompt_key=trajectory.spec.prompt_key,
        lineage=_lineage(trajectory),
    )


def finished_of(trajectory: Trajectory, status: str, at: float) -> Finished:
    """A trajectory at its end; censored if it did not end by itself or began in an earlier session."""
    prompt_tokens = trajectory.spec.prompt_tokens or trajectory.first_context_tokens
    return Finished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.spec.group_id,
        domain=trajectory.spec.domain,
        policy_version=trajectory.policy_version,
        prompt_tokens=prompt_tokens,
        message_tokens=trajectory.spec.message_tokens,
        max_steps=trajectory.spec.max_steps,
        generated_tokens=trajectory.generated_tokens,
        observed_tokens=max(0, trajectory.context_tokens - prompt_tokens - trajectory.generated_tokens),
        tools_s=trajectory.tools_s,
        duration_s=_elapsed_s(trajectory, at),
        censored=status != "completed" or trajectory.spec.resumed_tokens > 0,
        started_at_s=at - _elapsed_s(trajectory, at),
        ended_at_s=at,
        steps_finished=trajectory.steps_finished,
        prompt_key=trajectory.spec.prompt_key,
        lineage=_lineage(trajectory),
    )


def _lineage(trajectory: Trajectory) -> str:
    """The line of training of the version that samples it; empty before the first result."""
    return trajectory.kv_version.lineage if trajectory.kv_version is not None else ""


def _elapsed_s(trajectory: Trajectory, at: float) -> float:
    """Seconds since admission; 0 for a trajectory that still waits for it."""
    return 0.0 if trajectory.state is TrajectoryState.SUBMITTED else at - trajectory.admitted_at
