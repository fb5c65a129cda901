"""The options of one `generate` call: checked, and completed by the run's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from heddle_dask.core.errors import BadInput, check_count
from heddle_dask.core.sampling import StructuredOutput, check_sampling, check_seed, checked_stop
from heddle_dask.engines.contract import SamplingParams
from heddle_dask.live.driver.programs.services import Budget, Sampling

_WHERE = "generate"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What the program asks of one step; None: the run's default.

    Raises
    ------
    BadInput
        A value of another type, out of its range, or one that contradicts another.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | Sequence[str] | None = None
    structured: StructuredOutput | None = None
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.integer | np.floating):
                object.__setattr__(self, each.name, value.item())
        if self.max_tokens is not None:
            check_count(f"{_WHERE}: max_tokens", self.max_tokens)
        if self.seed is not None:
            check_seed(_WHERE, self.seed)
        check_count(f"{_WHERE}: n", self.n)
        if not isinstance(self.ignore_eos, bool):
            raise BadInput(f"{_WHERE}: ignore_eos is {self.ignore_eos!r}: use True or False")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise BadInput(f"{_WHERE}: structured is {self.structured!r}: use StructuredOutput(…)")
        if self.ignore_eos and (checked_stop(_WHERE, self.stop) or self.structured is not None):
            raise BadInput(
                f"{_WHERE}: ignore_eos asks for exactly max_tokens tokens: leave out stop and structured"
            )

    def completed(
        self, defaults: Sampling, budget: Budget, room: int, end_ids: tuple[int, ...]
    ) -> SamplingParams:
        """The sampling of the whole step, in a context that has room for `room` more tokens.

        Raises
        ------
        BadInput
            As the constructor.
        """
        chosen = {
            name: getattr(defaults, name) if getattr(self, name) is None else getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p")
        }
        check_sampling(_WHERE, **chosen)
        asked = self.max_tokens or budget.max_step_tokens or room
        return SamplingParams(
            max_tokens=min(asked, room),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            stop_token_ids=end_ids,
            stop=checked_stop(_WHERE, self.stop),
            structured=self.structured,
            **chosen,
        )


def with_seed_of(sampling: SamplingParams, number: int) -> SamplingParams:
    """The sampling of continuation `number` of one context, from 0: with one seed, all would be the same."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % 2**63)
