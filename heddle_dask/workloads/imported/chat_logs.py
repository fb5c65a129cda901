"""Logs of chats in OpenAI's form as trajectories of a trace: one line for each conversation, or for each request.

A line of a conversation has ``messages``; each message of the assistant that is sampled is a step, and may have a
``usage``. A line of a request has ``messages`` (or ``request``) and the answer: ``response``, or ``choices`` beside
them. A request that begins with an earlier one and its answer goes on with that trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.imported.trace_lines import ImportedStep, ImportedTrajectory
from heddle_dask.workloads.imported.typed_json import count, objects, part, seconds, text_of

_IDS = ("id", "task_id", "conversation_id")


@dataclass(slots=True)
class _Requests:
    """Requests of one trajectory so far, each with its answer."""

    name: str
    group: str
    model: str
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)


class ChatLogs:
    """Takes the lines of a log one by one; `trajectories` has what they were."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: list[_Requests] = []
        self._by_history: dict[str, _Requests] = {}
        self._conversations: list[ImportedTrajectory] = []

    def take(self, data: Mapping[str, Any], number: int, where: str) -> None:
        """Take line `number`.

        Raises
        ------
        BadInput
            It is neither a conversation nor a request.
        """
        request = part(data, "request", dict, where) or data
        messages = objects(request, "messages", where)
        if not messages:
            raise BadInput(f"{where}: it has no messages: use lines of chats, or of requests with their responses")
        response = part(data, "response", dict, where) or data
        if "choices" in response:
            self._take_request(request, response, data, messages, f"{self._name}-{number}", where)
        else:
            name = next((str(data[key]) for key in _IDS if data.get(key)), f"{self._name}-{number}")
            found = _conversation(data, messages, name, where)
            if found is not None:
                self._conversations.append(found)

    def trajectories(self) -> Iterator[ImportedTrajectory]:
        """All of them, in the order in which they began."""
        yield from self._conversations
        for one in self._requests:
            steps = [_requested_step(one, at) for at in range(len(one.answers))]
            facts = {"source": "openai", **({"model": one.model} if one.model else {})}
            yield ImportedTrajectory(one.name, one.group, _texts(one.messages[0]), steps, facts)

    def _take_request(
        self,
        request: Mapping[str, Any],
        response: Mapping[str, Any],
        data: Mapping[str, Any],
        messages: list[dict[str, Any]],
        name: str,
        where: str,
    ) -> None:
        choices = objects(response, "choices", where)
        answer = part(choices[0], "message", dict, where) if choices else {}
        keys = _keys(messages)
        known = next((self._by_history[key] for key in reversed(keys) if key in self._by_history), None)
        if known is None:
            # Attempts at one task begin with the same messages.
            known = _Requests(
                name, f"{self._name}-{keys[-1]}", str(request.get("model") or response.get("model") or "")
            )
            self._requests.append(known)
        else:
            self._by_history = {key: one for key, one in self._by_history.items() if one is not known}
        known.messages.append(messages)
        known.answers.append(answer)
        known.facts.append({"usage": part(response, "usage", dict, where), "seconds": _seconds(data)})
        self._by_history[_keys([*messages, answer])[-1]] = known


def _conversation(
    data: Mapping[str, Any], messages: Sequence[dict[str, Any]], name: str, where: str
) -> ImportedTrajectory | None:
    calls = [at for at, each in enumerate(messages) if each.get("role") == "assistant" and each.get("weight") != 0]
    if not calls:
        return None
    steps = [
        _step(messages[at], messages[at + 1 : following], part(messages[at], "usage", dict, where), {})
        for at, following in zip(calls, [*calls[1:], len(messages)], strict=True)
    ]
    named = {"model": data.get("model"), "domain": data.get("domain")}
    facts = {"source": "openai", **{key: str(value) for key, value in named.items() if value}}
    group = str(data.get("group") or data.get("group_id") or name)
    return ImportedTrajectory(name, group, _texts(messages[: calls[0]]), steps, facts)


def _requested_step(one: _Requests, at: int) -> ImportedStep:
    is_last = at + 1 == len(one.answers)
    behind = [] if is_last else one.messages[at + 1][len(one.messages[at]) + 1 :]
    return _step(one.answers[at], behind, one.facts[at]["usage"], one.facts[at]["seconds"])


def _step(
    answer: Mapping[str, Any],
    behind: Sequence[Mapping[str, Any]],
    usage: Mapping[str, Any],
    taken: Mapping[str, float | None],
) -> ImportedStep:
    calls = answer.get("tool_calls") or []
    tool = "user" if behind else None
    if calls and behind:
        function = calls[0].get("function") if isinstance(calls[0], dict) else None
        tool = str(function.get("name") or "unknown") if isinstance(function, dict) else "unknown"
    details = usage.get("prompt_tokens_details")
    return ImportedStep(
        input_tokens=count(usage, "prompt_tokens"),
        generated_tokens=count(usage, "completion_tokens"),
        cached_tokens=count(details, "cached_tokens") if isinstance(details, dict) else None,
        text=_texts([answer]),
        observed_text=_texts(behind),
        tool=tool,
        tool_s=taken.get("tool_s"),
        llm_s=taken.get("llm_s"),
    )


def _texts(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a model reads or writes of messages: texts, thinking and calls."""
    pieces = []
    for message in messages:
        pieces += [text_of(message.get("content")), str(message.get("reasoning_content") or "")]
        if message.get("tool_calls"):
            pieces.append(json.dumps(message["tool_calls"]))
    return "\n".join(piece for piece in pieces if piece)


def _seconds(data: Mapping[str, Any]) -> dict[str, float | None]:
    return {"llm_s": seconds(data, "llm_s"), "tool_s": seconds(data, "tool_s")}


def _keys(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Identity of each beginning of a history: roles, texts and calls."""
    digest, keys = blake2b(digest_size=8), []
    for message in messages:
        said = [message.get("role"), text_of(message.get("content")), message.get("tool_calls") or []]
        digest.update(json.dumps(said, sort_keys=True).encode())
        keys.append(digest.hexdigest())
    return keys
