"""Trajectories in the Agent Trajectory Interchange Format, ATIF 1.8 (checked with the models of Harbor 0.26.0).

Each LLM step is one step of ATIF with its exact tokens, and what followed it is its observation. Branches are embedded
trajectories whose steps in common with an earlier branch are marked as copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.exports.token_facts import ExportedRun, StepTokens, finite, record_facts
from heddle_dask.training.exports.told_messages import Decode, ToldMessage, told_branches

SCHEMA = "ATIF-v1.8"


def atif_trajectory(record: TrajectoryRecord, run: ExportedRun, decode: Decode) -> dict[str, Any] | None:
    """One trajectory as a JSON-able document; None where it has no message."""
    branches = [
        _document(record, run, number, messages) for number, messages in enumerate(told_branches(record, decode))
    ]
    if not branches or not branches[0]["steps"]:
        return None
    main, others = branches[0], [branch for branch in branches[1:] if branch["steps"]]
    main["extra"] = {**record_facts(record), "metadata": dict(record.metadata)}
    main["final_metrics"] = {
        "total_prompt_tokens": sum(step.prompt_tokens for step in record.steps),
        "total_completion_tokens": record.generated_tokens,
        "total_cached_tokens": sum(step.cached_tokens for step in record.steps),
        "total_steps": len(main["steps"]),
    }
    return {**main, "subagent_trajectories": others} if others else main


def _document(
    record: TrajectoryRecord, run: ExportedRun, branch: int, messages: Sequence[ToldMessage]
) -> dict[str, Any]:
    name = record.trajectory_id
    return {
        "schema_version": SCHEMA,
        "session_id": f"{run.name}/{name}",
        "trajectory_id": f"{name}#{branch}" if branch else name,
        "agent": {"name": record.environment or "agent", "version": run.version, "model_name": run.model},
        "steps": list(_steps(record, messages)),
    }


def _steps(record: TrajectoryRecord, messages: Sequence[ToldMessage]) -> Iterator[dict[str, Any]]:
    numbers, calls = count(1), count(1)
    agent: dict[str, Any] | None = None
    for message in messages:
        if message.role == "tool" and agent is not None:
            _observe(agent, message.text)
            continue
        if agent is not None:
            yield agent
            agent = None
        step: dict[str, Any] = {"step_id": next(numbers), "source": _source(message)}
        if message.copied_from is not None:
            step["is_copied_context"] = True
        if message.role == "assistant":
            agent = {**step, **_agent_facts(record, message, calls)}
        else:
            yield {**step, "message": message.text}
    if agent is not None:
        yield agent


def _source(message: ToldMessage) -> str:
    return {"assistant": "agent", "system": "system"}.get(message.role, "user")


def _agent_facts(record: TrajectoryRecord, message: ToldMessage, calls: Iterator[int]) -> dict[str, Any]:
    facts: dict[str, Any] = {"message": message.answer}
    if message.is_sampled and message.thinking:
        facts["reasoning_content"] = message.thinking
    found = [
        {"tool_call_id": f"call_{next(calls)}", "function_name": call.name, "arguments": dict(call.arguments)}
        for call in message.calls
    ]
    if found:
        facts["tool_calls"] = found
    facts["llm_call_count"] = int(message.is_sampled)
    step = message.step
    if step is not None:
        tokens = StepTokens.of(record, step)
        after = [
            each.run_s for each in record.actions if (each.branch, each.after_step) == (step.branch, step.step_index)
        ]
        facts["metrics"] = {
            "prompt_tokens": step.prompt_tokens,
            "completion_tokens": step.generated_tokens,
            "cached_tokens": step.cached_tokens,
            "prompt_token_ids": tokens.prompt_ids,
            "completion_token_ids": tokens.sampled_ids,
            "logprobs": tokens.logprobs,
            "extra": {
                "policy_versions": tokens.versions,
                "finish_reason": step.finish_reason,
                "llm_s": finite(step.prefill_s + step.decode_s),
                "queue_s": finite(step.queue_s),
                "tool_s": finite(sum(after)),
            },
        }
    return facts


def _observe(agent: dict[str, Any], text: str) -> None:
    """Add what a tool said; it belongs to the call of the same place, if there are as many."""
    results = agent.setdefault("observation", {"results": []})["results"]
    calls = agent.get("tool_calls", [])
    call = {"source_call_id": calls[len(results)]["tool_call_id"]} if len(results) < len(calls) else {}
    results.append({**call, "content": text})
