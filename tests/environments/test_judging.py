"""Judges: numbers in replies, prompts, a remote endpoint on loopback, and the reward of a judge."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.apis.http_calls import HttpRefused
from heddle_dask.apis.remote_model import RemoteModel, ask_remote
from heddle_dask.apis.rewarded import JudgeReward, rewarded
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.actions import ActionContext, ActionFailed, FunctionCall, ServiceCall
from heddle_dask.environments.api_errors import RateLimited
from heddle_dask.environments.base import Context, Reward, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.judging import read_score
from heddle_dask.environments.rewards import Transcript
from heddle_dask.isolation.granted import Granted, running_with

KEY = "sk-secret-of-this-test"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("score: 7/10", 0.7),
        ('{"score": 0.25, "why": "…"}', 0.25),
        ("**Rating:** -1.5.", -1.5),
        ("First I thought score: 3. Final score: 8", 8.0),
        ("The sum is right.\nVerdict: yes", 1.0),
        ("VERDICT - No", 0.0),
        ("Yes.", 1.0),
        ("incorrect", 0.0),
        ("0.5", 0.5),
        ("Score: 3/0", None),
        ("verdict: nothing", None),
        ("A long text with 5 numbers", None),
        ("", None),
    ],
)
def test_the_number_of_a_reply_is_its_last_verdict(text: str, score: float | None) -> None:
    assert read_score(text) == score


@given(st.text() | st.from_regex(r"(score|verdict)[:= ]*[-+0-9./ ]*"))
def test_any_text_has_a_finite_number_or_none(text: str) -> None:
    score = read_score(text)
    assert score is None or math.isfinite(score) or len(text) > 300


class JudgedHere(ActionContext):
    """Answers every request with one reply."""

    def __init__(self, content: str, finish_reason: str = "stop") -> None:
        self.reply = {"content": content, "finish_reason": finish_reason}
        self.asked: list[ServiceCall] = []

    async def _perform(self, call: FunctionCall) -> Any:
        raise NotImplementedError

    async def _ask_service(self, asked: ServiceCall) -> Any:
        self.asked.append(asked)
        return self.reply


def judged(content: str, reason: str = "stop", **options: Any) -> Any:
    return asyncio.run(JudgedHere(content, reason).judge("judge", "Is it right?", **options))


def test_a_verdict_is_read_behind_the_thinking_and_a_missing_one_is_a_failed_action() -> None:
    assert judged("<think>Score: 1?</think>Score: 4") == 4.0
    assert judged("b", read=str) == "b"
    assert judged("x", read=lambda text: True) == 1.0

    def breaks(text: str) -> float:
        raise KeyError(text)

    cases: list[tuple[str, str, Callable[[str], Any], str]] = [
        ("Score: 4", "length", read_score, r"judge judge: its reply was cut at its limit \(max_tokens\): 'Score: 4'"),
        ("I do not know", "stop", read_score, "its reply has no verdict: 'I do not know'"),
        ("x", "stop", lambda text: float("nan"), "no verdict"),
        ("x", "stop", breaks, "cannot be read: KeyError"),
    ]
    for content, reason, read, message in cases:
        with pytest.raises(ActionFailed, match=message) as failed:
            judged(content, reason, read=read)
        assert failed.value.cause == "raised" and "\n" not in str(failed.value)
    for wrong in ([], [{"role": "user"}], 5):
        with pytest.raises(BadInput, match="judge: use a text, or a list of messages"):
            asyncio.run(JudgedHere("").judge("judge", wrong))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="max_tokens is 0"):
        judged("", max_tokens=0)


async def solve(task: Task, ctx: Context) -> None:
    return None


def test_a_judge_may_give_the_reward() -> None:
    task = Task("t", "What is 2+3?", {"answer": "5"})
    transcript = Transcript("t/0", "t", 0, "completed", ("6", "<think>2+3</think>It is 5"), "all of it")

    def scored(ctx: JudgedHere, reward: JudgeReward) -> Any:
        environment = rewarded(FunctionEnvironment(solve, name="e"), reward)
        assert environment.reward_needs is not None and environment.reward_needs.service == "judge"
        return asyncio.run(environment.reward(task, transcript, ctx))  # type: ignore[arg-type]

    ctx = JudgedHere("Verdict: yes")
    assert scored(ctx, JudgeReward("judge", temperature=0.5)) == Reward(1.0)
    ((message,), options) = ctx.asked[0].inputs, ctx.asked[0]
    assert (options.service, options.kind, options.temperature) == ("judge", "reward", 0.5)
    for part in ("Question:\nWhat is 2+3?", "answer:\n5", "Response:\nIt is 5\n"):
        assert part in message["content"]
    with pytest.raises(BadInput, match=r"cannot be filled: KeyError 'rubric' \(known: answer, question, response"):
        scored(ctx, JudgeReward("judge", "{rubric}"))
    for wrong in ({"service": ""}, {"read": 5}, {"max_tokens": 0}, {"timeout_s": -1}):
        with pytest.raises(BadInput, match="reward: "):
            JudgeReward(**{"service": "judge", **wrong})  # type: ignore[arg-type]


# -- a remote endpoint ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def endpoint(answer: Callable[[web.Request, Any], web.Response]) -> AsyncIterator[str]:
    async def chat(request: web.Request) -> web.Response:
        return answer(request, await request.json())

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def asked(answer: Callable[[web.Request, Any], web.Response], **more: Any) -> tuple[Any, list[tuple[int, float]]]:
    used: list[tuple[int, float]] = []

    async def body() -> Any:
        async with endpoint(answer) as url:
            remote = RemoteModel("judge", url, "m", "JUDGE_KEY", prompt_price=2.0, reply_price=8.0, **more)
            assert KEY not in repr(remote) and KEY.encode() not in pickle.dumps(remote)
            with running_with(Granted(use=lambda *use: used.append(use))):
                return await ask_remote(remote, [{"role": "user", "content": "Hi"}], 32, 0.0, idempotency_key="k")

    return asyncio.run(body()), used


def test_a_remote_model_is_asked_in_openais_form_and_says_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    seen: list[Any] = []

    def answer(request: web.Request, body: Any) -> web.Response:
        seen.append((request.headers["Authorization"], request.headers["Idempotency-Key"], body))
        usage = {"prompt_tokens": 1000, "completion_tokens": 500, "total_tokens": 1500}
        choice = {"message": {"role": "assistant", "content": "Score: 1"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})

    reply, used = asked(answer)
    assert reply == {"content": "Score: 1", "finish_reason": "stop"}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "messages": messages, "max_tokens": 32, "temperature": 0.0}
    assert seen == [(f"Bearer {KEY}", "k", body)]
    assert used == [(1500, -1.0), (-1, pytest.approx(0.006))]
    needs = RemoteModel("judge", "http://h/v1", "m", prompt_price=2.0, reply_price=8.0).needs(messages, 32)
    assert needs.tokens == 16 + 1 + 32 and needs.cost == pytest.approx((17 * 2 + 32 * 8) / 1e6)


def test_the_key_of_an_endpoint_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": f"wrong key {request.headers['Authorization']}"}, status=401)

    with pytest.raises(BadInput, match="JUDGE_KEY is not set"):
        asked(refuses)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with pytest.raises(HttpRefused, match=r"status 401: .*wrong key Bearer …") as refused:
        asked(refuses)
    assert KEY not in str(refused.value)
    with pytest.raises(RateLimited, match="slow …") as limited:
        asked(lambda request, body: web.Response(status=429, text=f"slow {KEY}", headers={"Retry-After": "3"}))
    assert limited.value.retry_after_s == 3.0
    for text in ("[]", "{}", '{"choices": []}', "no"):
        with pytest.raises(HttpRefused, match="not in OpenAI's form"):
            asked(lambda request, body, text=text: web.Response(text=text, content_type="application/json"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "a#b"}, "no '#'"),
        ({"url": "api.example/v1"}, "url is no http"),
        ({"url": "https://user:secret@api.example/v1"}, "url is no http"),
        ({"model": None}, "model is None"),
        ({"key_variable": 5}, "key_variable is 5"),
        ({"prompt_price": -1}, "prompt_price is -1"),
        ({"call_timeout_s": 0}, "call_timeout_s is 0"),
    ],
)
def test_a_remote_model_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        RemoteModel(**{"name": "judge", "url": "http://h/v1", "model": "m", **given})
    assert "secret" not in str(refused.value)
