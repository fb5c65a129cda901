"""The emulated engine: turns requests into jobs of a batch, real time into model time, ended jobs into answers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heddle_dask.cost.batching import ContinuousBatch
from heddle_dask.engines.emulated.kv_cache import BlockAllocation, KvCache, RoomForTokens, TokenJob
from heddle_dask.engines.emulated.options import emulated_options
from heddle_dask.engines.emulated.precise_timer import PreciseTimer
from heddle_dask.engines.emulated.scripted import ScriptedSource
from heddle_dask.engines.emulated.tokens import TokenSource
from heddle_dask.engines.emulated.traits import EmulatedTraits
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.wire import ENGINE_ID_PREFIX

_LARGEST_ID = (1 << 32) - 1


class BadRequest(Exception):
    """A request that a real engine refuses with HTTP 400; the message is the answer."""


class Step:
    """One request in the engine: its job and its sampled tokens.

    `own_seed` is used when the request has none.
    """

    def __init__(
        self, body: Mapping[str, Any], spec: EngineSpec, source: TokenSource, own_seed: int, label: str
    ) -> None:
        sampling = body.get("sampling_params") or {}
        self.request_id = str(body.get("request_id", ""))
        self._prompt = prompt_of(body, spec.named_context_tokens)
        self._ignore_eos = bool(sampling.get("ignore_eos", False))
        self._seed = _seed(sampling, own_seed)
        self._stop_token_ids = _integers(sampling.get("stop_token_ids") or (), "stop_token_ids")
        asked = sampling.get("max_tokens", spec.named_context_tokens)
        if not isinstance(asked, int) or asked < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {asked!r}.")
        priority = body.get("priority", 0)
        if not isinstance(priority, int):
            raise BadRequest(f"priority must be an integer, got {priority!r}.")
        self._source = source
        self._most = min(asked, spec.named_context_tokens - len(self._prompt))
        self._drawn: tuple[list[int], list[float], bool] | None = None
        self._texts: tuple[list[str], list[str]] | None = None
        length = self._most if self._ignore_eos else len(self._draw()[0])
        self.job = TokenJob(len(self._prompt), length, priority, prompt=self._prompt, tokens=self._first)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._labels = [(label, 0)]

    def relabel(self, label: str, sampled_tokens: int) -> None:
        """Label what is sampled after the first `sampled_tokens` tokens."""
        self._labels.append((label, sampled_tokens))

    def _draw(self) -> tuple[list[int], list[float], bool]:
        if self._drawn is None:
            self._drawn = self._source.draw(
                self._prompt,
                self._most,
                seed=self._seed,
                ignore_eos=self._ignore_eos,
                stop_token_ids=self._stop_token_ids,
            )
        return self._drawn

    def _first(self, count: int) -> list[int]:
        return self._draw()[0][:count]

    def prepare(self) -> None:
        """Format the answer's entry of each token before the step ends; afterwards it would delay the answer."""
        if self._texts is None:
            tokens, logprobs, _ = self._draw()
            # Formatted by hand: for a step of 1,000 tokens this takes a third of the time of json.dumps.
            content = [
                f'{{"token_id":{token},"logprob":{logprob},"rank":1,"top_logprobs":[]}}'
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            self._texts = list(map(str, tokens)), content

    @property
    def prompt(self) -> Sequence[int]:
        return self._prompt

    def _spans(self, count: int) -> list[dict[str, Any]]:
        ends = [min(start, count) for _, start in self._labels[1:]] + [count]
        return [
            {"version": label, "start": start, "end": end}
            for (label, start), end in zip(self._labels, ends, strict=True)
            if start < end
        ]

    def part(self, start: int, stop: int) -> str:
        """Some of its tokens as an event of a stream, in the form of vLLM's."""
        self.prepare()
        assert self._texts is not None
        token_ids, content = self._texts
        return (
            f'data: {{"choices":[{{"index":0,"finish_reason":null,"token_ids":[{",".join(token_ids[start:stop])}],'
            f'"logprobs":{{"content":[{",".join(content[start:stop])}]}}}}]}}\n\n'
        )

    def answer(self, model: str, scale: float, kept: Mapping[str, Any] | None = None) -> str:
        """The JSON answer, in the form of vLLM's; `scale` turns model seconds into real ones.

        `kept` names the blocks that another engine may fetch.
        """
        job = self.job
        count = job.generated
        self.prepare()
        assert self._texts is not None
        tokens, _, stopped = self._draw()
        token_ids, content = self._texts
        reason = "stop" if stopped and count == len(tokens) else "length"
        reason = "abort" if job.aborted else reason
        prompt_count = len(self._prompt)
        kv = f'"kv_transfer_params":{json.dumps(kept)},' if kept is not None else ""
        spans = json.dumps(self._spans(count))
        return (
            f'{{"request_id":{json.dumps(ENGINE_ID_PREFIX + self.request_id)},"output_mode":"tokens",{kv}'
            f'"choices":[{{"index":0,'
            f'"finish_reason":"{reason}","stop_reason":null,'
            f'"token_ids":[{",".join(token_ids[:count])}],'
            f'"logprobs":{{"content":[{",".join(content[:count])}]}},"weight_versions":{spans}}}],'
            f'"usage":{{"prompt_tokens":{prompt_count},"completion_tokens":{count},'
            f'"total_tokens":{prompt_count + count},'
            f'"prompt_tokens_details":{{"cached_tokens":{job.cached_tokens}}}}},'
            f'"metrics":{{"queue_time_ms":{_ms(job.admitted_s - job.submitted_s, scale)},'
            f'"time_to_first_token_ms":{_ms(job.first_token_s - job.admitted_s, scale)},'
            f'"generation_time_ms":{_ms(job.ended_s - job.first_token_s, scale)}}}}}'
        )


def _ms(seconds: float, scale: float) -> str:
    return "null" if math.isnan(seconds) else repr(round(1000 * scale * seconds, 4))


def prompt_of(body: Mapping[str, Any], max_model_len: int) -> list[int]:
    """The context of a request; BadRequest when the engine cannot take it."""
    prompt = _integers(body.get("token_ids"), "token_ids")
    if not prompt:
        raise BadRequest("token_ids must hold at least one token.")
    if len(prompt) >= max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, your request "
            f"has {len(prompt)} input tokens, which leaves no room for output."
        )
    return prompt


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {int}:
        raise BadRequest(f"{name} must be a list of integers.")
    if value and not (min(value) >= 0 and max(value) <= _LARGEST_ID):
        raise BadRequest(f"{name} must hold token ids: integers of at least 0.")
    return list(value)


def _seed(sampling: Mapping[str, Any], own_seed: int) -> int | None:
    # Greedy sampling needs no seed; None selects greedy sampling in the token source.
    if sampling.get("temperature", 1.0) == 0:
        return None
    seed = sampling.get("seed")
    if seed is not None and not isinstance(seed, int):
        raise BadRequest(f"seed must be an integer, got {seed!r}.")
    return seed if seed is not None else own_seed


def _source(spec: EngineSpec, traits: EmulatedTraits) -> TokenSource:
    script = emulated_options(spec.options).script
    drawn = (spec.seed, traits.mean_length_tokens, traits.end_token_id)
    return TokenSource(*drawn) if script is None else ScriptedSource(script, spec.model, *drawn)


class EmulatedEngine:
    """Runs steps in the time of its cost model; one per event loop.

    Model time is real time since the engine's start divided by the scale. A change of speed (a fault) affects only the
    time after it.
    """

    def __init__(self, spec: EngineSpec, traits: EmulatedTraits) -> None:
        self.spec = spec
        self._source = _source(spec, traits)
        self._kv_cache = KvCache(traits.kv_capacity_tokens, traits.cost.block_tokens)
        self._batch: ContinuousBatch[TokenJob] = ContinuousBatch(
            traits.cost, spec.named_slots, RoomForTokens(self._kv_cache)
        )
        self._time_scale = emulated_options(spec.options).time_scale
        self._scale = self._time_scale * traits.faults.slow_factor
        self._real_zero_s = time.monotonic()
        self._model_zero_s = 0.0
        self._steps: dict[TokenJob, Step] = {}
        self._by_id: dict[str, list[Step]] = {}
        self._draws = 0
        self._ended_tokens = 0
        self._label = "default"
        self._paused_s: float | None = None  # model time at which the engine was paused
        self._timer: PreciseTimer | None = None

    def close(self) -> None:
        """Stop the clock; running steps never end."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def set_slow_factor(self, factor: float) -> None:
        """Multiply the cost model's seconds by `factor` from now on."""
        now_s = self._now_s()
        self._settle(self._batch.advance(now_s))
        self._real_zero_s, self._model_zero_s = time.monotonic(), now_s
        self._scale = self._time_scale * factor
        self._arm()

    async def run(
        self,
        body: Mapping[str, Any],
        keep: Callable[[Sequence[int]], Mapping[str, Any] | None] | None = None,
    ) -> str:
        """Run one step; returns the JSON answer. Cancelling drops the step.

        `keep` is called with the context of a step that ended by itself, while its KV is still cached; its result
        becomes part of the answer.
        """
        # The engine's own seeds are negative, so that they differ from all seeds of requests.
        self._draws += 1
        step = Step(body, self.spec, self._source, own_seed=-self._draws, label=self._label)
        self._steps[step.job] = step
        self._by_id.setdefault(step.request_id, []).append(step)
        self._settle(self._batch.submit(step.job, self._now_s()))
        self._arm()
        step.prepare()
        try:
            if not step.ended.done():
                await step.ended
        except asyncio.CancelledError:
            self._abort([step])
            raise
        kept = keep(step.prompt) if keep is not None and not step.job.aborted else None
        return step.answer(self.spec.model, self._scale, kept)

    def pause(self) -> None:
        """Freeze all steps; a second call does nothing."""
        if self._paused_s is None:
            now_s = self._now_s()
            self._settle(self._batch.advance(now_s))
            self._paused_s = now_s
            self._arm()

    def resume(self) -> None:
        """Let the steps go on, as if no time had passed."""
        if self._paused_s is not None:
            self._real_zero_s, self._model_zero_s = time.monotonic(), self._paused_s
            self._paused_s = None
            self._settle(self._batch.advance(self._now_s()))
            self._arm()

    def drop_kv(self) -> bool:
        """Put running steps back into the queue and forget all KV; False if another engine still fetches some."""
        now_s = self._now_s()
        self._settle(self._batch.requeue_all(now_s))
        dropped = self._kv_cache.clear()
        self._settle(self._batch.advance(now_s))
        self._arm()
        return dropped

    @property
    def label(self) -> str:
        """The version of the weights, as it was told."""
        return self._label

    def relabel(self, label: str) -> None:
        """Label the tokens that are sampled from now on."""
        self._settle(self._batch.advance(self._now_s()))
        self._label = label
        for step in self._steps.values():
            step.relabel(label, self._batch.sampled_tokens(step.job))

    @property
    def scale(self) -> float:
        """Real seconds per model second."""
        return self._scale

    def running(self, request_id: str) -> tuple[Step | None, int]:
        """The latest running step of this name, and how many tokens it has sampled; None and 0 where there is none."""
        self._settle(self._batch.advance(self._now_s()))
        self._arm()
        steps = self._by_id.get(request_id)
        return (steps[-1], self._batch.sampled_tokens(steps[-1].job)) if steps else (None, 0)

    def counters(self) -> tuple[int, int]:
        """Tokens sampled since the engine's start, and context tokens in the batch now."""
        self._settle(self._batch.advance(self._now_s()))
        self._arm()
        sampled_tokens = sum(self._batch.sampled_tokens(job) for job in self._steps)
        return self._ended_tokens + sampled_tokens, self._batch.context_tokens

    def hit_tokens(self, context: Sequence[int]) -> int:
        """Tokens of `context` that a step with it would find cached now."""
        return self._kv_cache.hit_tokens(context)

    def pin(self, context: Sequence[int]) -> BlockAllocation | None:
        """Hold room for `context` in the KV cache until `unpin`; None when running steps need it."""
        now_s = self._now_s()
        self._settle(self._batch.advance(now_s))
        held = self._kv_cache.acquire(context, self._batch.running)
        self._settle(self._batch.advance(now_s))
        self._arm()
        return held

    def unpin(self, held: BlockAllocation, context: Sequence[int]) -> None:
        """Release the allocation of `pin`; the blocks stay cached until they are evicted."""
        now_s = self._now_s()
        self._settle(self._batch.advance(now_s))
        self._kv_cache.release(held, context)
        self._settle(self._batch.advance(now_s))
        self._arm()

    def insert(self, context: Sequence[int]) -> bool:
        """Put transferred KV into the cache; False if there is no room."""
        held = self.pin(context)
        if held is None:
            return False
        self.unpin(held, context)
        return True

    def abort(self, engine_ids: Sequence[str]) -> int:
        """End the steps with these ids (in the engine's form) early; returns their number."""
        steps = [step for name in engine_ids for step in self._by_id.get(name.removeprefix(ENGINE_ID_PREFIX), ())]
        self._abort(steps)
        return len(steps)

    def abort_all(self) -> int:
        """End every step early, as vLLM does on an empty list of ids."""
        steps = list(self._steps.values())
        self._abort(steps)
        return len(steps)

    # ------------------------------------------------------------------ inside

    def _abort(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._settle(self._batch.abort(step.job, self._now_s()))
        self._arm()

    def _now_s(self) -> float:
        if self._paused_s is not None:
            return self._paused_s
        return self._model_zero_s + (time.monotonic() - self._real_zero_s) / self._scale

    def _settle(self, ended: Sequence[TokenJob]) -> None:
        self._batch.admitted.clear()
        for job in ended:
            step = self._steps.pop(job)
            self._ended_tokens += job.generated
            same_id = self._by_id[step.request_id]
            same_id.remove(step)
            if not same_id:
                del self._by_id[step.request_id]
            if not step.ended.done():
                step.ended.set_result(None)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = PreciseTimer(self._tick)
        if self._batch.next_s < math.inf and self._paused_s is None:
            delay_s = (self._batch.next_s - self._model_zero_s) * self._scale
            self._timer.set(self._real_zero_s + delay_s)
        else:
            self._timer.cancel()

    def _tick(self) -> None:
        self._settle(self._batch.advance(self._now_s()))
        self._arm()
