"""Trajectories as traces of verifiers, version 1 (checked with ``WireTrace`` of verifiers 0.4.0).

A trace is a graph of messages: each has the tokens that it adds, and branches share what they have in common. The mask
has the sampled tokens whose logprobs are known.
"""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

import numpy as np

from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.exports.token_facts import ExportedRun, record_facts
from heddle_dask.training.exports.told_messages import Decode, ToldMessage, told_branches

TRACE_VERSION = 1
MADE_FOR = "0.4.0"


def verifiers_trace(record: TrajectoryRecord, run: ExportedRun, decode: Decode) -> dict[str, Any]:
    """One trajectory as a JSON-able trace."""
    graph = _MessageGraph(record)
    for number, messages in enumerate(told_branches(record, decode)):
        graph.add_branch(number, messages)
    failed = record.status in ("failed", "aborted")
    seconds = [value if math.isfinite(value) else 0.0 for value in (record.started_s, record.finished_s)]
    return {
        "version": TRACE_VERSION,
        "id": f"{run.name}/{record.trajectory_id}",
        "verifiers": {"version": MADE_FOR},
        "task": {
            "type": record.environment or "task",
            "data": {"name": record.task_id, "prompt": graph.first_question},
            "key": record.task_id,
        },
        "agent": {"config": {"model": run.model}, "name": "agent", "trainable": not failed},
        "nodes": graph.nodes,
        "calls": graph.calls,
        "rewards": {"reward": None if record.reward is None else {"score": record.reward, "weight": 1.0}},
        "metrics": dict(record.reward_parts),
        "info": record_facts(record),
        "is_completed": True,
        "ok": not failed,
        "stop_condition": _stop_condition(record),
        "errors": [{"type": record.cause or record.status, "message": record.detail}] if failed else [],
        "timing": {"start": seconds[0], "agent": {"start": seconds[0], "end": seconds[1]}},
    }


def _stop_condition(record: TrajectoryRecord) -> str:
    if record.status == "completed":
        return "agent_completed"
    if record.status == "truncated":
        return {"context": "max_total_tokens", "time": "agent_timeout"}.get(record.cause, "max_turns")
    return f"{record.cause or record.status}_error"


class _MessageGraph:
    """Nodes and calls of a trace, branch by branch."""

    def __init__(self, record: TrajectoryRecord) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.first_question: str | None = None
        self._record = record
        self._nodes_of: list[list[int]] = []
        self._call_ids = count(1)

    def add_branch(self, number: int, messages: list[ToldMessage]) -> None:
        """Add the messages that no earlier branch has."""
        path: list[int] = []
        open_calls: list[str] = []
        for message in messages:
            if message.copied_from is not None:
                branch, at = message.copied_from
                path.append(self._nodes_of[branch][at])
                open_calls = self._calls_of(path[-1], open_calls)
                continue
            told, open_calls = self._message(message, open_calls)
            self.nodes.append({"parent": path[-1] if path else None, **self._node(number, message), "message": told})
            path.append(len(self.nodes) - 1)
            if message.step is not None:
                self.calls.append(_call(message.step, path[-1]))
            if message.role == "user" and self.first_question is None:
                self.first_question = message.text
        self._nodes_of.append(path)

    def _node(self, number: int, message: ToldMessage) -> dict[str, Any]:
        branch = self._record.branches[number]
        span = slice(message.start, message.stop)
        logprobs = branch.logprobs[message.sampled_start : message.stop]
        known = np.isfinite(logprobs)
        before = message.sampled_start - message.start
        return {
            "sampled": message.is_sampled,
            "token_ids": branch.token_ids[span].tolist(),
            "mask": [False] * before + known.tolist(),
            "logprobs": logprobs[known].tolist(),
            "timestamp": 0.0 if message.step is None else max(0.0, message.step.finished_s),
        }

    def _message(self, message: ToldMessage, open_calls: list[str]) -> tuple[dict[str, Any], list[str]]:
        """A message in their form, and the calls that wait for a result behind it."""
        if message.role == "tool":
            call, rest = (open_calls[0], open_calls[1:]) if open_calls else (f"call_{next(self._call_ids)}", [])
            return {"role": "tool", "tool_call_id": call, "content": message.text}, rest
        if message.role != "assistant":
            return {"role": message.role, "content": message.text}, []
        calls = [
            {"id": f"call_{next(self._call_ids)}", "name": call.name, "arguments": json.dumps(dict(call.arguments))}
            for call in message.calls
        ]
        told: dict[str, Any] = {"role": "assistant", "content": message.answer}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if calls:
            told["tool_calls"] = calls
        return told, [call["id"] for call in calls]

    def _calls_of(self, node: int, open_calls: list[str]) -> list[str]:
        told = self.nodes[node]["message"]
        if told["role"] == "tool":
            return open_calls[1:]
        return [call["id"] for call in told.get("tool_calls", [])]


def _call(step: StepRecord, node: int) -> dict[str, Any]:
    reason = step.finish_reason if step.finish_reason in ("stop", "length", "tool_calls") else None
    times = [value if math.isfinite(value) else 0.0 for value in (step.submitted_s, step.finished_s)]
    return {
        "node": node,
        "finish_reason": reason,
        "usage": {
            # Theirs does not have what the cache held.
            "prompt_tokens": max(0, step.prompt_tokens - step.cached_tokens),
            "completion_tokens": step.generated_tokens,
            "cached_input_tokens": step.cached_tokens,
        },
        "time": {"start": times[0], "end": times[1]},
    }
