"""The branches of a trajectory as conversations, read back from their tokens.

A record has tokens and their authors, and no roles: the role of a message is what the template's text before it names.
Every token belongs to one message: what the template puts before a message comes with it, as far as the generation
prompt of a sampled one. A branch begins with the messages that it has in common with the branch that it left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from heddle_dask.chat.reply_parts import CLOSE, OPEN, answer_of
from heddle_dask.chat.tool_calls import CLOSE as CALL_CLOSE
from heddle_dask.chat.tool_calls import OPEN as CALL_OPEN
from heddle_dask.chat.tool_calls import ToolCall, parse_calls
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, without the token that ends a turn."""
ToldRole = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, ToldRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_ROLE = re.compile(rf"(?<![A-Za-z])({'|'.join(_ROLES)})(?![A-Za-z])")
_CALL = re.compile(f"{re.escape(CALL_OPEN)}.*?(?:{re.escape(CALL_CLOSE)}|\\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToldMessage:
    """One message of a branch.

    Attributes
    ----------
    start, content_start, stop
        Tokens of the branch: those before `content_start` are the template's.
    step
        The LLM step that sampled it; None: none did.
    sampled_start
        First sampled token: behind `content_start` where the reply was begun by the program; `stop` where none was.
    copied_from
        Of a message that an earlier branch has: number of the branch, and of the message there.
    """

    role: ToldRole
    text: str
    start: int
    content_start: int
    stop: int
    sampled_start: int
    step: StepRecord | None = None
    copied_from: tuple[int, int] | None = None

    @property
    def is_sampled(self) -> bool:
        return self.sampled_start < self.stop

    @property
    def calls(self) -> list[ToolCall]:
        """The well-formed calls of an assistant's message."""
        if self.role != "assistant":
            return []
        return [call for call in parse_calls(answer_of(self.text)) if isinstance(call, ToolCall)]

    @property
    def thinking(self) -> str:
        """What an assistant's message thinks, without its marks; empty where it does not."""
        before, closed, _ = self.text.partition(CLOSE)
        return before.replace(OPEN, "", 1).strip() if closed and self.role == "assistant" else ""

    @property
    def answer(self) -> str:
        """The text without thinking, and without calls that can be read."""
        if self.role != "assistant":
            return self.text
        answer = answer_of(self.text)
        return _CALL.sub("", answer).strip() if self.calls else answer


def told_branches(record: TrajectoryRecord, decode: Decode) -> list[list[ToldMessage]]:
    """The conversation of each branch, in their order."""
    branches: list[list[ToldMessage]] = []
    for number, branch in enumerate(record.branches):
        begun = _inherited(record, branches, number)
        steps = {step.token_start: step for step in record.steps if step.branch == number}
        begun += _own_messages(branch, steps, decode, begun[-1].stop if begun else 0)
        branches.append(begun)
    return branches


def _inherited(record: TrajectoryRecord, branches: Sequence[Sequence[ToldMessage]], number: int) -> list[ToldMessage]:
    """The whole messages that a branch has in common with the earlier one that shares most of its beginning."""
    branch = record.branches[number]
    length = next((s.stop for s in branch.segments() if s.attribution is Attribution.SHARED), 0)
    found: list[ToldMessage] = []
    for parent, messages in enumerate(branches):
        ids = record.branches[parent].token_ids[:length]
        same = _common(ids, branch.token_ids[:length])
        kept = [message for message in messages if message.stop <= same]
        if kept and (not found or kept[-1].stop > found[-1].stop):
            found = [
                ToldMessage(
                    *(m.role, m.text, m.start, m.content_start, m.stop, m.sampled_start, m.step),
                    copied_from=m.copied_from or (parent, at),
                )
                for at, m in enumerate(kept)
            ]
    return found


def _common(ids: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> int:
    least = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:least] != others[:least])
    return int(differ[0]) if len(differ) else least


def _own_messages(
    branch: TokenRecord, steps: dict[int, StepRecord], decode: Decode, begin: int
) -> Iterator[ToldMessage]:
    """The messages behind token `begin`."""
    ids, start = branch.token_ids, begin
    role: ToldRole = "user"
    begun: int | None = None  # where a reply begins that the program has begun
    for author, first, stop in _pieces(branch, steps, begin):
        is_scaffold = author in (Attribution.TEMPLATE, Attribution.SHARED)
        if begun is not None and author not in (Attribution.POLICY, Attribution.PREFIX):
            yield ToldMessage("assistant", decode(ids[begun:first].tolist()), start, begun, first, first)
            start, begun = first, None
        if is_scaffold:
            named = _ROLE.findall(decode(ids[first:stop].tolist()))
            role = _ROLES[named[-1]] if named else role
        elif author is Attribution.POLICY:
            content = first if begun is None else begun
            text = decode(ids[content:stop].tolist())
            yield ToldMessage("assistant", text, start, content, stop, first, steps.get(first))
            start, begun = stop, None
        elif author is Attribution.PREFIX:
            # It was sampled in another attempt: here nothing of it was.
            content = first if begun is None else begun
            yield ToldMessage("assistant", decode(ids[content:stop].tolist()), start, content, stop, stop)
            start, begun = stop, None
        elif author is Attribution.PROMPT and role == "assistant":
            begun = first
        else:
            said: ToldRole = "tool" if author is Attribution.TOOL else role
            yield ToldMessage(said, decode(ids[first:stop].tolist()), start, first, stop, stop)
            start = stop
    if begun is not None:
        yield ToldMessage("assistant", decode(ids[begun:].tolist()), start, begun, len(ids), len(ids))


def _pieces(branch: TokenRecord, steps: dict[int, StepRecord], begin: int) -> Iterator[tuple[Attribution, int, int]]:
    """Stretches of one author behind token `begin`; a sampled one is cut where a step begins."""
    for segment in branch.segments():
        first = max(segment.start, begin)
        if first >= segment.stop:
            continue
        cuts = [at for at in sorted(steps) if first < at < segment.stop]
        if segment.attribution is not Attribution.POLICY:
            cuts = []
        for start, stop in zip([first, *cuts], [*cuts, segment.stop], strict=True):
            yield segment.attribution, start, stop
