"""Ends a step at its stop strings: where the engine did not look for them, or one began in a preempted part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from heddle_dask.live.wire.messages import StepResult


def tokens_to_stop(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop: Sequence[str]
) -> int | None:
    """Number of tokens up to the one that completes the first stop string; None when the text has none."""
    if not _stops(decode(token_ids), stop):
        return None
    too_few, enough = 0, len(token_ids)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _stops(decode(token_ids[:middle]), stop):
            enough = middle
        else:
            too_few = middle
    return enough


def _stops(text: str, stop: Sequence[str]) -> bool:
    return any(each in text for each in stop)


def cut_at_stop(result: StepResult, tokens: int) -> StepResult:
    """The answer with its first `tokens` tokens, as one that a stop string has ended."""
    whole = result.generated
    cut = replace(
        whole,
        finish_reason="stop",
        token_ids=whole.token_ids[:tokens],
        logprobs=whole.logprobs[:tokens],
        version_spans=tuple(
            replace(span, stop=min(span.stop, tokens)) for span in whole.version_spans if span.start < tokens
        ),
    )
    return replace(result, status="ok", generated=cut)
