"""An environment with a reward given by the user: a Python function, a model service, or an HTTP endpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from heddle_dask.apis.http_calls import http_call
from heddle_dask.chat.reply_parts import answer_of
from heddle_dask.core.errors import BadInput, check_count, check_seconds
from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import Context, Environment, Reward, Task
from heddle_dask.environments.input_identity import code_digest
from heddle_dask.environments.judging import JUDGE_PROMPT, filled, read_score
from heddle_dask.environments.named_object import named_object
from heddle_dask.environments.rewards import RewardContext, Transcript, group_reward_hook


class GivenReward(Protocol):
    """A way to compute the reward of one attempt.

    It may have an attribute `needs` (`Needs`): an API or a service there that the run does not declare is refused when
    the run starts.
    """

    async def of(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        """The reward; None: unknown."""


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function ``reward(task, transcript)``, plain or async, which runs as an action on the tool pool.

    Attributes
    ----------
    function
        Returns a number, a `Reward`, or None. Picklable.
    needs
        Its resources; None: one CPU.
    timeout_s
        None: `Budget.tool_timeout_s`.
    """

    function: Callable[..., Any]
    needs: Needs | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise BadInput(f"reward: {self.function!r} is no function")
        if self.needs is not None and not isinstance(self.needs, Needs):
            raise BadInput(f"reward: needs is {self.needs!r}: use Needs(…)")
        _check_limit(self.timeout_s)

    async def of(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        """See `GivenReward`."""
        label = getattr(self.function, "__name__", "reward")
        value = await ctx.call(self.function, task, transcript, needs=self.needs, label=label, timeout_s=self.timeout_s)
        return Reward.of(value)


@dataclass(frozen=True, slots=True)
class HttpReward:
    """An endpoint (a serverless function, a judge behind a gateway) that takes a POST and answers with the reward.

    It is sent ``{"task": {"task_id", "prompt", "payload"}, "transcript": {…}}`` (`Transcript.as_json`) and answers with
    JSON: a number or null, or an object with ``reward`` and, optionally, ``parts`` and ``metadata``. Refusals are
    repeated as those of every API (`http_call`).

    Attributes
    ----------
    api
        Name of the API of whose quota it takes (`Pools.quotas`); empty: of none.
    call_timeout_s
        Seconds of one HTTP call.
    """

    url: str
    api: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    call_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise BadInput(f"reward: url is {self.url!r}: use the URL of an endpoint, http://… or https://…")
        if not isinstance(self.api, str):
            raise BadInput(f"reward: api is {self.api!r}: use a text")
        if not isinstance(self.headers, Mapping):
            raise BadInput(f"reward: headers is {self.headers!r}: use a mapping")
        check_seconds("reward: call_timeout_s", self.call_timeout_s)

    @property
    def needs(self) -> Needs:
        """One call of its API; nothing where it has no quota."""
        return Needs(api={self.api: 1}) if self.api else Needs(cpus=0)

    async def of(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        """See `GivenReward`."""
        sent = {"task_id": task.task_id, "prompt": task.prompt, "payload": dict(task.payload)}
        answer = await ctx.call(
            http_call,
            "POST",
            self.url,
            json_body={"task": sent, "transcript": transcript.as_json()},
            headers=dict(self.headers),
            answer_within_s=self.call_timeout_s,
            needs=self.needs,
            label="http-reward",
        )
        return _reward_of_json(answer.json())


@dataclass(frozen=True, slots=True)
class ServiceReward:
    """The score of a model service, such as a reward model, for the tokens of the main branch.

    Attributes
    ----------
    service
        As declared with the run (`Pools`).
    as_text
        Send the text instead: the service has another tokenizer.
    timeout_s
        None: `Budget.tool_timeout_s`.
    """

    service: str
    as_text: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.service, str) or not self.service:
            raise BadInput(f"reward: service is {self.service!r}: use the name of a model service")
        _check_limit(self.timeout_s)

    @property
    def needs(self) -> Needs:
        """Its service."""
        return Needs(service=self.service)

    async def of(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        """See `GivenReward`."""
        given = transcript.text if self.as_text else transcript.token_ids
        (score,) = await ctx.score(self.service, [given], timeout_s=self.timeout_s)
        return score


@dataclass(frozen=True, slots=True)
class JudgeReward:
    """The verdict of a language model, a service or an endpoint (`Context.judge`), on each attempt.

    Attributes
    ----------
    service
        As declared with the run (`Pools`).
    prompt
        Its fields in braces are ``question`` (the task's prompt), ``response`` (the last reply behind its thinking),
        ``transcript`` (the whole text), and the keys of the task's payload, such as ``answer``.
    read
        Takes the reply of the judge and gives the number; None: it has no verdict. The reward is unknown then.
    timeout_s
        None: `Budget.tool_timeout_s`.
    """

    service: str
    prompt: str = JUDGE_PROMPT
    read: Callable[[str], Any] = read_score
    max_tokens: int = 1024
    temperature: float = 0.0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("service", "prompt"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise BadInput(f"reward: {name} is {getattr(self, name)!r}: use a text")
        if not callable(self.read):
            raise BadInput(f"reward: read is {self.read!r}: use a function of the reply")
        check_count("reward: max_tokens", self.max_tokens)
        _check_limit(self.timeout_s)

    @property
    def needs(self) -> Needs:
        """Its service."""
        return Needs(service=self.service)

    async def of(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        """See `GivenReward`."""
        fields: dict[str, Any] = {
            **task.payload,
            "question": task.prompt,
            "response": answer_of(transcript.replies[-1]) if transcript.replies else "",
            "transcript": transcript.text,
        }
        verdict = await ctx.judge(
            self.service,
            filled(self.prompt, fields),
            read=self.read,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            timeout_s=self.timeout_s,
        )
        return Reward.of(verdict)


def _check_limit(timeout_s: object) -> None:
    if timeout_s is not None and timeout_s != math.inf:
        check_seconds("reward: timeout_s", timeout_s)


def _reward_of_json(value: Any) -> Reward:
    if not isinstance(value, Mapping):
        return Reward.of(value)
    if "reward" not in value:
        raise BadInput(f"the endpoint answered with {sorted(value)}: it lacks 'reward'")
    return Reward(value["reward"], value.get("parts", {}), value.get("metadata", {}))


def _identity_of(reward: GivenReward) -> str:
    """What tells it from another reward in stored runs."""
    match reward:
        case FunctionReward():
            return code_digest(reward.function)
        case HttpReward():
            return reward.url.partition("?")[0]  # what follows may be a secret
        case ServiceReward():
            return f"service {reward.service}{', as text' if reward.as_text else ''}"
        case JudgeReward():
            return f"judge {reward.service}: {code_digest(reward.read)} {reward.prompt}"
    return code_digest(reward.of)


class RewardedEnvironment:
    """The tasks and the program of an environment, with another reward."""

    def __init__(self, environment: Environment, reward: GivenReward) -> None:
        self._environment = environment
        self._reward = reward
        self.uses_sandbox = bool(getattr(environment, "uses_sandbox", False))
        self.can_replay = bool(getattr(environment, "can_replay", True))
        self.reward_needs: Needs | None = getattr(reward, "needs", None)
        self.reward_asks = {ServiceReward: "score", JudgeReward: "judge"}.get(type(reward), "")
        self.reward_identity = _identity_of(reward)

    @property
    def name(self) -> str:
        return self._environment.name

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return self._environment.tasks(count, seed)

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        return await self._environment.solve(task, ctx)

    async def reward(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float | Reward | None:
        return await self._reward.of(task, transcript, ctx)


def rewarded(environment: Environment, reward: GivenReward | Callable[..., Any] | str) -> RewardedEnvironment:
    """The environment with this reward in place of its own.

    Parameters
    ----------
    reward
        A `FunctionReward`, `ServiceReward`, `JudgeReward`, `HttpReward` or another `GivenReward`; a function
        ``reward(task, transcript)``; or a text: ``package.module:function``, ``FILE.py:function`` or the URL of an
        endpoint.

    Raises
    ------
    BadInput
        It is none of these, or the environment has a group reward of its own.
    """
    if group_reward_hook(environment) is not None:
        raise BadInput(f"environment {environment.name} has rewards for groups: they cannot be replaced")
    if isinstance(reward, str):
        return RewardedEnvironment(environment, _named(reward))
    if callable(getattr(reward, "of", None)):
        return RewardedEnvironment(environment, reward)  # type: ignore[arg-type]
    if callable(reward):
        return RewardedEnvironment(environment, FunctionReward(reward))
    raise BadInput(
        f"reward is {reward!r}: use a function, FunctionReward(…), ServiceReward(…), JudgeReward(…) or HttpReward(…)"
    )


def _named(text: str) -> GivenReward:
    if text.startswith(("http://", "https://")):
        return HttpReward(text)
    function = named_object(text, what="reward") if ":" in text else None
    if not callable(function):
        raise BadInput(f"reward {text!r}: use package.module:function, FILE.py:function or the URL of an endpoint")
    return FunctionReward(function)
