"""Refusals of APIs as exceptions, HTTP calls against a local server, rewards from outside, quotas in a cluster file."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.actions.api_server import api_server
from heddle_dask.apis.http_calls import HttpRefused, http_call, retry_after_s
from heddle_dask.apis.remote_model import RemoteModel
from heddle_dask.apis.rewarded import FunctionReward, HttpReward, JudgeReward, ServiceReward, rewarded
from heddle_dask.core.errors import BadInput
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.environments.api_errors import RateLimited, Retry, refusal_of
from heddle_dask.environments.base import Context, Reward, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.rewards import Transcript
from heddle_dask.live.clusters.quota_table import quotas_of_file
from heddle_dask.live.driver.inputs.pools import Pools

TRANSCRIPT = Transcript("t/0", "t", 0, "completed", ("hi",), "hello hi")


def test_a_refusal_keeps_its_cause_and_its_seconds_when_it_is_pickled() -> None:
    for error, cause in (
        (RateLimited("slow", retry_after_s=2.5), "rate-limited"),
        (Retry("down"), "unavailable"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert refusal_of(again) == (cause, error.retry_after_s)
    assert refusal_of(ValueError()) == ("raised", None)
    for seconds in (-1, float("nan"), "1"):
        with pytest.raises(BadInput, match="retry_after_s"):
            Retry(retry_after_s=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        (" 120 ", 120.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 60.0),
        ("Wed, 21 Oct 2026 07:26:00 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-1", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, datetime(2026, 10, 21, 7, 27, tzinfo=UTC)) == seconds


def _called(answers: Callable[[int], tuple[int, str]], **options: Any) -> Any:
    async def body() -> Any:
        async with api_server(ApiQuota("search"), latency_s=options.pop("latency_s", 0.0), answers=answers) as server:
            return await http_call("POST", server.url, json_body={"a": 1}, idempotency_key="k", **options)

    return asyncio.run(body())


def test_statuses_become_answers_repetitions_or_errors() -> None:
    answer = _called(lambda number: (200, ""))
    assert (answer.status, answer.json()["reward"], answer.headers["content-type"][:16]) == (
        200,
        0.5,
        "application/json",
    )
    with pytest.raises(RateLimited, match="status 429") as limited:
        _called(lambda number: (429, "7"))
    assert limited.value.retry_after_s == 7.0
    for status in (408, 500, 503):
        with pytest.raises(Retry, match=f"status {status}") as passing:
            _called(lambda number, status=status: (status, ""))
        assert not isinstance(passing.value, RateLimited) and passing.value.retry_after_s is None
    with pytest.raises(HttpRefused, match="status 404"):
        _called(lambda number: (404, ""))
    with pytest.raises(Retry, match=r"no answer within 0\.05 s"):
        _called(lambda number: (200, ""), latency_s=5.0, answer_within_s=0.05)


def test_a_server_that_is_not_there_may_be_there_later() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(Retry, match="ClientConnectorError"):
            asyncio.run(http_call("GET", url))


class CallsHere:
    """A context of rewards that runs functions here."""

    seed = 0

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        own = ("needs", "label", "timeout_s")
        value = function(*args, **{name: value for name, value in kwargs.items() if name not in own})
        return await value if asyncio.iscoroutine(value) else value


async def solve(task: Task, ctx: Context) -> float:
    return 3.0


def _scored(reward: Any) -> Any:
    environment = rewarded(FunctionEnvironment(solve, name="e"), reward)
    assert environment.name == "e" and len(environment.tasks(2, 0)) == 2
    return asyncio.run(environment.reward(Task("t", "p"), TRANSCRIPT, CallsHere()))


def test_a_reward_may_be_a_function_or_an_endpoint() -> None:
    assert _scored(lambda task, transcript: len(transcript.text)) == Reward(8.0)
    assert _scored(FunctionReward(lambda task, transcript: None)) == Reward(None)

    async def body() -> Any:
        async with api_server(ApiQuota("search")) as server:
            environment = rewarded(FunctionEnvironment(solve, name="e"), server.url)
            return await environment.reward(Task("t", "p"), TRANSCRIPT, CallsHere())

    assert asyncio.run(body()) == Reward(0.5)
    assert HttpReward("http://x").call_timeout_s == 60.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (3, "reward is 3: use a function"),
        ("math", "use package.module:function, FILE.py:function or the URL"),
        ("math:nothing", "'math' has no 'nothing'"),
        ("no_such_module:f", "No module named"),
        ("math:pi", "use package.module:function"),
    ],
)
def test_what_is_no_reward_is_refused(reward: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rewarded(FunctionEnvironment(solve, name="e"), reward)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: FunctionReward(3), "3 is no function"),  # type: ignore[arg-type]
        (lambda: FunctionReward(len, needs=2), "needs is 2"),  # type: ignore[arg-type]
        (lambda: FunctionReward(len, timeout_s=-1.0), "timeout_s is -1.0"),
        (lambda: HttpReward("ftp://x"), "url is 'ftp://x'"),
        (lambda: HttpReward("http://x", api=3), "api is 3"),  # type: ignore[arg-type]
        (lambda: HttpReward("http://x", headers="a"), "headers is 'a'"),  # type: ignore[arg-type]
        (lambda: HttpReward("http://x", call_timeout_s=0.0), "call_timeout_s is 0.0"),
        (lambda: ServiceReward(""), "service is ''"),
    ],
)
def test_a_reward_that_cannot_be_computed_is_refused_where_it_is_made(given: Any, message: str) -> None:
    with pytest.raises(BadInput, match=f"reward: {message}"):
        given()


def test_a_reward_that_needs_what_is_not_declared_is_refused_before_the_run() -> None:
    environment = FunctionEnvironment(solve, name="e")
    by_service = rewarded(environment, ServiceReward("judge"))
    by_endpoint = rewarded(environment, HttpReward("http://x", api="judge"))
    with pytest.raises(BadInput, match="service 'judge' is not declared"):
        Pools().check_rewards([environment, by_service])
    with pytest.raises(BadInput, match="api 'judge' is not declared"):
        Pools().check_rewards([by_endpoint])
    Pools(quotas=[ApiQuota("judge")]).check_rewards([by_endpoint, rewarded(environment, len)])
    with pytest.raises(BadInput, match="reward: the model of service judge gives no score"):
        Pools(services=[RemoteModel("judge", "http://h/v1", "m")]).check_rewards([by_service])
    Pools(services=[RemoteModel("judge", "http://h/v1", "m")]).check_rewards(
        [rewarded(environment, JudgeReward("judge"))]
    )


def test_an_environment_with_group_rewards_keeps_them() -> None:
    environment = FunctionEnvironment(solve, name="e")
    environment.group_reward = lambda *args: None  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="environment e has rewards for groups"):
        rewarded(environment, len)


def test_a_cluster_file_declares_quotas(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "tool-workers = 1\n[quotas.search]\nconcurrency = 4\nbackoff = 0.5\n"
        "windows = [[20, 1.0], [90000, 60, 'tokens'], [2.5, 60, 'cost']]\n"
        "[quotas.judge]\nbegins-within = 0.2\n"
    )
    search, judge = quotas_of_file(path)
    windows = (QuotaWindow(20, 1.0), QuotaWindow(90_000, 60, "tokens"), QuotaWindow(2.5, 60, "cost"))
    assert search == ApiQuota("search", 4, windows, backoff_s=0.5)
    assert judge == ApiQuota("judge", begins_within_s=0.2)
    assert quotas_of_file(None) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quotas = 3", "quotas is 3: give tables"),
        ("[quotas]\na = 3", r"\[quotas.a\] is 3: use a table"),
        ("[quotas.a]\nwindow = []", "unknown key 'window' .did you mean 'windows'"),
        ("[quotas.a]\nwindows = [3]", "use a list of .most, seconds. or .most, seconds, unit."),
        ("[quotas.a]\nwindows = [[0, 1]]", "calls of a window is 0"),
        ("[quotas.a]\nwindows = [[0.5, 1, 'tokens']]", "tokens of a window is 0.5"),
        ("[quotas.a]\nwindows = [[1, 1, 'words']]", "unit of a window is 'words'"),
        ("[quotas.a]\nopen = 'x'", "open_s is 'x'"),
    ],
)
def test_a_wrong_quota_in_a_cluster_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        quotas_of_file(path)
