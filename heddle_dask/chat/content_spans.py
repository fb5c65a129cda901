"""Which tokens of a rendered text are the content of which message, and which are the template's.

The contents are found by rendering the same messages once more with markers in their place: what stands between the
markers is the template's. Characters lead to tokens by the offsets of the tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""As templates read it: ``role`` and ``content`` are texts; what an assistant calls may come with them."""
TEMPLATE_TEXT = -1
"""Owner of a token that belongs to no message."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Tokens of one delta.

    Attributes
    ----------
    owners
        For each token the number of the message of which it is content, or `TEMPLATE_TEXT`; a token across the border
        belongs to the message. None: the contents were not found, since the template changes them, or the tokenizer
        tells no offsets.
    """

    token_ids: list[int]
    owners: list[int] | None


Span = tuple[int, int]


def content_spans(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> list[Span] | None:
    """Where the content of each message is in the rendered text: first character, and the one behind the last.

    None if the template changes a content (other than trimming it) or does not show it exactly once.
    """
    markers = [f"Zq7 part {number} Zq7" if message["content"] else "" for number, message in enumerate(messages)]
    marked = [{**message, "content": marker} for message, marker in zip(messages, markers, strict=True)]
    pieces = _split(render(marked), [marker for marker in markers if marker])
    if pieces is None:
        return None
    return _matched(render(messages), pieces, [message["content"] for message in messages])


def _split(text: str, markers: Sequence[str]) -> list[str] | None:
    """The text between the markers; None unless it has each of them once, in their order."""
    pieces = []
    for marker in markers:
        before, found, text = text.partition(marker)
        if not found or marker in text:
            return None
        pieces.append(before)
    return [*pieces, text]


def _matched(text: str, pieces: Sequence[str], contents: Sequence[str]) -> list[Span] | None:
    """Spans of the contents if the text is piece, content, piece and so on; each content whole or trimmed."""
    spans: list[Span] = []
    at = len(pieces[0])
    if not text.startswith(pieces[0]):
        return None
    following = iter(pieces[1:])
    for content in contents:
        if not content:
            spans.append((at, at))
            continue
        piece = next(following)
        for shown in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(shown + piece, at):
                spans.append((at, at + len(shown)))
                at += len(shown) + len(piece)
                break
        else:
            return None
    return spans if at == len(text) else None


def owners_of(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The owner of each token, from its characters and those of the contents; both in the order of the text."""
    owners = [TEMPLATE_TEXT] * len(offsets)
    for number, (start, stop) in enumerate(spans):
        if start < stop:
            first = bisect_right(offsets, start, key=lambda offset: offset[1])
            behind = bisect_left(offsets, stop, key=lambda offset: offset[0])
            owners[first:behind] = [number] * (behind - first)
    return owners
