"""What a program asks of one step: checked at the call, sent as asked, stored as sampled."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from worlds.scripted_plane import ScriptedPlane, context_on, sampled

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines.contract import VersionSpan
from heddle_dask.live.driver.options import Budget, Sampling

DIGITS = StructuredOutput(regex="[0-9]+")


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    return template._encode(text)


def test_a_step_is_asked_for_with_what_the_program_says(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65), sampled(66))
    ctx = context_on(plane, model_dir, budget=Budget(max_step_tokens=512), sampling=Sampling(0.7, 0.9, 40, 0.05))
    ctx.append("user", "hello")

    async def body() -> None:
        await ctx.generate(
            max_tokens=9, temperature=0.5, top_p=0.8, top_k=3, min_p=0.1, stop="x", structured=DIGITS, seed=11
        )
        await ctx.generate()

    asyncio.run(body())
    first, second = ctx.steps
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.min_p) == (
        9,
        0.5,
        0.8,
        3,
        0.1,
    )
    assert (second.max_tokens, second.temperature, second.top_k) == (512, 0.7, 40)
    asked, plain = (call.sampling for call in plane.calls)
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (
        9,
        0.5,
        0.8,
        3,
        0.1,
    )
    assert (asked.stop, asked.structured, asked.seed) == (("x",), DIGITS, 11)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (0.7, 0.9, 40, 0.05)
    assert (plain.stop, plain.structured) == ((), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", v) for v in [0, -1, "5", 1.5, True, math.nan]),
        *(("temperature", v) for v in [-0.1, math.nan, math.inf, "1", True]),
        *(("top_p", v) for v in [0, 1.1, math.nan, "1"]),
        *(("top_k", v) for v in [-1, 1.5, "3", True]),
        *(("min_p", v) for v in [-0.1, 1.1, math.nan, "0"]),
        *(("stop", v) for v in ["", [""], 5, [5], {"a": 1}, ["a"] * 17]),
        *(("structured", v) for v in [{"type": "object"}, "[0-9]"]),
        *(("seed", v) for v in [-1, 1.5, "3", True, 2**63]),
        *(("n", v) for v in [0, -1, 1.5, "1", True]),
        ("ignore_eos", "yes"),
    ],
)
def test_a_bad_value_is_refused_at_the_call(name: str, value: Any, model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")

    async def body() -> None:
        with pytest.raises(BadInput, match=f"generate: {name} is ") as refused:
            await ctx.generate(**{name: value})
        assert "\n" not in str(refused.value)
        assert not plane.calls
        await ctx.generate()  # the context is as it was

    asyncio.run(body())
    assert len(ctx.steps) == 1


def test_numbers_of_numpy_are_numbers(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    asked: dict[str, Any] = {"max_tokens": np.int64(9), "temperature": np.float32(0.5), "seed": np.uint32(3)}
    asyncio.run(ctx.generate(**asked))
    sampling = plane.calls[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 3)
    assert {type(sampling.max_tokens), type(sampling.seed)} == {int}


@pytest.mark.parametrize("asked", [{"stop": "a"}, {"structured": DIGITS}])
def test_the_full_length_leaves_nothing_to_stop_at(asked: dict[str, Any], model_dir: str) -> None:
    ctx = context_on(ScriptedPlane(), model_dir)
    ctx.append("user", "hello")
    with pytest.raises(BadInput, match="exactly max_tokens tokens: leave out stop and structured"):
        asyncio.run(ctx.generate(ignore_eos=True, **asked))


def test_a_step_ends_with_the_token_that_completes_a_stop_string(model_dir: str) -> None:
    """The engine may go on: what it sampled beyond is no part of the record, and the worker's copy is not used."""
    template = ChatTemplate.load(model_dir)
    said, rest = ids_of(template, "ab\nEND"), ids_of(template, " more")
    spans = (VersionSpan(3, 0, len(said) - 1), VersionSpan(4, len(said) - 1, len(said) + len(rest)))
    plane = ScriptedPlane(sampled(*said, *rest, version_spans=spans), sampled(65))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")

    async def body() -> None:
        reply = await ctx.generate(stop=["never", "END"])
        assert (reply.text, list(reply.token_ids), reply.finish_reason) == ("ab\nEND", said, "stop")
        assert len(reply.logprobs) == len(said)
        ctx.append("user", "next")
        await ctx.generate()

    asyncio.run(body())
    (step, _) = ctx.steps
    assert (step.generated_tokens, step.finish_reason) == (len(said), "stop")
    assert ctx.record.policy_version[step.token_start : step.token_stop].tolist() == [
        *[3] * (len(said) - 1),
        4,
    ]
    assert plane.calls[1].base_tokens == 0
    assert plane.seen[1] == ctx.record.token_ids[: ctx.steps[1].token_start].tolist()


def test_a_stop_string_may_begin_in_a_preempted_part(model_dir: str) -> None:
    template = ChatTemplate.load(model_dir)
    first, second = ids_of(template, "abEN"), ids_of(template, "D more")
    plane = ScriptedPlane(sampled(*first, status="aborted", reason="abort"), sampled(*second))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    reply = asyncio.run(ctx.generate(stop="END"))
    assert (reply.text, reply.finish_reason) == ("abEND", "stop")
    assert ctx.steps[0].preemptions == 1


def test_a_preempted_structured_step_begins_again(model_dir: str) -> None:
    """An engine would begin its grammar at the first token of the rest."""
    plane = ScriptedPlane(sampled(65, 66, status="aborted", reason="abort"), sampled(67, 68, reason="stop"))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")
    reply = asyncio.run(ctx.generate(structured=DIGITS, max_tokens=10))
    assert reply.token_ids == (67, 68)
    assert plane.seen[0] == plane.seen[1]
    assert [call.sampling.max_tokens for call in plane.calls] == [10, 10]
    assert plane.calls[0].sampling.seed != plane.calls[1].sampling.seed
    assert ctx.steps[0].preemptions == 1


def test_a_given_seed_is_that_of_the_step_and_its_parts_differ(model_dir: str) -> None:
    plane = ScriptedPlane(sampled(65, status="aborted", reason="abort"), sampled(66), sampled(67))
    ctx = context_on(plane, model_dir)
    ctx.append("user", "hello")

    async def body() -> None:
        await ctx.generate(seed=5)
        await ctx.generate(seed=5)

    asyncio.run(body())
    seeds = [call.sampling.seed for call in plane.calls]
    assert (seeds[0], seeds[2]) == (5, 5)
    assert seeds[1] != 5
