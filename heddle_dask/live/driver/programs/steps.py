"""The steps of one branch: their options, what is sent of their context, and their answers, which make one record each.

An answer comes from the journal while it has some, then from engines. Lost attempts and preempted parts make one step;
it ends at its stop strings also where the engine did not look for them.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from heddle_dask.core.errors import BadInput, check_count
from heddle_dask.core.ids import StepId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.sampling import StructuredOutput, check_sampling, check_seed, checked_stop
from heddle_dask.engines.contract import ReplyReading, SamplingParams
from heddle_dask.live.driver.connection.submission import Interrupted
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.branch import BranchPort, ReplayDiverged
from heddle_dask.live.wire.gateway_messages import TextTarget
from heddle_dask.live.wire.messages import StepCall, StepResult
from heddle_dask.live.wire.result_codec import context_crc, step_body, step_from_body
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import StepRecord

_WHERE = "generate"


class BudgetExhausted(Exception):
    """The program asked for a step although its step, token or context budget is used up."""


class StepLost(Exception):
    """A step has no result: the engine refuses it, or it was lost too often. The message says why."""


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
            raise BadInput(f"{_WHERE}: ignore_eos asks for exactly max_tokens tokens: leave out stop and structured")

    def completed(self, defaults: Sampling, budget: Budget, room: int, end_ids: tuple[int, ...]) -> SamplingParams:
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


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that is not finished, with the sums over its preempted parts."""

    index: int
    start: int
    # As the program asked for it; each request has a part of its tokens, and a seed of its own.
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
    reading: ReplyReading | None = None  # how the engine is to read the reply
    text_to: TextTarget | None = None  # where its text goes while it runs

    @property
    def finished(self) -> bool:
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

        A time is NaN as soon as that of one part is unknown: the sum over the others would be too small. What was
        called back before it began is no preemption: its engine drained, or another one took the step.
        """
        made = result.generated
        if result.status == "aborted" and not (result.run_s or made.token_ids):
            return replace(self, attempt=self.attempt + 1, send_all=False, parts=self.parts + 1)
        before = self.came_from if self.last is None else self.last.engine_id
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


class StepAnswers:
    """The source of a branch's answers."""

    def __init__(self, port: BranchPort, seed: int) -> None:
        self._port = port
        self._seed = seed
        self.held = HeldContext()  # what the worker holds of the context

    async def next(self, step: OpenStep, record: TokenRecord) -> StepResult:
        """The next journalled result of this step over `record`, or one from an engine.

        Raises
        ------
        StepLost
            In the recorded run the step was lost here.
        ReplayDiverged
            The journal holds another step.
        """
        if self._port.recorded.steps:
            return await self._replayed(step, record)
        asked_s = self._port.services.clock()
        result = await self._ask(step, record)
        if result.status in ("ok", "aborted"):
            # Waiting for an engine and for a slot, and the control plane; a wait inside the engine comes on top.
            outside_s = max(0.0, self._port.services.clock() - asked_s - result.run_s)
            made = result.generated
            inside_s = 0.0 if math.isnan(made.queue_s) else made.queue_s
            result = replace(result, generated=replace(made, queue_s=outside_s + inside_s))
            self._port.journal("step", step_body(step.index, record.token_ids, result))
        return result

    async def _replayed(self, step: OpenStep, record: TokenRecord) -> StepResult:
        if self._port.recorded.next_is_cancelled(step.index):
            # It will be cancelled, as in the recorded run.
            await asyncio.Event().wait()
        body = self._port.recorded.steps.popleft()
        self.held.not_sent()  # the first real step brings everything
        if "lost" in body and body["step_index"] == step.index:
            raise StepLost(body["lost"])
        asked = (step.index, len(record), context_crc(record.token_ids))
        if (body["step_index"], body.get("context_tokens"), body.get("context_crc")) != asked:
            held = f"over {body['context_tokens']}" if "context_tokens" in body else "that was given up"
            held += " other ones" if body.get("context_tokens") == len(record) else ""
            raise ReplayDiverged(
                f"step {step.index} over {len(record)} tokens; the journal holds step {body['step_index']} {held}"
            )
        return step_from_body(body)

    async def _ask(self, step: OpenStep, record: TokenRecord) -> StepResult:
        request = StepRequest(
            StepId(self._port.spec.trajectory_id, step.index, step.attempt),
            len(record),
            step.tokens_left,
        )
        self._port.announce()
        base_tokens, base_crc, delta = self.held.delta(record, step.send_all)
        call = StepCall(
            session=self._port.services.session,
            step_id=request.step_id,
            base_tokens=base_tokens,
            base_crc=base_crc,
            delta=delta,
            sampling=replace(step.sampling, max_tokens=step.tokens_left, seed=self._seed_of(step)),
            reading=None if step.reading is None else replace(step.reading, sampled_tokens=step.generated),
            text_to=None if step.text_to is None else replace(step.text_to, sampled_tokens=step.generated),
        )
        try:
            return await self._port.services.submitter.step(call, request)
        except Interrupted as interrupt:
            if interrupt.kind == "given-up":
                return StepResult(status="refused", message=interrupt.cause)
            return StepResult(status="engine-lost", message=interrupt.cause)

    def _seed_of(self, step: OpenStep) -> int | None:
        """The seed of the next request, if it has one: the program's, or the trajectory's; parts draw differently."""
        if step.sampling.seed is not None:
            return (step.sampling.seed + step.parts) % 2**63
        if not self._port.services.sampling.seeded:
            return None
        return (self._seed * 1_000_003 + step.index * 1_009 + step.parts) % 2**31

    def lost(self, step: OpenStep, message: str) -> StepLost:
        """The failure, journalled: the program may go on after it, and does the same when it is resumed."""
        if not self._port.branch.tree.interrupted:
            self._port.journal("step-lost", {"step_index": step.index, "lost": message})
        return StepLost(message)

    def give_up(self, step: OpenStep) -> None:
        """The program has cancelled the step; unless the run is ending, it does so again when it is resumed."""
        tree = self._port.branch.tree
        if self._port.recorded.next_is_cancelled(step.index):
            self._port.recorded.steps.popleft()
        elif not (tree.interrupted or tree.ended):
            self._port.journal("step-cancelled", {"step_index": step.index})


class HeldContext:
    """The worker's copy of one context. It may be dropped there at any time; the checksum finds that out."""

    def __init__(self) -> None:
        self._tokens = 0
        self._crc = 0
        # Of the context that was sent last; None when no worker has seen it.
        self._sent_crc: int | None = None

    def delta(self, record: TokenRecord, send_all: bool) -> tuple[int, int, bytes]:
        """What the next step has to send; `send_all`: the worker's copy may be gone.

        Length and CRC-32 of the tokens that the worker holds, and the tokens that follow, as little-endian int32.
        """
        tokens, crc = (0, 0) if send_all else (self._tokens, self._crc)
        token_ids = np.ascontiguousarray(record.token_ids[tokens:], dtype="<i4").tobytes()
        self._sent_crc = zlib.crc32(token_ids, crc)
        return tokens, crc, token_ids

    def not_sent(self) -> None:
        """The next answer is a recorded one: no worker has seen its context."""
        self._sent_crc = None

    def answered(self, record: TokenRecord, sampled: bytes) -> None:
        """The worker holds the context that was sent, followed by what it sampled, which `record` ends with."""
        if self._sent_crc is None:
            self._tokens, self._crc = 0, 0
        else:
            self._tokens, self._crc = len(record), zlib.crc32(sampled, self._sent_crc)


def tokens_to_stop(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
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
    return replace(result, status="ok", generated=cut, read="" if tokens < len(whole.token_ids) else result.read)


async def side_by_side(coroutines: Sequence[Coroutine[None, None, None]]) -> None:
    """Wait until all have ended; the first failure, and a cancellation, cancels the others and awaits them."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
