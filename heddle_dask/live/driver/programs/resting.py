"""What a context was behind each of its steps: from there a branch can go on, whatever came after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.function_tools import ToolTurns
from heddle_dask.live.driver.programs.pending_input import PendingInput
from heddle_dask.records.token_record import TokenRecord


@dataclass(frozen=True, slots=True)
class Resting:
    """A context between two steps, without its tokens: a record only grows, and earlier states are its beginnings.

    Attributes
    ----------
    steps
        Number of steps that led here, those before a fork included.
    record_tokens
        Length of the record.
    seen
        Tokens of it that an engine has seen or sampled.
    variables
        Those of the chat template that were set.
    """

    steps: int
    record_tokens: int
    seen: int
    input: PendingInput
    tools: ToolTurns
    variables: Mapping[str, Any]

    def copy(self) -> Resting:
        """The same state, which later calls of the context do not change."""
        return replace(self, input=self.input.copy(), tools=replace(self.tools), variables=dict(self.variables))

    @property
    def context_tokens(self) -> int:
        """Tokens of the context, those included that wait for the next step."""
        return self.record_tokens + self.input.tokens(self.record_tokens)

    def with_messages(self, record: TokenRecord, messages: Sequence[ChatMessage], template: Mapping[str, Any]) -> int:
        """Tokens of the context with these messages behind it; `record` begins with its record.

        Raises
        ------
        BadInput
            The template refuses the messages, or has no such variables.
        """
        pending, beginning = self.input.copy(), record.shared(self.record_tokens)
        if template:
            pending.template = pending.template.with_variables(template)
        for message in messages:
            pending.append_message(beginning, message, first_step=self.steps == 0)
        return len(beginning) + pending.tokens(len(beginning))


@dataclass(slots=True)
class StepEnds:
    """The states of one context behind its own steps, and before everything."""

    template: ChatTemplate  # without variables that a program has set
    _ends: list[Resting] = field(default_factory=list)

    def add(self, state: Resting) -> None:
        """A step of the context has ended."""
        self._ends.append(state.copy())

    def behind(self, step_index: int, first_step: int) -> Resting:
        """The state behind a step; `first_step` is the number of the first that is the context's own.

        Raises
        ------
        BadInput
            The context has no such step.
        """
        if step_index == -1:
            return Resting(0, 0, 0, PendingInput(self.template), ToolTurns(), {})
        number = step_index - first_step
        if not 0 <= number < len(self._ends):
            own = f"{first_step} to {first_step + len(self._ends) - 1}" if self._ends else "none"
            raise BadInput(f"after_step is {step_index}: the steps of this context that have ended are: {own}")
        return self._ends[number]
