"""A predictor that has learnt before its session starts: a saved one, or from the store of a run, or from a trace.

The scheduler imports this module when it starts. XGBoost, SciPy and Zarr take over a second of CPU to import, so the
functions import what needs them: in the scheduler that is in a thread (`HeddleScheduler.start_session`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.environments.replay import replay_payload
from heddle_dask.environments.splits import prompt_key
from heddle_dask.predictors.from_steps import PastStep, PastTrajectory, finished_from_steps, past_of
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.workloads.planned import is_replayable, planned_trace
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.traces import read_traces

if TYPE_CHECKING:
    from heddle_dask.predictors.learned import LearnedPredictor

# No context is clipped: recorded trajectories are learnt from, whatever the engines allow.
_ANY_CONTEXT_TOKENS = 1 << 40


def warm_predictor(source: str, options: Mapping[str, Any]) -> LearnedPredictor:
    """The predictor that has learnt from `source`.

    Parameters
    ----------
    source
        A file that `predictors.stored.save_predictor` wrote; the directory of a run's store; or a trace, by name
        or file (``.jsonl``, ``.jsonl.gz``), whose token counts and tool times are taken times `token_scale` and
        `tool_scale`.

    Raises
    ------
    BadInput
        The source cannot be read, or holds no trajectory to learn from.
    """
    from heddle_dask.predictors.learned import LearnedPredictor
    from heddle_dask.predictors.stored import load_predictor

    path = trace_file(source)
    if path.is_dir():
        past = _of_store(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        past = past_of_trace(path, options["token_scale"], options["tool_scale"])
    else:
        return load_predictor(source)
    finished = [finished_from_steps(one) for one in past]
    if not finished:
        raise BadInput(f"predictor: {source!r} holds no trajectory to learn from")
    predictor = LearnedPredictor()
    predictor.warm_start(finished)
    return predictor


def check_warm(source: str) -> None:
    """Refuse at once, without learning, a source that `warm_predictor` could not read.

    Raises
    ------
    BadInput
        There is no such file or store, or it cannot be read.
    """
    path = trace_file(source)
    if path.is_dir():
        from heddle_dask.records.reader import RunReader

        RunReader(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        next(read_traces(path), None)
    else:
        from heddle_dask.predictors.stored import load_predictor

        load_predictor(source)


def past_of_trace(path: Path, token_scale: float, tool_scale: float) -> Iterator[PastTrajectory]:
    """The trajectories of a trace, by name or file, as a session that replays it would see them.

    Raises
    ------
    BadInput
        The file is no trace.
    """
    path = trace_file(path)
    domain = f"replay:{path.name}"
    for trace in filter(is_replayable, read_traces(path)):
        plan = planned_trace(
            trace,
            domain=domain,
            token_scale=token_scale,
            tool_scale=tool_scale,
            max_context_tokens=_ANY_CONTEXT_TOKENS,
        )
        past = past_of(plan, censored=not trace.complete)
        # As much of the task of a replay as its identity needs.
        task = Task(trace.trajectory_id, "", replay_payload(trace))
        yield replace(past, prompt_key=prompt_key(domain, task))


def _of_store(path: Path) -> Iterator[PastTrajectory]:
    from heddle_dask.records.reader import RunReader

    return (_past_of_record(record) for record in RunReader(path) if _first_branch(record))


def _first_branch(record: TrajectoryRecord) -> list[StepRecord]:
    """The steps of the trajectory itself: a fork is another one to the controller, and so to the predictor."""
    return [step for step in record.steps if step.branch == 0]


def _past_of_record(record: TrajectoryRecord) -> PastTrajectory:
    tools: dict[int, list[tuple[str, float, bool]]] = {}
    for action in record.actions:
        if action.branch:
            continue
        done = (action.label, action.run_s, action.status == "ok")
        tools.setdefault(action.after_step, []).append(done)
    own = _first_branch(record)
    starts = [step.token_start for step in own[1:]] + [own[-1].token_stop]
    steps = [
        PastStep(
            step.generated_tokens,
            max(0, start - step.token_stop),
            llm_s=step.finished_s - step.submitted_s,
            tools=tuple(tools.get(step.step_index, ())),
        )
        for step, start in zip(own, starts, strict=True)
    ]
    version = int(record.branches[0].policy_version.max(initial=0))
    return PastTrajectory(
        trajectory_id=record.trajectory_id,
        group_id=record.group_id,
        domain=record.domain or record.environment,
        policy_version=max(0, version),
        prompt_tokens=own[0].token_start,
        censored=record.status != "completed",
        steps=steps,
        message_tokens=record.message_tokens,
        max_steps=record.max_steps,
        prompt_key=record.prompt_key,
    )
