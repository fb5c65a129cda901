"""One trajectory as passages to read: the author of each, its step or action, and how long that took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.records.token_record import Attribution, Segment
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryRecord


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of tokens of one author, or an action (`author` is None).

    Attributes
    ----------
    times
        Seconds by name; unknown ones are left out.
    """

    title: str
    author: Attribution | None
    text: str
    tokens: int
    times: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "author": None if self.author is None else self.author.name.lower(),
            "title": self.title,
            "text": self.text,
            "tokens": self.tokens,
            "times": self.times,
        }


def trajectory_facts(record: TrajectoryRecord) -> dict[str, Any]:
    return {
        "trajectory_id": record.trajectory_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "environment": record.environment,
        "sample_index": record.sample_index,
        "seed": record.seed,
        "status": record.status,
        "cause": record.cause,
        "reward": record.reward,
        "reward_cause": record.reward_cause,
        "reward_parts": dict(record.reward_parts),
        "metadata": dict(record.metadata),
        "branches": len(record.branches),
        "steps": len(record.steps),
        "actions": len(record.actions),
        "tokens": record.generated_tokens,
        "seconds": round(record.finished_s - record.started_s, 4),
    }


def passages(record: TrajectoryRecord, template: ChatTemplate | None) -> Iterator[Passage]:
    """Passages in order; actions follow the step that they came after.

    Without a template the text says only how many tokens there are.
    """
    for number, branch in enumerate(record.branches):
        if number:
            yield Passage(f"branch {number}", None, "", 0, {})
        steps = {step.token_start: step for step in record.steps if step.branch == number}
        after_none = {action.after_step for action in record.actions} - {s.step_index for s in steps.values()}
        yield from _actions(record, number, after_none)
        for segment in branch.segments():
            if segment.attribution is Attribution.SHARED:
                # Its text is that of an earlier branch.
                yield _passage("shared with an earlier branch", segment, None, {})
            elif segment.attribution is Attribution.PREFIX:
                yield _passage("replayed of another attempt", segment, template, {})
            elif segment.attribution is not Attribution.POLICY:
                yield _passage(segment.attribution.name.lower(), segment, template, {})
            else:
                yield from _sampled(record, segment, steps, template)


def _sampled(
    record: TrajectoryRecord,
    segment: Segment,
    steps: dict[int, StepRecord],
    template: ChatTemplate | None,
) -> Iterator[Passage]:
    """A sampled stretch, cut at the steps that begin in it: two may follow each other directly."""
    cuts = sorted({segment.start, *(at for at in steps if segment.start < at < segment.stop)})
    for start, stop in zip(cuts, [*cuts[1:], segment.stop], strict=True):
        part = Segment(
            segment.attribution, start, stop, segment.token_ids[start - segment.start : stop - segment.start]
        )
        step = steps.get(start)
        if step is None:
            yield _passage("step that did not end", part, template, {})
            continue
        times = _known(queue=step.queue_s, prefill=step.prefill_s, decode=step.decode_s)
        title = f"step {step.step_index} on {step.engine_id}, {step.finish_reason}{_shown(times)}"
        yield _passage(title, part, template, times)
        yield from _actions(record, step.branch, {step.step_index})


def _passage(title: str, segment: Segment, template: ChatTemplate | None, times: dict[str, float]) -> Passage:
    count = segment.stop - segment.start
    text = f"[{count} tokens]" if template is None else template.decode(segment.token_ids.tolist())
    return Passage(f"{title} · {count} tokens", segment.attribution, text, count, times)


def _actions(record: TrajectoryRecord, branch: int, after: Set[int]) -> Iterator[Passage]:
    for action in record.actions:
        if action.branch == branch and action.after_step in after:
            yield Passage(_action_title(action), None, "", 0, _action_times(action))


def _action_title(action: ActionRecord) -> str:
    kind = "tool call" if action.kind == "tool" else f"{action.kind} call"
    times = _shown(_action_times(action))
    return f"{kind} {action.action_index}: {action.label} {action.status} on {action.cpus} CPU(s){times}"


def _action_times(action: ActionRecord) -> dict[str, float]:
    waits = _known(quota=action.quota_s, load=action.load_s)
    cores_s = action.queue_s - sum(waits.values())
    return {
        **_known(cores=cores_s),
        **{name: s for name, s in waits.items() if s},
        **_known(run=action.run_s),
    }


def _known(**seconds: float) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items() if not math.isnan(value)}


def _shown(times: dict[str, float]) -> str:
    return "".join(f", {name} {seconds:.3f} s" for name, seconds in times.items())
