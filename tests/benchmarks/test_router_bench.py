"""The baseline from outside: its client sends what our own replay sends, and whatever happens nothing is left running.

The client is tested against a small server that forwards to emulated engines, so no router is needed; the router
itself where it is installed, in front of emulated engines and (marked `vllm`, `slow`) of real ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import util
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import cloudpickle
import numpy as np
import pytest
from aiohttp import web
from worlds.live_world import descendants, emulated, run

from benchmarks import router
from benchmarks.live_setup import Fleet, Workload
from benchmarks.router import check_router, most_alive, run_router, running_router
from benchmarks.router_client import Replayed, RoutedContext, RouterClient, replay
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.engines import wire
from heddle_dask.engines.contract import GenerateRequest, GenerateResult
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.attempts import trajectory_seed
from heddle_dask.live.driver.programs.branch import Services
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, StepCall, StepResult

MAX_CONTEXT_TOKENS = 400
ISSUE_POLICIES = ("round_robin", "cache_aware", "sticky_least_loaded")

needs_router = pytest.mark.skipif(
    util.find_spec("vllm_router") is None, reason="vllm-router is not installed (extra `bench`)"
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight trajectories in three groups; one of them fills its context."""
    lines = []
    for index in range(8):
        steps = [
            {"gen_tokens": 4 + index, "obs_tokens": 30, "tool": "bash", "tool_s": 0.02},
            {
                "gen_tokens": 3,
                "obs_tokens": 500 if index == 5 else 7,
                "tool": "user",
                "tool_s": 9.0,
                "human": 1,
            },
            {"gen_tokens": 12 * (index % 3) + 1, "obs_tokens": None, "tool": None, "tool_s": None},
        ]
        body = {"id": f"a/b {index}", "group": f"g{index % 3}", "prompt_tokens": 150, "complete": True}
        lines.append(json.dumps({**body, "steps": steps}) + "\n")
    path = tmp_path / "eight.jsonl"
    path.write_text("".join(lines))
    return path


def environment_of(trace: Path) -> ReplayEnvironment:
    return ReplayEnvironment(trace, max_context_tokens=MAX_CONTEXT_TOKENS)


def planned_tokens(environment: ReplayEnvironment) -> int:
    return sum(task.known_tokens for task in environment.tasks(8, 2))


# -- the same requests -----------------------------------------------------------------------------------


def draws(request: GenerateRequest) -> tuple[int, ...]:
    """What a seeded engine would sample: depends on the context and the seed, and on nothing else."""
    rng = np.random.default_rng([request.sampling.seed or 0, sum(request.token_ids)])
    return tuple(rng.integers(33, 127, request.sampling.max_tokens).tolist())


class RecordingPlane:
    """Our control plane up to the worker's request, which it makes as `RolloutWorker` does."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self._context: list[int] = []

    async def step(self, call: StepCall, _fields: Sequence[Any]) -> StepResult:
        self._context = self._context[: call.base_tokens] + np.frombuffer(call.delta, dtype="<i4").tolist()
        self.requests.append(GenerateRequest("ours", list(self._context), call.sampling))
        ids = draws(self.requests[-1])
        self._context += ids
        nan = float("nan")
        made = GenerateResult(tuple(ids), (0.0,) * len(ids), "length", 0, 0, nan, nan, nan)
        return StepResult("ok", generated=made)

    async def action(self, _call: ActionCall, _request: Sequence[Any]) -> ActionOutcome:
        return ActionOutcome("ok", cloudpickle.dumps(None), cpus=0, run_s=0.0)


class RecordingClient(RouterClient):
    """Takes the place of a router and its engines."""

    def __init__(self) -> None:
        super().__init__("http://unused")
        self.requests: list[GenerateRequest] = []
        self.spare_tokens = 0

    async def generate(self, _session_id: str, request: GenerateRequest) -> GenerateResult:
        kept = GenerateRequest("ours", list(request.token_ids), request.sampling, request.priority)
        self.requests.append(kept)
        ids = draws(kept) + (33,) * self.spare_tokens
        nan = float("nan")
        return GenerateResult(ids, (0.0,) * len(ids), "length", 0, 0, nan, nan, nan)

    async def finish_session(self, _session_id: str) -> None:
        pass


def test_the_client_sends_the_bytes_that_our_own_replay_sends(trace: Path, model_dir: str) -> None:
    environment = environment_of(trace)
    tasks = environment.tasks(8, 2)
    template = ChatTemplate.load(model_dir)
    for task in tasks:
        seed = trajectory_seed(2, task.task_id, 0)
        plane, client = RecordingPlane(), RecordingClient()
        services = Services(
            session="s",
            submitter=plane,  # type: ignore[arg-type]
            template=template,
            budget=Budget(max_step_tokens=MAX_CONTEXT_TOKENS),
            max_context_tokens=MAX_CONTEXT_TOKENS,
            sampling=Sampling(seeded=True),
            clock=lambda: 0.0,
            journal=lambda kind, body: None,
        )
        ours = LiveContext(services, TrajectorySpec(TrajectoryId(task.task_id), GroupId("g")), seed)
        theirs = RoutedContext(client, task.task_id, seed=seed, max_context_tokens=MAX_CONTEXT_TOKENS)
        asyncio.run(environment.solve(task, ours))
        asyncio.run(environment.solve(task, theirs))
        assert len(plane.requests) == 3
        assert [*map(wire.generate_body, client.requests)] == [*map(wire.generate_body, plane.requests)]
        assert theirs.generated_tokens == task.known_tokens
        assert theirs.context_tokens <= MAX_CONTEXT_TOKENS


def test_a_step_of_another_length_than_asked_is_an_error(trace: Path) -> None:
    client = RecordingClient()
    client.spare_tokens = 1
    with pytest.raises(HeddleError, match=r"step a%2Fb%20\d\.0: \d+ tokens came instead of \d+"):
        asyncio.run(replay_on(client, trace))


async def replay_on(client: RouterClient, trace: Path, alive: int | None = None) -> Replayed:
    environment = environment_of(trace)
    return await replay(
        client,
        environment,
        environment.tasks(8, 2),
        seed=2,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        alive=alive,
    )


# -- over HTTP -------------------------------------------------------------------------------------------


class Forwarder:
    """A router in small: hands requests to engines in turn, and notes whose they were."""

    def __init__(self, engine_urls: Sequence[str]) -> None:
        self.engine_urls = engine_urls
        self.sessions: list[str] = []
        self.finished: list[str] = []
        self.refuse_after = 1_000_000
        self.in_flight = 0
        self.most_under_way = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.sessions.append(request.headers["X-Session-ID"])
        self.most_under_way = max(self.most_under_way, len({*self.sessions} - {*self.finished}))
        turn = len(self.sessions)
        if turn > self.refuse_after:
            return web.json_response({"error": {"message": "no more"}}, status=503)
        url = self.engine_urls[turn % len(self.engine_urls)]
        self.in_flight += 1
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/inference/v1/generate", data=body) as answer,
            ):
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        finally:
            self.in_flight -= 1

    async def finish_session(self, request: web.Request) -> web.Response:
        self.finished.append(request.query["session_id"])
        return web.json_response({"status": "ok"})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        application = web.Application(handler_args={"handler_cancellation": True})
        application.router.add_post("/inference/v1/generate", self.generate)
        application.router.add_post("/finish_session", self.finish_session)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def two_engines(tmp_path: Path) -> AsyncIterator[list[str]]:
    """Where they are."""
    async with AsyncExitStack() as stack:
        spec = emulated("emulated-model", seconds_per_token=0.0005, tcp=True)
        engines = [EngineProcess(spec, tmp_path / f"engine-{index}") for index in range(2)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        yield [(await engine.start(60.0)).url for engine in engines]


@asynccontextmanager
async def forwarding_client(engine_urls: Sequence[str]) -> AsyncIterator[tuple[Forwarder, RouterClient]]:
    forwarder = Forwarder(engine_urls)
    async with forwarder.serving() as url, RouterClient(url) as client:
        yield forwarder, client


def check_replay(forwarder: Forwarder, replayed: Replayed, alive: int | None, trace: Path) -> None:
    assert forwarder.most_under_way == (alive or 8), "tools count: whole trajectories are limited"
    if alive == 1:
        tasks = environment_of(trace).tasks(8, 2)
        begun = list(dict.fromkeys(forwarder.sessions))
        assert begun == [quote(task.task_id, safe="") for task in tasks], "in their order"
    assert replayed.generated_tokens == planned_tokens(environment_of(trace))
    assert replayed.makespan_s > 0.02, "it waited for its tools"
    names = sorted(f"a%2Fb%20{index}" for index in range(8))
    assert sorted(forwarder.sessions) == sorted(3 * names), "a session is a trajectory"
    assert sorted(forwarder.finished) == names


def test_replays_over_http(trace: Path, tmp_path: Path) -> None:
    """What was planned is generated, with no more trajectories at once than the limit; a failed step ends it."""

    async def scenario() -> None:
        async with two_engines(tmp_path) as urls:
            for alive in (None, 3, 1):
                async with forwarding_client(urls) as (forwarder, client):
                    check_replay(forwarder, await replay_on(client, trace, alive), alive, trace)
            async with forwarding_client(urls) as (forwarder, client):
                forwarder.refuse_after = 10
                with pytest.raises(HeddleError, match=r"HTTP 503\): no more"):
                    await replay_on(client, trace)
                assert len(asyncio.all_tasks()) < 40
                assert len(forwarder.finished) < 8

    run(scenario())


def test_a_router_that_is_gone_is_one_line() -> None:
    async def scenario() -> None:
        async with RouterClient("http://127.0.0.1:9") as client:
            await client.finish_session("s")

    with pytest.raises(HeddleError, match=r"^router at http://127.0.0.1:9 is unreachable: .+"):
        run(scenario())


# -- the router ------------------------------------------------------------------------------------------


def test_bad_arms_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"policy 'stickiest' is unknown: use round_robin, cache_aware"):
        check_router("stickiest")
    with pytest.raises(BadInput, match=r"option 'host' is unknown: use cache-threshold"):
        check_router("cache_aware", ["host=0.0.0.0"])
    for wrong in ("alive=0", "alive=many", "alive=1.5", "alive"):
        with pytest.raises(BadInput, match=f"option '{wrong}': give a whole number from 1, as in alive=64"):
            check_router("sticky_least_loaded", [wrong])
    with pytest.raises(BadInput, match=r"option 'cache-threshold=much': give a number"):
        check_router("cache_aware", ["cache-threshold=much"])
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"vllm-router is not installed in .+: run .+\[bench\].+ in a checkout"):
        check_router("cache_aware", ["cache-threshold=0.5"])


def test_the_limit_is_the_clients_and_never_reaches_the_router() -> None:
    options = ("balance-abs-threshold=2", "alive=7")
    assert (most_alive(options), most_alive(options[:1])) == (7, None)
    command = router._command("cache_aware", options, ["http://127.0.0.1:9"], 1)
    assert command[-2:] == ["--balance-abs-threshold", "2"]


def test_a_router_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise RuntimeError('no such luck')"
    monkeypatch.setattr(router, "_command", lambda *_: [sys.executable, "-c", code])

    async def scenario() -> None:
        async with running_router("cache_aware", (), ["http://127.0.0.1:9"], tmp_path):
            raise AssertionError("it never ran")

    message = r"^vllm-router, cache_aware: ended during start-up .+ \(router's log: RuntimeError: no such luck\)$"
    with pytest.raises(HeddleError, match=message):
        run(scenario())
    assert not descendants("no such luck")


def small_fleet(spec: EngineSpec) -> Fleet:
    return Fleet(2, spec, load_profile("tiny-cpu"))


@needs_router
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *((policy, ()) for policy in ISSUE_POLICIES),
        ("cache_aware", ("balance-abs-threshold=2", "alive=3")),
    ],
)
def test_a_run_behind_the_router_on_emulated_engines(policy: str, options: tuple[str, ...], trace: Path) -> None:
    workload = Workload(trace, 8, 1.0, 1.0, 2)
    spec = emulated("emulated-model", seconds_per_token=0.0005)
    row = run(run_router(workload, small_fleet(spec), policy, 1, 0.01, options))
    assert (row.workload, row.repeat) == ("eight", 1)
    assert row.arm == ":".join((f"vllm-router/{policy}", *options))
    tokens = planned_tokens(workload.environment())
    assert row.tokens_per_s == pytest.approx(tokens / row.makespan_s, rel=0.02)
    assert row.bound_share == pytest.approx(0.01 / row.makespan_s, rel=0.02)
    assert not descendants("vllm_router") and not descendants("heddle_dask.engines")


@needs_router
def test_a_failing_run_behind_the_router_leaves_nothing(trace: Path) -> None:
    spec = emulated("emulated-model", faults={"crash_after_requests": 5})
    with pytest.raises(HeddleError, match=r"^vllm-router, round_robin: engine failed \(HTTP 5\d\d\)"):
        run(run_router(Workload(trace, 8, 1.0, 1.0, 2), small_fleet(spec), "round_robin", 0, 0.01))
    assert not descendants("vllm_router") and not descendants("heddle_dask.engines")


@needs_router
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_behind_the_router_on_vllm(trace: Path, model_dir: str) -> None:
    if util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    spec = EngineSpec("vllm", model_dir, slots=6, max_model_len=MAX_CONTEXT_TOKENS)
    workload = Workload(trace, 8, 1.0, 1.0, 2)
    row = run(run_router(workload, small_fleet(spec), "sticky_least_loaded", 0, 0.01), hang_s=500)
    tokens = planned_tokens(environment_of(trace))
    assert row.tokens_per_s == pytest.approx(tokens / row.makespan_s, rel=0.02)
    assert not descendants("vllm_router") and not descendants("vllm.entrypoints")
