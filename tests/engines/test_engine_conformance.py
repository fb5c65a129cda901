"""One suite for every engine: what the rest of the project may take for granted.

The emulated engine runs always; vLLM where it is installed (marked `vllm`, `slow`), on the shipped
checkpoint or on a random model of the same shape.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.rendered_requests import DIALECTS, TEMPLATE, model_with_template, order_of, rendered

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.chat.tool_calls import ReadReply, ToolCall, format_call
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    KvTransferFailed,
    ReplyReading,
    SamplingParams,
    VersionSpan,
)
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.live.driver.programs.steps import tokens_to_stop
from heddle_dask.live.wire.messages import StepCall
from heddle_dask.live.worker.context_cache import CachedContext
from heddle_dask.live.worker.reply_reading import read_by_engine

MAX_MODEL_LEN = 2048
SLOTS = 8
CEILING_S = 150.0
CHECKPOINT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"


def _random_model(directory: Path) -> None:
    """A random Qwen3 with a byte vocabulary, as small as the shipped one."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=257,
        bos_token_id=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    vocabulary = {f"<{index}>": index for index in range(320)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<257>"})
    )


def _vllm_spec(directory: Path) -> EngineSpec:
    if util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    model = CHECKPOINT
    if not (model / "config.json").is_file():
        model = directory / "model"
        model.mkdir()
        _random_model(model)
    options = VllmOptions(extra_args=("--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)))
    return EngineSpec("vllm", str(model), slots=SLOTS, max_model_len=MAX_MODEL_LEN, dtype="float32", options=options)


def _emulated_spec() -> EngineSpec:
    return EngineSpec(
        "emulated",
        "emulated-model",
        slots=SLOTS,
        max_model_len=MAX_MODEL_LEN,
        options=EmulatedOptions(
            cost={"seconds_per_token": 0.002}, emulation={"end_token_id": 257, "mean_length_tokens": 40}
        ),
    )


@dataclass(frozen=True)
class Running:
    """A running engine of the suite."""

    spec: EngineSpec
    process: EngineProcess

    @property
    def emulated(self) -> bool:
        return self.spec.kind == "emulated"

    def tell(self, scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Run one test's scenario against the engine, bounded, with a client of its own."""

        async def bounded() -> None:
            async with EngineClient(self.process.address) as client:
                await asyncio.wait_for(scenario(client), CEILING_S)

        asyncio.run(bounded())


@pytest.fixture(
    scope="module",
    params=["emulated", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp(request.param)
    spec = _emulated_spec() if request.param == "emulated" else _vllm_spec(directory)
    process = EngineProcess(spec, directory)
    try:
        asyncio.run(process.start(240.0))
        yield Running(spec, process)
    finally:
        asyncio.run(process.stop())


@pytest.fixture
def vllm(engine: Running) -> Running:
    """The engine of the tests of what only vLLM does."""
    if engine.emulated:
        pytest.skip("of vLLM only")
    return engine


_count = 0


def _step(
    context: list[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
) -> GenerateRequest:
    global _count
    _count += 1
    sampling = SamplingParams(
        max_tokens, temperature, 1.0, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    return GenerateRequest(f"step-{_count}", context, sampling, priority)


def _prompt(length: int, salt: int = 0) -> list[int]:
    return [40 + (index * 7 + index * index * 3 + salt * 11) % 80 for index in range(length)]


def _check(result: GenerateResult) -> None:
    assert len(result.logprobs) == len(result.token_ids)
    assert all(isinstance(token, int) and 0 <= token < 1 << 20 for token in result.token_ids)
    assert all(math.isfinite(value) and value <= 0 for value in result.logprobs)


def test_it_is_healthy_and_describes_itself(engine):
    async def scenario(client: EngineClient) -> None:
        assert await client.healthy()
        info = await client.describe()
        assert info.model == engine.spec.model
        assert info.max_model_len == MAX_MODEL_LEN
        assert info.slots == SLOTS
        assert info.tp_degree == 1
        assert info.kv_capacity_tokens > MAX_MODEL_LEN

    engine.tell(scenario)


@pytest.mark.parametrize("length", [1, 2, 37, 200])
def test_ignoring_end_tokens_gives_the_length_asked_for(engine, length):
    async def scenario(client: EngineClient) -> None:
        result = await client.generate(_step(_prompt(20), length, temperature=1.0))
        assert result.finish_reason == "length"
        assert len(result.token_ids) == length
        _check(result)

    engine.tell(scenario)


def test_greedy_steps_repeat(engine):
    async def scenario(client: EngineClient) -> None:
        first = await client.generate(_step(_prompt(50), 40))
        second = await client.generate(_step(_prompt(50), 40))
        assert first.token_ids == second.token_ids
        assert first.logprobs == pytest.approx(second.logprobs, abs=1e-3)

    engine.tell(scenario)


def test_a_seed_decides_the_tokens(engine):
    async def scenario(client: EngineClient) -> None:
        def step(seed: int | None) -> GenerateRequest:
            return _step(_prompt(30), 60, temperature=2.0, seed=seed)

        one, again, other = [(await client.generate(step(seed))).token_ids for seed in (11, 11, 12)]
        assert one == again
        assert one != other
        free = [(await client.generate(step(None))).token_ids for _ in range(2)]
        assert free[0] != free[1]

    engine.tell(scenario)


def _asked(max_tokens: int, **sampling: Any) -> GenerateRequest:
    request = _step(_prompt(40, 2), max_tokens)
    return replace(request, sampling=SamplingParams(max_tokens, **sampling))


def test_a_step_takes_every_parameter_of_a_program(engine):
    """What an engine may ignore, it ignores; what it obeys shows in the tokens."""

    async def scenario(client: EngineClient) -> None:
        one = await client.generate(_asked(20, temperature=1.5, top_k=1, ignore_eos=True, seed=1))
        greedy = await client.generate(_asked(20, temperature=0.0, ignore_eos=True))
        _check(one)
        if not engine.emulated:
            assert one.token_ids == greedy.token_ids, "one token to draw from is greedy"
            sure = await client.generate(_asked(20, temperature=1.5, min_p=1.0, ignore_eos=True, seed=1))
            assert sure.token_ids == greedy.token_ids
        stopped = await client.generate(_asked(20, temperature=0.0, stop=("\x00 never",)))
        _check(stopped)

    engine.tell(scenario)


def test_a_stop_string_ends_the_step_and_its_tokens_are_kept(engine):
    if engine.emulated:
        pytest.skip("its tokens have no text: the driver cuts")
    template = ChatTemplate.load(engine.spec.model)

    async def scenario(client: EngineClient) -> None:
        greedy = (await client.generate(_asked(60, temperature=0.0))).token_ids
        middle = len(greedy) // 2
        stop = template.decode(list(greedy[middle : middle + 2]))
        result = await client.generate(_asked(60, temperature=0.0, stop=(stop,)))
        _check(result)
        assert result.finish_reason == "stop"
        count = len(result.token_ids)
        assert result.token_ids == greedy[:count]
        text = template.decode(list(result.token_ids))
        assert stop in text and stop not in template.decode(list(result.token_ids[:-1]))
        assert tokens_to_stop(template.decode, list(greedy), [stop]) == count, "the driver cuts where vLLM does"

    engine.tell(scenario)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        (StructuredOutput(regex="[0-9]{3}"), r"[0-9]{3}"),
        (StructuredOutput(choice=["yes", "no"]), r"yes|no"),
        (
            StructuredOutput(
                json_schema={
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            ),
            r'\{[\s"a:12]*\}?',  # a schema allows white space without end
        ),
    ],
)
def test_structured_output_has_its_form(engine, form, fits):
    async def scenario(client: EngineClient) -> None:
        result = await client.generate(_asked(60, temperature=1.0, seed=4, structured=form))
        _check(result)
        if not engine.emulated:
            text = ChatTemplate.load(engine.spec.model).decode(list(result.token_ids))
            assert re.fullmatch(fits, text), text
            assert result.finish_reason == "stop" or form.json_schema is not None

    engine.tell(scenario)


def test_a_stop_token_ends_the_step_and_is_kept(engine):
    async def scenario(client: EngineClient) -> None:
        greedy = (await client.generate(_step(_prompt(33, 5), 60))).token_ids
        stop = greedy[len(greedy) // 2]
        request = _step(_prompt(33, 5), 60, ignore_eos=False, stop_token_ids=(stop,))
        result = await client.generate(request)
        _check(result)
        assert result.finish_reason == "stop"
        # An end token may come first; what precedes the end is the same in any case.
        count = len(result.token_ids)
        assert count <= greedy.index(stop) + 1
        assert result.token_ids[:-1] == greedy[: count - 1]
        if count == greedy.index(stop) + 1:
            assert result.token_ids[-1] == stop
        kept = await client.generate(_step(_prompt(33, 5), 60, stop_token_ids=(stop,)))
        assert kept.token_ids == greedy, "ignore_eos ignores stop tokens too"

    engine.tell(scenario)


async def _aborted_midway(client: EngineClient, prompt: list[int]) -> GenerateResult:
    # How far a step is after a while is the machine's affair; only one caught midway says something.
    for _ in range(20):
        request = _step(prompt, 1400)
        running = asyncio.ensure_future(client.generate(request))
        await asyncio.sleep(0.4)
        await client.abort([request.request_id])
        part = await running
        _check(part)
        assert (part.finish_reason == "abort") == (len(part.token_ids) < 1400)
        if 0 < len(part.token_ids) < 1400:
            return part
    raise AssertionError("no step was caught midway")


def test_an_abort_returns_what_there_is_and_the_step_goes_on_from_the_cache(engine):
    async def scenario(client: EngineClient) -> None:
        prompt = _prompt(600, 3)
        whole = (await client.generate(_step(prompt, 300))).token_ids
        part = await _aborted_midway(client, prompt)
        rest = await client.generate(_step([*prompt, *part.token_ids], 20))
        assert rest.finish_reason == "length"
        assert rest.cached_tokens >= len(prompt) // 2
        if engine.emulated:
            assert rest.cached_tokens >= len(prompt) + len(part.token_ids) - 17
            both = part.token_ids + rest.token_ids
            shared = min(len(both), len(whole))
            assert both[:shared] == whole[:shared]

    engine.tell(scenario)


def test_tokens_come_while_the_step_runs_and_are_those_of_the_answer(engine):
    async def scenario(client: EngineClient) -> None:
        whole = await client.generate(_step(_prompt(30, 8), 300))
        pieces: list[list[int]] = []
        told = await client.generate(replace(_step(_prompt(30, 8), 300), streams=True), pieces.append)
        assert len(pieces) > 3
        assert tuple(token for piece in pieces for token in piece) == told.token_ids == whole.token_ids
        _check(told)
        # One that is aborted midway has told of no token that it did not sample.
        pieces.clear()
        request = replace(_step(_prompt(30, 9), 1400), streams=True)
        running = asyncio.ensure_future(client.generate(request, pieces.append))
        while not pieces:
            await asyncio.sleep(0.005)
        await client.abort([request.request_id])
        part = await running
        sent = tuple(token for piece in pieces for token in piece)
        assert part.token_ids[: len(sent)] == sent
        with pytest.raises(EngineRefused):
            await client.generate(replace(_step(_prompt(MAX_MODEL_LEN), 5), streams=True), pieces.append)

    engine.tell(scenario)


def test_an_abort_right_behind_the_step_still_finds_it(engine):
    async def scenario(client: EngineClient) -> None:
        request = _step(_prompt(10), 1500)
        running = asyncio.ensure_future(client.generate(request))
        await asyncio.sleep(0)
        await client.abort([request.request_id])
        result = await running
        assert result.finish_reason == "abort"
        assert len(result.token_ids) < 1500

    engine.tell(scenario)


def test_aborting_what_is_unknown_or_nothing_harms_nobody(engine):
    async def scenario(client: EngineClient) -> None:
        running = asyncio.ensure_future(client.generate(_step(_prompt(10), 100)))
        await asyncio.sleep(0.05)
        await client.abort(["nobody"])
        await client.abort([])
        assert len((await running).token_ids) == 100

    engine.tell(scenario)


def test_cancelled_calls_are_dropped_by_the_engine(engine):
    async def scenario(client: EngineClient) -> None:
        # Run to their ends, these would take longer than the ceiling of this test.
        calls = [asyncio.ensure_future(client.generate(_step(_prompt(10, salt), 2000))) for salt in range(50 * SLOTS)]
        await asyncio.sleep(0.5)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        result = await client.generate(_step(_prompt(10), 2, priority=1))
        assert len(result.token_ids) == 2

    engine.tell(scenario)


def test_with_all_slots_taken_the_smaller_priority_goes_first(engine):
    async def attempt(client: EngineClient, pause_s: float) -> tuple[list[str], int, int]:
        def begin(request: GenerateRequest) -> asyncio.Task[GenerateResult]:
            return asyncio.ensure_future(client.generate(request))

        requests = [_step(_prompt(10, salt), 2000) for salt in range(SLOTS)]
        holders = [begin(request) for request in requests]
        await asyncio.sleep(pause_s)
        late = _step(_prompt(12), 1900, priority=10)
        urgent = _step(_prompt(14), 1900, priority=-10)
        waiting = [begin(late)]
        await asyncio.sleep(pause_s / 4)
        waiting.append(begin(urgent))
        await asyncio.sleep(pause_s)
        await client.abort([requests[0].request_id])
        await asyncio.sleep(pause_s)
        # The one that got the slot has tokens, the other has none.
        await client.abort([late.request_id, urgent.request_id])
        await client.abort([request.request_id for request in requests[1:]])
        late_result, urgent_result = await asyncio.gather(*waiting)
        reasons = [result.finish_reason for result in await asyncio.gather(*holders)]
        return reasons, len(late_result.token_ids), len(urgent_result.token_ids)

    async def scenario(client: EngineClient) -> None:
        for tries in range(10):
            reasons, late_tokens, urgent_tokens = await attempt(client, 0.2 * 1.2**tries)
            # On a slow machine a holder may have ended by itself, or the urgent step may have arrived too late.
            if reasons == ["abort"] * SLOTS and late_tokens == 0 and urgent_tokens > 0:
                return
        raise AssertionError("the urgent step never went first")

    engine.tell(scenario)


def test_more_steps_than_slots_all_come_back_whole(engine):
    async def scenario(client: EngineClient) -> None:
        lengths = [1 + 5 * index for index in range(3 * SLOTS)]
        results = await asyncio.gather(
            *(client.generate(_step(_prompt(10 + length, length), length, temperature=1.0)) for length in lengths)
        )
        assert [len(result.token_ids) for result in results] == lengths
        for result in results:
            _check(result)

    engine.tell(scenario)


def test_many_long_seeded_prompts_at_once_come_back_whole(engine):
    """vLLM on a CPU dies when it must cut the prefill of a seeded step; it must not have to."""

    async def scenario(client: EngineClient) -> None:
        steps = [
            _step(_prompt(MAX_MODEL_LEN // 2 + 31 * salt, salt), 8, temperature=1.0, seed=salt) for salt in range(SLOTS)
        ]
        results = await asyncio.gather(*(client.generate(step) for step in steps))
        assert [len(result.token_ids) for result in results] == [8] * SLOTS
        for result in results:
            _check(result)
        assert await client.healthy()

    engine.tell(scenario)


def test_a_repeated_context_is_found_in_the_cache(engine):
    async def scenario(client: EngineClient) -> None:
        context = _prompt(700, 17)
        cold = await client.generate(_step(context, 2))
        warm = await client.generate(_step(context, 2))
        assert cold.cached_tokens == 0
        assert len(context) // 2 <= warm.cached_tokens < len(context)

    engine.tell(scenario)


def test_times_are_told_as_far_as_they_are_known(engine):
    async def scenario(client: EngineClient) -> None:
        started = time.monotonic()
        result = await client.generate(_step(_prompt(100, 9), 100))
        wall_s = time.monotonic() - started
        assert 0 < result.prefill_s < wall_s
        assert 0 < result.decode_s < wall_s
        assert math.isnan(result.queue_s) != engine.emulated
        if engine.emulated:
            assert result.queue_s >= 0
            assert result.decode_s == pytest.approx(99 * 0.002)

    engine.tell(scenario)


def test_the_policy_version_starts_at_zero(engine):
    async def scenario(client: EngineClient) -> None:
        result = await client.generate(_step(_prompt(10), 7))
        assert result.policy_version == 0
        assert result.version_spans == (VersionSpan(0, 0, 7),)

    engine.tell(scenario)


def test_a_prompt_that_leaves_no_room_is_refused_with_a_reason(engine):
    async def scenario(client: EngineClient) -> None:
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
            with pytest.raises(EngineRefused, match=str(MAX_MODEL_LEN)):
                await client.generate(_step(_prompt(length), 1))

    engine.tell(scenario)


def test_a_step_ends_where_the_context_is_full(engine):
    async def scenario(client: EngineClient) -> None:
        result = await client.generate(_step(_prompt(MAX_MODEL_LEN - 10), 100))
        assert result.finish_reason == "length"
        assert len(result.token_ids) == 10

    engine.tell(scenario)


@pytest.mark.parametrize(
    ("context", "max_tokens"), [([], 4), ([-1, 5], 4), ([5], 0)], ids=["empty", "negative", "none"]
)
def test_nonsense_is_refused(engine, context, max_tokens):
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(EngineRefused):
            await client.generate(_step(context, max_tokens))
        assert await client.healthy()

    engine.tell(scenario)


@pytest.mark.skipif(not (CHECKPOINT / "config.json").is_file(), reason="the shipped model's tokenizer is needed")
def test_a_reply_is_read_by_the_engines_own_parser(engine):
    """Behind its thinking, and without its end token; an engine without a parser refuses."""
    template = ChatTemplate.load(str(CHECKPOINT))
    thought = f"maybe {format_call('python', {'code': 'no'})}\n</think>\n"
    reply = [*template._encode(thought + "So: " + format_call("python", {"code": "é"})), template.end_token_ids[0]]
    prompt = template.render([{"role": "user", "content": "1+1?"}])
    tools = json.dumps([{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}])
    # An earlier part of the step has sampled ten tokens of the reply.
    context = CachedContext.of(np.array([*prompt, *reply[:10]], "<i4").tobytes())
    call = StepCall(
        "s",
        StepId(TrajectoryId("t"), 0, 0),
        0,
        0,
        b"",
        SamplingParams(64, stop_token_ids=template.end_token_ids),
        ReplyReading(tools, 10, template.thinking_end_ids),
    )
    made = GenerateResult(reply[10:], [0.0] * len(reply[10:]), "stop", 0, 0, 0.0, 0.0, 0.0)

    async def scenario(client: EngineClient) -> None:
        assert await read_by_engine(client, call, context, replace(made, finish_reason="abort")) == ""
        if engine.emulated:
            with pytest.raises(EngineRefused):
                await read_by_engine(client, call, context, made)
            return
        read = ReadReply.of_message(json.loads(await read_by_engine(client, call, context, made)))
        assert read.calls == (ToolCall("python", {"code": "é"}),)
        assert read.content.strip().endswith("So:")

    engine.tell(scenario)


@pytest.mark.parametrize("path", list(DIALECTS))
def test_the_gateways_prompt_of_a_request_is_that_of_the_engine(vllm, path, tmp_path):
    """Whatever API an agent speaks, the ids of its prompt are those that vLLM makes of the same request."""
    template = ChatTemplate.load(str(model_with_template(Path(vllm.spec.model), tmp_path / "model")))
    _, requests = DIALECTS[path]

    async def scenario(client: EngineClient) -> None:
        limit = {} if path == "/v1/responses" else {"max_tokens": 50}
        for name, request in requests.items():
            body = json.dumps({"model": vllm.spec.model, **limit, **request}).encode()
            answer = json.loads(await client.ask(f"{path}/render", body))
            assert rendered(template, order_of(path, request)) == answer["token_ids"], name

    vllm.tell(scenario)


def test_an_engine_without_kv_transfers_says_so(engine):
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(KvTransferFailed) as caught:
            await client.export_kv("export", _prompt(100, 21))
        assert caught.value.cause == "unsupported"
        assert (await client.warm(_prompt(100, 22), "warm")).cached_tokens == 0

    engine.tell(scenario)


def test_counters_move_while_it_works_and_only_then(engine):
    """By them a long step is told from an engine that is stuck."""

    async def scenario(client: EngineClient) -> None:
        running = asyncio.ensure_future(client.generate(_step(_prompt(10, 31), 1900)))
        seen = [await client.progress()]
        while not running.done():
            await asyncio.sleep(0.1)
            if (now := await client.progress()) != seen[-1]:
                seen.append(now)
        assert len(seen) > 3, "they move during a step, and not only at its end"
        # What the last iteration counted may be published a little later.
        while await client.progress() != (still := await client.progress()):
            await asyncio.sleep(0.1)
        assert await client.progress() == still
        ended = client.steps_ended
        await client.canary()
        assert await client.progress() != still
        assert client.steps_ended == ended and client.steps_in_flight == 0

    engine.tell(scenario)


def test_a_killed_engine_is_unreachable(engine):
    """Last of the suite: the engine does not come back."""

    async def scenario(client: EngineClient) -> None:
        # Three batches of them, so that the last is still to come however slow this process is.
        running = [asyncio.ensure_future(client.generate(_step(_prompt(10, salt), 1900))) for salt in range(3 * SLOTS)]
        await asyncio.sleep(0.3)
        os.kill(engine.process.engine_pid, signal.SIGKILL)
        results = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(results[-1], EngineUnreachable)
        assert await engine.process.wait() == 128 + signal.SIGKILL
        assert not await client.healthy()
        with pytest.raises(EngineUnreachable):
            await client.generate(_step(_prompt(10), 1))

    engine.tell(scenario)
