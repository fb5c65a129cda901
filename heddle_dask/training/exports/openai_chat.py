"""Trajectories as lines of chat messages, as OpenAI's fine-tuning takes them (checked with the types of openai 3.52).

One line for each branch. The weight of what an assistant said is 0 where no policy sampled it, or where an earlier line
has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.exports.told_messages import Decode, ToldMessage, told_branches


def chat_lines(record: TrajectoryRecord, decode: Decode) -> list[dict[str, Any]]:
    """The lines of one trajectory: those that have something to learn."""
    lines = [{"messages": list(_messages(branch))} for branch in told_branches(record, decode)]
    return [line for line in lines if any(message.get("weight") == 1 for message in line["messages"])]


def _messages(branch: Sequence[ToldMessage]) -> Iterator[dict[str, Any]]:
    numbers = count(1)
    open_calls: list[str] = []
    for message in branch:
        if message.role == "assistant":
            told = _assistant(message, numbers)
            open_calls = [call["id"] for call in told.get("tool_calls", [])]
            yield told
        elif message.role == "tool" and open_calls:
            yield {"role": "tool", "tool_call_id": open_calls.pop(0), "content": message.text}
        else:
            # A result that no call of this form asked for.
            yield {"role": "user" if message.role == "tool" else message.role, "content": message.text}


def _assistant(message: ToldMessage, numbers: Iterator[int]) -> dict[str, Any]:
    is_new = message.is_sampled and message.copied_from is None
    calls = [
        {
            "id": f"call_{next(numbers)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in message.calls
    ]
    if not calls:
        return {"role": "assistant", "content": message.text, "weight": int(is_new)}
    text = f"<think>\n{message.thinking}\n</think>\n\n" if message.thinking else ""
    return {"role": "assistant", "content": text + message.answer, "tool_calls": calls, "weight": int(is_new)}
