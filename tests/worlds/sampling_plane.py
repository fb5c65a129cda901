"""A control plane whose engine samples given texts, when the test lets it: what it saw and sampled is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worlds.scripted_plane import ScriptedPlane, sampled

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.nouns import StepRequest
from heddle_dask.live.wire.messages import StepCall, StepResult


@dataclass(eq=False)
class Sampled:
    """One step that an engine has begun."""

    call: StepCall
    context: list[int]
    text: str
    ids: tuple[int, ...]
    cut: bool
    released: asyncio.Event
    ended: bool = False


class SamplingPlane(ScriptedPlane):
    """Each step samples the next text; one that begins with ``…`` is cut at its limit of tokens.

    Parameters
    ----------
    texts
        Gives the text of a step of that number.
    holds
        Whether a step waits until it is released.
    """

    def __init__(self, template: ChatTemplate, texts: Callable[[int], str], *, holds: bool = False) -> None:
        super().__init__()
        self.template, self.texts, self.holds = template, texts, holds
        self.steps: list[Sampled] = []

    async def step(self, call: StepCall, request: StepRequest) -> StepResult:
        text = self.texts(len(self.steps))
        cut = text.startswith("…")
        ids = (*self.template._encode(text), *(() if cut else self.template.end_token_ids[:1]))
        step = Sampled(call, [], text, ids, cut, asyncio.Event())
        self.steps.append(step)

        def answer(call: StepCall, context: list[int]) -> Any:
            return sampled(*ids, reason="length" if cut else "stop")(call, context)

        self.script = [answer]
        if not self.holds:
            step.released.set()
        # Taken before any wait, as a worker takes what is sent: the base class keeps what it holds of each context.
        result = await super().step(call, request)
        step.context = self.seen[-1]
        held = self.held[call.step_id.trajectory_id]
        try:
            await step.released.wait()
        except asyncio.CancelledError:
            self.held[call.step_id.trajectory_id] = held[: len(step.context)]
            raise
        step.ended = True
        return result

    @property
    def waiting(self) -> list[Sampled]:
        return [step for step in self.steps if not step.released.is_set()]
