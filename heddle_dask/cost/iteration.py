"""How long an engine takes, as a function of its batch: pure, in seconds and tokens.

One iteration of continuous batching with `batch` decoding sequences, `context_tokens` resident
tokens and `prefill_tokens` prompt tokens beside them takes::

    fixed_s + token_s * batch + prefill_token_s * prefill_tokens
            + sequence_s * batch + context_token_s * context_tokens
            + prompt_s (where prefill_tokens > 0)
            - spared_s * (1 - expert_share) ** (batch + prefill_tokens)

and each prompt that joins the batch adds `per_prompt_s` before its first iteration. What a prompt alone takes beyond
that is no part of this: other prompts go on meanwhile. The last term is for a mixture of experts: `fixed_s` includes
reading the weights of all experts, and a small batch does not read those that none of its tokens visits. A dense model
has `spared_s` 0.

Every decoding sequence gains one token per iteration, so the context grows and the times of a run of iterations are an
arithmetic series: `span_s` sums it, `iterations_within` inverts it, both in constant time. So an emulated or simulated
engine can jump from one change of its batch to the next.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from heddle_dask.core.errors import BadInput

UNLIMITED_TOKENS = 1 << 40

BLOCK_TOKENS = 16
"""Tokens in the smallest KV block; others are multiples of it."""


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """Tokens of the whole KV blocks among `tokens`."""
    return tokens // block_tokens * block_tokens


@dataclass(frozen=True, slots=True)
class EngineCost:
    """The terms of one iteration. All are at least 0.

    Attributes
    ----------
    fixed_s
        Seconds of any iteration: launching, reading the weights.
    token_s
        Seconds per decoded token (arithmetic).
    prefill_token_s
        Seconds per prompt token.
    sequence_s
        Seconds per decoding sequence (sampling, bookkeeping).
    context_token_s
        Seconds per resident token (reading its KV).
    chunk_tokens
        Maximum number of prompt tokens in one iteration.
    capacity_tokens
        KV capacity in tokens.
    spared_s
        The part of `fixed_s` for reading the weights of all experts; 0: a dense model.
    expert_share
        Share of the experts that one token visits, at most 1.
    prompt_s
        Additional seconds of an iteration with any prompt tokens, for kernels compiled for a new shape (CPU engines).
    per_prompt_s
        Seconds for each prompt that joins the batch, one after another: the engine's own work on a request.
    block_tokens
        Tokens in a KV block; the prefix cache finds whole blocks only.
    whole_prompts
        True: an iteration takes whole prompts only; a prompt waits if it does not fit into `chunk_tokens` beside one
        token of each decoding sequence. False: prompts are split into chunks.
    """

    fixed_s: float
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    chunk_tokens: int = 2048
    capacity_tokens: int = UNLIMITED_TOKENS
    spared_s: float = 0.0
    expert_share: float = 0.0
    prompt_s: float = 0.0
    block_tokens: int = BLOCK_TOKENS
    whole_prompts: bool = False
    per_prompt_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "whole_prompts":
                if not isinstance(value, bool):
                    raise BadInput(f"engine cost whole_prompts is {value!r}: use true or false")
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadInput(f"engine cost {field.name} is {value!r}: use a number")
            least = 1 if field.name.endswith("_tokens") else 0
            if not least <= value < math.inf:
                raise BadInput(f"engine cost {field.name} is {value!r}: use at least {least}")
        if self.spared_s > self.fixed_s:
            raise BadInput(f"engine cost spared_s is {self.spared_s!r}: use at most fixed_s ({self.fixed_s!r})")
        if self.block_tokens % BLOCK_TOKENS:
            raise BadInput(f"engine cost block_tokens is {self.block_tokens!r}: use a multiple of {BLOCK_TOKENS}")
        if self.expert_share > 1:
            raise BadInput(f"engine cost expert_share is {self.expert_share!r}: use at most 1")

    def iteration_s(self, batch: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        fixed_s = self.fixed_s
        if prefill_tokens:
            fixed_s += self.prompt_s
        if self.spared_s:
            fixed_s -= self.spared_s * (1.0 - self.expert_share) ** (batch + prefill_tokens)
        return (
            fixed_s
            + (self.token_s + self.sequence_s) * batch
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
        )

    def scaled(self, factor: float) -> EngineCost:
        """The cost of an engine that takes `factor` times as long for everything."""
        seconds = {each.name: getattr(self, each.name) * factor for each in fields(self) if each.name.endswith("_s")}
        return replace(self, **seconds)

    def for_contexts(self, max_context_tokens: int) -> EngineCost:
        """The cost of an engine with this context limit: with `whole_prompts`, `chunk_tokens` must hold one context.

        vLLM does not start otherwise. A table measured with shorter contexts has a smaller `chunk_tokens`.
        """
        if not self.whole_prompts or self.chunk_tokens >= max_context_tokens:
            return self
        return replace(self, chunk_tokens=max_context_tokens)

    def span_s(self, iterations: int, batch: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """Seconds of `iterations` iterations with an unchanged batch; `context_tokens` at the first.

        Each iteration adds `batch` + `prefill_tokens` to the context.
        """
        growth = self.context_token_s * (batch + prefill_tokens)
        first = self.iteration_s(batch, context_tokens, prefill_tokens)
        return iterations * first + growth * iterations * (iterations - 1) / 2

    def iterations_within(self, seconds: float, batch: int, context_tokens: int, prefill_tokens: int = 0) -> int:
        """The largest number of iterations with a `span_s` of at most `seconds`.

        Raises
        ------
        ValueError
            An iteration takes no time, so the number is unbounded.
        """
        first = self.iteration_s(batch, context_tokens, prefill_tokens)
        if first <= 0:
            raise ValueError("an iteration takes no time: any number fits")
        if seconds < first:
            return 0
        growth = self.context_token_s * (batch + prefill_tokens)
        linear = first - growth / 2
        # This form of the root is exact also if `growth` is (nearly) 0.
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 2 * growth * seconds))
        count = max(0, int(root) - 1)
        while self.span_s(count + 1, batch, context_tokens, prefill_tokens) <= seconds:
            count += 1
        return count

    def decode_token_s(self, batch: int, context_tokens: int) -> float:
        """Seconds per token of each of `batch` sequences with `context_tokens` in total."""
        return self.iteration_s(batch, context_tokens)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` uncached prompt tokens alone, after `context_tokens` cached."""
        full, rest = divmod(tokens, self.chunk_tokens)
        seconds = self.span_s(full, 0, context_tokens, self.chunk_tokens) if full else 0.0
        if rest:
            seconds += self.iteration_s(0, context_tokens + full * self.chunk_tokens, rest)
        return seconds

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `heddle_dask.cost.engine_cost.cost_from_mapping` makes an equal cost."""
        return asdict(self)


def fixed_cost(seconds_per_token: float) -> EngineCost:
    """Every token takes `seconds_per_token` whatever else runs, and prompts are free.

    A step of n tokens then takes exactly n times that. For measuring overheads.
    """
    return EngineCost(fixed_s=seconds_per_token, chunk_tokens=UNLIMITED_TOKENS)
