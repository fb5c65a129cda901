"""Replies by a script in place of plausible tokens, so that agents use their tools and finish their task.

A script has one JSON object a line. Its conditions, each of which may be left out:

``turn``     number of assistant turns in the context
``prompt``   a regular expression that is found somewhere in the context
``latest``   a regular expression that is found behind the last assistant turn

and its reply: ``text`` as it is, or ``content``, ``thinking`` and ``calls`` (each with ``name`` and ``arguments``) in
the form of Hermes and Qwen. The first line whose conditions hold is the reply; where none does, tokens are plausible.
A reply depends on the context alone, so that a step repeated, moved or interrupted goes on as it would have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle_dask.chat.reply_parts import CLOSE, OPEN
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.errors import BadInput, check_keys
from heddle_dask.engines.emulated.tokens import TokenSource

_KEYS = ("turn", "prompt", "latest", "text", "content", "thinking", "calls")
_LOGPROB = -0.01


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """One line of a script.

    Attributes
    ----------
    turn
        None: any.
    """

    text: str
    turn: int | None = None
    prompt: re.Pattern[str] | None = None
    latest: re.Pattern[str] | None = None

    @classmethod
    def from_mapping(cls, where: str, line: Mapping[str, Any]) -> ScriptedReply:
        """Read a line; `where` begins what is said of one that cannot be."""
        check_keys(where, line, _KEYS)
        turn = line.get("turn")
        if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or turn < 0):
            raise BadInput(f"{where}: turn is {turn!r}: use a whole number of at least 0")
        return cls(_reply_text(where, line), turn, *(_pattern(where, line, name) for name in ("prompt", "latest")))

    def fits(self, turn: int, context: str, latest: str) -> bool:
        return (
            self.turn in (None, turn)
            and (self.prompt is None or self.prompt.search(context) is not None)
            and (self.latest is None or self.latest.search(latest) is not None)
        )


def read_script(path: str) -> list[ScriptedReply]:
    """The lines of a script; `BadInput` says which one is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadInput(f"engine script {path!r} cannot be read: {error}") from None
    replies = []
    for number, text in enumerate(lines, 1):
        where = f"engine script {path!r} line {number}"
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{where} is no JSON: {error}") from None
        if not isinstance(line, dict):
            raise BadInput(f"{where} is no JSON object")
        replies.append(ScriptedReply.from_mapping(where, line))
    return replies


class ScriptedSource(TokenSource):
    """Draws the tokens of a script's replies; where no line fits, plausible ones."""

    def __init__(self, script: str, model_dir: str, seed: int, mean_length_tokens: float, end_token_id: int) -> None:
        super().__init__(seed, mean_length_tokens, end_token_id)
        self._replies = read_script(script)
        self._template = ChatTemplate.load(model_dir)
        self._end_id = (*self._template.end_token_ids, end_token_id)[0]
        prompt = self._text(self._template.bridge([], ended=True))
        self._end_text = self._text(self._template.bridge([], ended=False)).removesuffix(prompt)
        # The first line of the generation prompt begins every assistant turn; what follows it depends on variables.
        self._turn_text, _, self._prompt_rest = prompt.lstrip().partition("\n")

    def draw(
        self,
        context: Sequence[int],
        count: int,
        *,
        seed: int | None,
        ignore_eos: bool,
        stop_token_ids: Sequence[int] = (),
    ) -> tuple[list[int], list[float], bool]:
        reply = None if ignore_eos else self._reply(context)
        if reply is None:
            return super().draw(context, count, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
        rest = reply[self._sampled(context, reply) :]
        tokens = rest[:count]
        return tokens, [_LOGPROB] * len(tokens), len(rest) <= count

    def _reply(self, context: Sequence[int]) -> list[int] | None:
        *before, _ = self._text(context).split(self._turn_text)
        if not before:
            return None  # no conversation
        # Of what follows the last turn: that turn itself ends at its end token.
        latest = before[-1].partition(self._end_text)[2] if len(before) > 1 and self._end_text else before[-1]
        text = self._turn_text.join(before)
        for reply in self._replies:
            if reply.fits(len(before) - 1, text, latest):
                return [*self._template.encode(reply.text), self._end_id]
        return None

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._template.decode(token_ids)

    def _sampled(self, context: Sequence[int], reply: Sequence[int]) -> int:
        """Tokens of the reply that an interrupted step has sampled already."""
        tail = self._text(context).rpartition(self._turn_text)[2].removeprefix("\n")
        if tail == self._prompt_rest:
            return 0
        ends = range(min(len(reply), len(context)), 0, -1)
        return next((count for count in ends if list(context[-count:]) == list(reply[:count])), 0)


def _reply_text(where: str, line: Mapping[str, Any]) -> str:
    parts = [name for name in ("content", "thinking", "calls") if name in line]
    if ("text" in line) == bool(parts):
        raise BadInput(f"{where}: give either text, or content, thinking and calls")
    if not parts:
        return _text(where, line, "text")
    thinking, content = _text(where, line, "thinking"), _text(where, line, "content")
    calls = line.get("calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict)
        for call in calls
    ):
        raise BadInput(f'{where}: calls must be a list of objects with "name" and "arguments"')
    said = [f"{OPEN}\n{thinking}\n{CLOSE}\n"] if thinking else []
    said += [content] if content else []
    said += [format_call(call["name"], call.get("arguments", {})) for call in calls]
    return "\n".join(said)


def _text(where: str, line: Mapping[str, Any], name: str) -> str:
    value = line.get(name, "")
    if not isinstance(value, str):
        raise BadInput(f"{where}: {name} is {value!r}: use a text")
    return value


def _pattern(where: str, line: Mapping[str, Any], name: str) -> re.Pattern[str] | None:
    if name not in line:
        return None
    try:
        return re.compile(_text(where, line, name))
    except re.error as error:
        raise BadInput(f"{where}: {name} is no regular expression: {error}") from None
