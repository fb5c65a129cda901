"""A replay with a plain asyncio client of a router: no scheduler, no order, no Dask.

One coroutine per trajectory, all started at once; a limit may keep most of them waiting, in order. Each runs the
environment's agent program with a context that sends its steps to the router and sleeps for its tool times. The
requests are those of this package's rollout workers (`engines.wire`: token ids in and out, no detokenisation, the same
sampling and seeds) with priority 0 and an additional header, ``X-Session-ID``, which identifies a trajectory for the
router's sticky policies.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote

import aiohttp

from heddle_dask.core.errors import HeddleError
from heddle_dask.core.needs import Needs
from heddle_dask.engines import wire
from heddle_dask.engines.contract import EngineUnreachable, GenerateRequest, GenerateResult, SamplingParams
from heddle_dask.environments.base import ActionKind, Context, Environment, Reply, Role, Task
from heddle_dask.live.driver.programs.attempts import trajectory_seed
from heddle_dask.live.driver.programs.services import Sampling

_CONNECT_TIMEOUT_S = 10.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: seconds from the first start to the last end, and the sampled tokens."""

    makespan_s: float
    generated_tokens: int


class RouterClient:
    """HTTP client of one router; use it as an async context manager."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RouterClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            read_bufsize=1 << 20,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(self, session_id: str, request: GenerateRequest) -> GenerateResult:
        """Run one LLM step on the engine that the router chooses; waits for its end, however long it takes.

        Raises
        ------
        EngineUnreachable
            Router or engine did not answer, or failed internally.
        EngineRefused
            One of them declined the request.
        """
        headers = {"Content-Type": "application/json", "X-Session-ID": session_id}
        answer = await self._post("/inference/v1/generate", headers, wire.generate_body(request))
        # The router labels every answer to a stream request as a stream, although the emulated engine's is JSON.
        if answer.startswith(b"{"):
            return wire.result_of_json(answer)
        # The components of this time are not measured here.
        return wire.result_of_stream(answer, math.nan, math.nan)

    async def finish_session(self, session_id: str) -> None:
        """Tell the router that a trajectory has ended, for its sticky policy.

        Raises
        ------
        EngineUnreachable, EngineRefused
            As `generate`.
        """
        await self._post(f"/finish_session?session_id={quote(session_id, safe='')}", {}, b"")

    async def _post(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        assert self._session is not None, "enter the client first"
        try:
            async with self._session.post(self._base_url + path, data=body, headers=headers) as response:
                answer = await response.read()
                if response.status != 200:
                    raise wire.error_of_status(response.status, wire.error_message(answer))
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise EngineUnreachable(f"router at {self._base_url} is unreachable: {cause}") from error


class RoutedContext:
    """One trajectory's context with a router: the part of `environments.base.Context` that a replay needs.

    Parameters
    ----------
    name
        Name of the trajectory, unique in a run: session id at the router and prefix of its request ids.
    """

    def __init__(self, client: RouterClient, name: str, *, seed: int, max_context_tokens: int) -> None:
        self.seed = seed
        self.max_context_tokens = max_context_tokens
        self.generated_tokens = 0
        # Header values must be ASCII without line breaks.
        self.session_id = quote(name, safe="")
        self._client = client
        self._token_ids: list[int] = []
        self._steps = 0

    @property
    def done(self) -> bool:
        """True if the context is full."""
        return self.context_tokens >= self.max_context_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def append(self, role: Role, text: str) -> None:
        """Not supported, since there is no chat template.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError("the router baseline replays token ids; it renders no messages")

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add token ids for the next step."""
        self._token_ids.extend(token_ids)

    async def generate(
        self, *, max_tokens: int | None = None, temperature: float | None = None, ignore_eos: bool = False
    ) -> Reply:
        """Run one step through the router.

        Raises
        ------
        EngineUnreachable, EngineRefused
            See `RouterClient.generate`.
        HeddleError
            The result has fewer or more tokens than `ignore_eos` promises.
        """
        defaults = Sampling()
        room = self.max_context_tokens - self.context_tokens
        sampling = SamplingParams(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            temperature=defaults.temperature if temperature is None else temperature,
            top_p=defaults.top_p,
            # The seed of an uninterrupted step in the live context.
            seed=(self.seed * 1_000_003 + self._steps * 1_009) % 2**31,
            ignore_eos=ignore_eos,
        )
        request_id = f"{self.session_id}.{self._steps}"
        request = GenerateRequest(request_id, self._token_ids, sampling)
        result = await self._client.generate(self.session_id, request)
        came = len(result.token_ids)
        if ignore_eos and came != sampling.max_tokens:
            raise HeddleError(f"step {request_id}: {came} tokens came instead of {sampling.max_tokens}")
        self._token_ids.extend(result.token_ids)
        self._steps += 1
        self.generated_tokens += came
        # The text is empty: a replay does not read it.
        return Reply(
            text="",
            token_ids=tuple(result.token_ids),
            logprobs=tuple(result.logprobs),
            finish_reason="stop" if result.finish_reason == "stop" else "length",
        )

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: tuple[int, int] | None = None,
        needs: Needs | None = None,
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function on the event loop. It must not block: a replay's tools only sleep."""
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value


async def replay(
    client: RouterClient,
    environment: Environment,
    tasks: Sequence[Task],
    *,
    seed: int,
    max_context_tokens: int,
    alive: int | None = None,
) -> Replayed:
    """Replay all tasks at once, or at most `alive` of them at a time, in their order.

    A trajectory is under way from its first step until the router knows that it has ended, its tools included, as in
    slime's semaphore.

    Raises
    ------
    HeddleError
        A step failed, or a trajectory did not generate the tokens of its task.
    """
    room = asyncio.Semaphore(len(tasks) if alive is None else alive)

    async def replayed(task: Task) -> tuple[float, float, int]:
        async with room:
            return await _replay_one(client, environment, task, seed, max_context_tokens)

    spans = await together([replayed(task) for task in tasks])
    makespan_s = max(end_s for _, end_s, _ in spans) - min(start_s for start_s, _, _ in spans)
    return Replayed(makespan_s, sum(tokens for _, _, tokens in spans))


async def _replay_one(
    client: RouterClient, environment: Environment, task: Task, seed: int, max_context_tokens: int
) -> tuple[float, float, int]:
    context = RoutedContext(
        client,
        task.task_id,
        seed=trajectory_seed(seed, task.task_id, 0),
        max_context_tokens=max_context_tokens,
    )
    start_s = time.monotonic()
    await environment.solve(task, cast(Context, context))
    end_s = time.monotonic()
    await client.finish_session(context.session_id)
    if context.generated_tokens != task.known_tokens:
        raise HeddleError(
            f"trajectory {task.task_id} generated {context.generated_tokens} tokens, planned were {task.known_tokens}"
        )
    return start_s, end_s, context.generated_tokens


async def together(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all concurrently; the first failure cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
