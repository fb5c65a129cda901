"""One LLM step from its first request to its last answer: lost attempts and preempted parts make one record."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heddle_dask.engines.contract import SamplingParams
from heddle_dask.live.wire.messages import StepResult
from heddle_dask.records.trajectory import StepRecord


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that is not finished, with the sums over its preempted parts.

    Attributes
    ----------
    sampling
        As the program asked for it; each request has a part of its tokens, and a seed of its own.
    """

    index: int
    start: int
    sampling: SamplingParams
    submitted_s: float
    attempt: int = 0
    parts: int = 0
    send_all: bool = False
    generated: int = 0
    came_from: str = ""
    preemptions: int = 0
    migrations: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    engine_s: float = 0.0
    last: StepResult | None = None

    @property
    def finished(self) -> bool:
        """Whether an answer has ended it."""
        return self.last is not None and self.last.status == "ok"

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.sampling.max_tokens - self.generated

    def asked_again(self) -> OpenStep:
        """The step after an attempt without an answer; the worker's copy of the context may be gone with its engine."""
        return replace(self, attempt=self.attempt + 1, send_all=True)

    def with_part(self, result: StepResult, tokens: int) -> OpenStep:
        """The step after an answer of `tokens` tokens: the whole step, or a preempted part of it.

        A time is NaN as soon as that of one part is unknown: the sum over the others would be too small.
        """
        before = self.came_from if self.last is None else self.last.engine_id
        made = result.generated
        moved = before not in ("", result.engine_id)
        return replace(
            self,
            attempt=self.attempt + 1,
            send_all=False,
            parts=self.parts + 1,
            generated=self.generated + tokens,
            preemptions=self.preemptions + (result.status == "aborted"),
            migrations=self.migrations + moved,
            cached_tokens=self.cached_tokens + made.cached_tokens,
            queue_s=self.queue_s + made.queue_s,
            prefill_s=self.prefill_s + made.prefill_s,
            decode_s=self.decode_s + made.decode_s,
            engine_s=self.engine_s + result.engine_s,
            last=result,
        )

    def begun_again(self, result: StepResult) -> OpenStep:
        """The step after a preempted part that cannot be continued: an engine applies a form from the first token."""
        return replace(self.with_part(result, 0), send_all=True)

    def as_record(self, token_stop: int, finished_s: float) -> StepRecord:
        """The record of the step, once it is finished."""
        assert self.last is not None, self
        return StepRecord(
            step_index=self.index,
            branch=0,
            token_start=self.start,
            token_stop=token_stop,
            engine_id=self.last.engine_id,
            finish_reason=self.last.generated.finish_reason,
            prompt_tokens=self.start,
            generated_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            migrations=self.migrations,
            submitted_s=self.submitted_s,
            finished_s=finished_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            max_tokens=self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
        )
