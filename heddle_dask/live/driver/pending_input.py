"""What a program has appended to its context and no step has sent yet: messages, or raw tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.environments.base import Role
from heddle_dask.records.token_record import Attribution, TokenRecord

_ATTRIBUTION: Mapping[str, Attribution] = {
    "system": Attribution.PROMPT,
    "user": Attribution.PROMPT,
    "tool": Attribution.TOOL,
}


class PendingInput:
    """Appended messages and tokens; each is rendered into the record once, as a masked delta.

    Attributes
    ----------
    turn_ended
        Whether the record ends with a whole turn; False: what is rendered next has to end the policy's turn first.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._messages: list[dict[str, str]] = []
        self._tokens: list[int] = []
        self.turn_ended = True

    def append(self, record: TokenRecord, role: Role, text: str, first_step: bool) -> None:
        """Add a message; tokens that were added before are rendered first."""
        if role not in _ATTRIBUTION:
            raise ValueError(f"role {role!r} cannot be appended; use {', '.join(_ATTRIBUTION)}")
        if self._tokens:
            self.render(record, first_step)
        self._messages.append({"role": role, "content": text})

    def append_tokens(self, record: TokenRecord, token_ids: Sequence[int], first_step: bool) -> None:
        """Add raw tokens; messages that were added before are rendered first."""
        if self._messages:
            self.render(record, first_step)
        self._tokens.extend(int(token) for token in token_ids)

    def render(self, record: TokenRecord, first_step: bool) -> None:
        """Move everything into the record; raw tokens are a prompt before the first step, and a tool's after it."""
        if self._tokens:
            record.append(self._tokens, Attribution.PROMPT if first_step else Attribution.TOOL)
            self._tokens = []
        if not self._messages:
            return
        messages, self._messages = self._messages, []
        attribution = _ATTRIBUTION[messages[-1]["role"]]
        if len(record) == 0:
            record.append(self._template.render(messages), attribution)
        else:
            record.append(self._template.bridge(messages, ended=self.turn_ended), attribution)
