"""Trajectories in the Agent Trajectory Interchange Format (ATIF 1.0 to 1.8) as trajectories of a trace.

Steps that were copied from an earlier context are no steps of their own; embedded trajectories are trajectories beside
their parent. Seconds are those that `heddle export` adds; else a tool has taken the time from its step to the next one,
if both tell when they were, which includes the next call of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.imported.trace_lines import ImportedStep, ImportedTrajectory
from heddle_dask.workloads.imported.typed_json import count, number, objects, part, seconds, text_of

SCHEMA = "ATIF-v1."
_PASSED_FROM = 1.0


def is_atif(data: Mapping[str, Any]) -> bool:
    return str(data.get("schema_version", "")).startswith(SCHEMA)


def atif_trajectories(data: Mapping[str, Any], name: str, where: str) -> Iterator[ImportedTrajectory]:
    """The trajectory of a document, and those that it embeds.

    Parameters
    ----------
    name
        Id of one that tells none.

    Raises
    ------
    BadInput
        It is no ATIF; the message names place and field.
    """
    if not is_atif(data):
        raise BadInput(f"{where}: schema_version is {data.get('schema_version')!r}: use ATIF-v1.0 to ATIF-v1.8")
    own = str(data.get("trajectory_id") or name)
    extra = part(data, "extra", dict, where)
    group = str(extra.get("group_id") or data.get("session_id") or own)
    yield from _one(data, own, group, "main", where)
    for at, other in enumerate(objects(data, "subagent_trajectories", where)):
        inside = str(other.get("trajectory_id") or f"{own}#{at + 1}")
        yield from _one(other, inside, group, "subagent", f"{where}, subagent {at + 1}")


def _one(data: Mapping[str, Any], name: str, group: str, kind: str, where: str) -> Iterator[ImportedTrajectory]:
    told = objects(data, "steps", where)
    calls = [at for at, step in enumerate(told) if _is_call(step)]
    if not calls:
        return
    steps = [
        _step(told, at, following, f"{where}, step {at + 1}")
        for at, following in zip(calls, [*calls[1:], len(told)], strict=True)
    ]
    agent = part(data, "agent", dict, where)
    extra = part(data, "extra", dict, where)
    prompt = "\n".join(_text(step) for step in told[: calls[0]])
    yield ImportedTrajectory(name, group, prompt, steps, _facts(agent, extra, kind))


def _facts(agent: Mapping[str, Any], extra: Mapping[str, Any], kind: str) -> dict[str, Any]:
    reward = number(extra, "reward")
    facts: dict[str, Any] = {"kind": kind, "complete": extra.get("status", "completed") in ("completed", "truncated")}
    facts["success"] = None if reward is None else reward >= _PASSED_FROM
    named = {"agent": agent.get("name"), "model": agent.get("model_name"), "domain": extra.get("environment")}
    return facts | {key: str(value) for key, value in named.items() if value}


def _is_call(step: Mapping[str, Any]) -> bool:
    return (
        step.get("source") == "agent" and step.get("llm_call_count") != 0 and step.get("is_copied_context") is not True
    )


def _step(told: Sequence[dict[str, Any]], at: int, following: int, where: str) -> ImportedStep:
    step = told[at]
    metrics = part(step, "metrics", dict, where)
    extra = part(metrics, "extra", dict, where)
    calls = objects(step, "tool_calls", where)
    between = told[at + 1 : following]
    observed = [_observed(step, where), *(_text(each) + _observed(each, where) for each in between)]
    has_observation = step.get("observation") is not None
    tool = None
    if calls or has_observation:
        tool = str(calls[0].get("function_name") or "unknown") if calls else "unknown"
    elif between:
        tool = "user"
    tool_s = seconds(extra, "tool_s")
    if tool_s is None and following < len(told):
        tool_s = _between_s(step, told[following])
    return ImportedStep(
        input_tokens=count(metrics, "prompt_tokens"),
        generated_tokens=count(metrics, "completion_tokens"),
        cached_tokens=count(metrics, "cached_tokens"),
        text=_text(step) + str(step.get("reasoning_content") or "") + "".join(map(str, calls)),
        observed_text="\n".join(observed),
        tool=tool,
        tool_s=tool_s,
        llm_s=seconds(extra, "llm_s"),
    )


def _text(step: Mapping[str, Any]) -> str:
    return text_of(step.get("message"))


def _observed(step: Mapping[str, Any], where: str) -> str:
    results = objects(part(step, "observation", dict, where), "results", where)
    return "\n".join(text_of(result.get("content")) for result in results)


def _between_s(step: Mapping[str, Any], following: Mapping[str, Any]) -> float | None:
    try:
        times = [datetime.fromisoformat(str(each["timestamp"]).replace("Z", "+00:00")) for each in (step, following)]
        return max(0.0, (times[1] - times[0]).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None
