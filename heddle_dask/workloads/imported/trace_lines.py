"""The steps of one imported trajectory, and the line of a trace that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CountTokens = Callable[[str], int]
CHARACTERS_PER_TOKEN = 4


def by_characters(text: str) -> int:
    """An estimate, where there is no tokenizer."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class ImportedStep:
    """One call of the model and what came after it.

    Attributes
    ----------
    input_tokens, generated_tokens
        As the log counts them; None: it does not.
    text, observed_text
        What was generated, and what was added before the next call: their tokens are counted where the log does not.
    tool
        Label of the first tool; ``"user"``: a person answered; None: nothing came after it.
    """

    input_tokens: int | None
    generated_tokens: int | None
    cached_tokens: int | None
    text: str
    observed_text: str
    tool: str | None
    tool_s: float | None = None
    llm_s: float | None = None


@dataclass(frozen=True, slots=True)
class ImportedTrajectory:
    """A trajectory of a log; `facts` are further fields of its line, as of the recorded traces."""

    trajectory_id: str
    group_id: str
    prompt_text: str
    steps: Sequence[ImportedStep]
    facts: Mapping[str, Any]

    def line(self, count: CountTokens, counted: str) -> str:
        """Its line of a trace.

        Parameters
        ----------
        counted
            How `count` counts, for the field ``tok``.
        """
        sizes = [(step.input_tokens, step.generated_tokens) for step in self.steps]
        is_told = all(None not in each for each in sizes)
        generated = [count(s.text) if s.generated_tokens is None else s.generated_tokens for s in self.steps]
        inputs = [step.input_tokens for step in self.steps]
        prompt = count(self.prompt_text) if inputs[0] is None else inputs[0]
        steps = []
        for at, step in enumerate(self.steps):
            after = inputs[at + 1] if at + 1 < len(inputs) else None
            before = inputs[at]
            grown = None if after is None or before is None else after - before - generated[at]
            # Where the history was cut, the context has not grown by what was observed.
            observed = count(step.observed_text) if grown is None or grown < 0 else grown
            steps.append(_step(step, generated[at], observed))
        return json.dumps(
            {
                "id": self.trajectory_id,
                "group": self.group_id,
                "prompt_tokens": prompt,
                "tok": "usage" if is_told else counted,
                "complete": True,
                "success": None,
                **self.facts,
                "steps": steps,
            }
        )


def _step(step: ImportedStep, generated: int, observed: int) -> dict[str, Any]:
    told = {"in_tokens": step.input_tokens, "cached_tokens": step.cached_tokens, "llm_s": step.llm_s}
    return {
        "gen_tokens": generated,
        **{name: value for name, value in told.items() if value is not None},
        "tool": step.tool,
        "tool_s": None if step.tool is None else step.tool_s,
        "obs_tokens": observed,
        **({"human": 1} if step.tool == "user" else {}),
    }
