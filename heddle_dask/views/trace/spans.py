"""One trajectory as spans: itself, and one span per step and action.

Pure. Names follow OpenTelemetry's conventions for generative AI.

No prompt, no answer and no error message is in a span unless texts are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.records.causes import message_of
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryRecord

Attribute = str | bool | int | float | Sequence[str]
Decode = Callable[[Sequence[int]], str]

MOST_CHARACTERS = 20_000
"""Of one text; the rest is cut."""

_ROLES = {Attribution.PROMPT: "user", Attribution.TOOL: "tool", Attribution.PREFIX: "assistant"}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in seconds of the run; the first of a trajectory is the parent of the others.

    Attributes
    ----------
    error
        What failed, in one word; None if nothing did.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    message: str = ""
    is_client: bool = False


def spans_of(record: TrajectoryRecord, *, model: str, decode: Decode | None = None) -> list[Span]:
    """The spans of a finished trajectory.

    Parameters
    ----------
    decode
        Tokens to text: then prompts, answers and error messages are in the spans. None: they are not.
    """
    end_s = record.finished_s
    spans = [_trajectory_span(record, with_message=decode is not None)]
    seen: dict[int, int] = {}
    for step in record.steps:
        span = _step_span(step, model)
        if decode is not None:
            texts = _texts(record.branches[step.branch], seen.get(step.branch, 0), step, decode)
            span = Span(span.name, span.start_s, span.end_s, {**span.attributes, **texts}, is_client=True)
        seen[step.branch] = step.token_stop
        spans.append(span)
    spans += [_action_span(action, end_s) for action in record.actions]
    return spans


def _trajectory_span(record: TrajectoryRecord, with_message: bool) -> Span:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": record.environment,
        "gen_ai.conversation.id": record.trajectory_id,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "heddle.group": record.group_id,
        "heddle.task": record.task_id,
        "heddle.sample": record.sample_index,
        "heddle.status": record.status,
        "heddle.steps": len(record.steps),
        "heddle.actions": len(record.actions),
        "heddle.branches": len(record.branches),
    }
    if record.reward is not None:
        attributes["heddle.reward"] = record.reward
    failed = record.status == "failed"
    if failed:
        attributes["error.type"] = record.cause or record.status
    elif record.cause:
        attributes["heddle.cause"] = record.cause
    return Span(
        f"invoke_agent {record.environment}",
        record.started_s,
        record.finished_s,
        attributes,
        error=(record.cause or record.status) if failed else None,
        message=message_of(record.detail) if failed and with_message else "",
    )


def _step_span(step: StepRecord, model: str) -> Span:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "heddle",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": step.prompt_tokens,
        "gen_ai.usage.output_tokens": step.generated_tokens,
        "gen_ai.response.finish_reasons": (step.finish_reason,),
        "heddle.step": step.step_index,
        "heddle.branch": step.branch,
        "heddle.engine": step.engine_id,
        "heddle.cached_tokens": step.cached_tokens,
        "heddle.preemptions": step.preemptions,
        "heddle.migrations": step.migrations,
    }
    asked: dict[str, float] = {
        "gen_ai.request.max_tokens": step.max_tokens or math.nan,
        "gen_ai.request.temperature": step.temperature,
        "gen_ai.request.top_p": step.top_p,
        "gen_ai.request.top_k": step.top_k or math.nan,
        "heddle.queue_s": step.queue_s,
        "heddle.prefill_s": step.prefill_s,
        "heddle.decode_s": step.decode_s,
    }
    attributes |= {name: value for name, value in asked.items() if not math.isnan(value)}
    return Span(f"chat {model}", step.submitted_s, step.finished_s, attributes, is_client=True)


def _action_span(action: ActionRecord, end_s: float) -> Span:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": action.label,
        "gen_ai.tool.call.id": f"{action.branch}/{action.action_index}",
        "heddle.kind": action.kind,
        "heddle.status": action.status,
        "heddle.cpus": action.cpus,
        "heddle.branch": action.branch,
    }
    times = {
        "heddle.queue_s": action.queue_s,
        "heddle.quota_s": action.quota_s,
        "heddle.load_s": action.load_s,
        "heddle.run_s": action.run_s,
    }
    attributes |= {name: value for name, value in times.items() if not math.isnan(value)}
    failed = action.status not in ("ok", "pending")
    if failed:
        attributes["error.type"] = action.status
    until_s = end_s if math.isnan(action.finished_s) else action.finished_s
    error = action.status if failed else None
    return Span(f"execute_tool {action.label}", action.submitted_s, until_s, attributes, error=error)


def _texts(record: TokenRecord, since: int, step: StepRecord, decode: Decode) -> dict[str, Attribute]:
    given = [
        {"role": _ROLES[part.attribution], "parts": [{"type": "text", "content": text}]}
        for part in record.segments()
        if part.attribution in _ROLES
        and since <= part.start < step.token_start
        and (text := decode(part.token_ids.tolist())[:MOST_CHARACTERS])
    ]
    answer = decode(record.token_ids[step.token_start : step.token_stop].tolist())[:MOST_CHARACTERS]
    answered = {
        "role": "assistant",
        "parts": [{"type": "text", "content": answer}],
        "finish_reason": step.finish_reason,
    }
    return {
        "gen_ai.input.messages": json.dumps(given),
        "gen_ai.output.messages": json.dumps([answered]),
    }
