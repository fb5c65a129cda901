"""What of a sampled text may be told before the step ends.

Thinking and content go out as they come. A call is read when the step has ended, so text is held back from where a call
may begin; and white space until it is known that something follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.reply_parts import CLOSE, OPEN

CALL_MARKERS = (
    "<|",  # the special tokens of most families: harmony's channels, Kimi's and GLM's sections
    "<\uff5c",  # of DeepSeek: a wide bar
    "<tool_call",  # Hermes and Qwen
    "<function",
    "<minimax:tool_call",
    "<|python_tag|>",  # Llama
    "[TOOL_CALLS]",  # Mistral
)
"""Where a call may begin. Too many cost a delay only: the end of the step tells the rest."""
# A reply of some families is a call if it is JSON as a whole.
_JSON_STARTS = ("{", "[")

PartKind = Literal["thinking", "content"]


class TextPart(NamedTuple):
    kind: PartKind
    text: str


class TextHolder:
    """Takes the text of one choice piece by piece.

    What has been told after any number of pieces depends on their joined text only.

    Parameters
    ----------
    markers
        Text from the first of them on is held back.
    holds_json
        Hold back a whole reply that begins as JSON.
    """

    def __init__(self, markers: Sequence[str] = (), *, holds_json: bool = False) -> None:
        self._markers = tuple(markers)
        self._holds_json = holds_json
        self._mode: Literal["start", "thinking", "content", "held"] = "start"
        self._untold = ""
        self._told: dict[PartKind, list[str]] = {"thinking": [], "content": []}

    def add(self, piece: str) -> list[TextPart]:
        """The parts that may be told now."""
        if self._mode == "held":
            return []
        self._untold += piece
        parts: list[TextPart] = []
        if self._mode == "start":
            self._begin()
        if self._mode == "thinking":
            before, closed, behind = self._untold.partition(CLOSE)
            self._tell("thinking", parts, before if closed else None)
            if closed and self._mode == "thinking":
                self._mode, self._untold = "content", behind
        if self._mode == "content":
            self._tell("content", parts)
        return parts

    def end(self, message: ChatMessage) -> list[TextPart]:
        """The parts of the final message that have not been told."""
        self._mode = "held"
        thinking, content = message.thinking, message.content
        if not thinking and content.lstrip().startswith(OPEN):
            # No parser has taken the thinking out.
            opened, _, content = content.partition(CLOSE)
            thinking = opened.lstrip().removeprefix(OPEN)
        parts = []
        final: tuple[tuple[PartKind, str], ...] = (("thinking", thinking), ("content", content))
        for kind, text in final:
            if rest := _rest("".join(self._told[kind]), text):
                parts.append(TextPart(kind, rest))
        return parts

    def _begin(self) -> None:
        text = self._untold.lstrip()
        if text.startswith(OPEN):
            self._mode, self._untold = "thinking", text.removeprefix(OPEN)
        elif not OPEN.startswith(text):
            self._mode = "content"

    def _tell(self, kind: PartKind, parts: list[TextPart], whole: str | None = None) -> None:
        """Tell what is safe of the untold text, or of `whole`, behind which the kind of text ends."""
        text = self._untold if whole is None else whole
        if not self._told[kind]:
            text = text.lstrip()
            if kind == "content" and self._holds_json and text.startswith(_JSON_STARTS):
                self._mode = "held"
                return
        found = [at for marker in self._markers if (at := text.find(marker)) >= 0]
        if found:
            self._mode = "held"
            safe = text[: min(found)]
        elif whole is None:
            endings = (*self._markers, CLOSE) if kind == "thinking" else self._markers
            safe = text[: len(text) - max((_begun(text, marker) for marker in endings), default=0)]
        else:
            safe = text
        safe = safe.rstrip()
        self._untold = text[len(safe) :]
        if safe:
            self._told[kind].append(safe)
            parts.append(TextPart(kind, safe))


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    for count in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0


def _rest(told: str, text: str) -> str:
    """What follows in the text behind what was told; empty where the text is another."""
    for candidate in (text, text.lstrip()):
        if candidate.startswith(told):
            return candidate[len(told) :]
    return ""
