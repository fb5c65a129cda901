"""Adapts environments with the Gymnasium API (`reset`, `step`, `close`) to language models.

The environment object is stateful and often neither picklable nor thread-safe, so its calls cannot be actions on
arbitrary workers. It is in the driver, with one thread per trajectory: the event loop is not blocked, calls never
overlap (even while a cancelled one still runs), and resources bound to a thread, like SQLite or a window, work. Long
computations belong in a tool that is called with `ctx.call`.

Gymnasium itself is not imported: any object with its methods and a five-tuple from `step` works.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.environments.base import CUT, NO_PROGRESS, Context, Reward, Task, environment_step
from heddle_dask.isolation.user_thread import UserThread

_INTEGER = re.compile(r"-?\d+")
CALL_S = 600.0
"""Of one call of an environment; as a tool call has by default (`Budget.tool_timeout_s`)."""
_CLOSE_S = 5.0


class GymnasiumApi(Protocol):
    """The part of the Gymnasium API that is used here."""

    @property
    def action_space(self) -> Any:
        """Space of the actions that `step` takes."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; returns observation and information."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act; returns observation, reward, terminated, truncated and information."""

    def close(self) -> None:
        """Release the resources of the environment."""


Parse = Callable[[str, Any], Any]


def parse_action(text: str, space: Any) -> Any:
    """The action in a model's reply, for the spaces `Discrete` and `Text`.

    Discrete: the last integer in the reply. Text: the reply without surrounding white space.

    Raises
    ------
    ValueError
        The reply contains no valid action; the message is for the model.
    BadInput
        Another kind of space: give a parse function.
    """
    kinds = [kind.__name__ for kind in type(space).__mro__]
    if "Discrete" in kinds:
        lowest, highest = int(space.start), int(space.start) + int(space.n) - 1
        found = _INTEGER.findall(text)
        # Refuse very long numbers here: `int` would raise its own error.
        if not found or len(found[-1]) > 18 or not lowest <= int(found[-1]) <= highest:
            raise ValueError(f"Invalid action. Reply with an integer from {lowest} to {highest}.")
        return int(found[-1])
    if "Text" in kinds:
        action = text.strip()
        if not space.contains(action):
            raise ValueError("Invalid action. Reply with a text that the environment allows.")
        return action
    raise BadInput(
        f"no default way to read a {kinds[0]} action from a reply: give GymnasiumEnvironment a parse function"
    )


class GymnasiumEnvironment:
    """Wraps a factory of environments with the Gymnasium API. The reward is the sum over the episode, in turns.

    Parameters
    ----------
    factory
        Makes a fresh environment; called on the thread that will use it.
    name
        Stored with each trajectory.
    instructions
        Opens the first message, before the first observation.
    parse
        Turns the answer in a reply and the action space into an action; a ValueError goes to the model as text.
    describe
        Turns an observation into text. By default the rendering where the environment's
        ``render_mode`` is ``"ansi"``, else ``str``.
    timeout_s
        Seconds of one call of the environment; None: no limit. A call that takes longer is left on its thread, which
        does not keep the process alive.
    useless_replies
        Maximum number of replies in a row without an action; the trajectory then ends as truncated with the cause
        ``"no-progress"``, and has the reward so far.
    """

    def __init__(
        self,
        factory: Callable[[], GymnasiumApi],
        *,
        name: str = "gymnasium",
        instructions: str = "",
        parse: Parse = parse_action,
        describe: Callable[[Any], str] | None = None,
        timeout_s: float | None = CALL_S,
        useless_replies: int = 8,
    ) -> None:
        if timeout_s is not None and not (is_finite(timeout_s) and timeout_s > 0):
            raise BadInput(f"gymnasium: timeout_s is {timeout_s!r}: use seconds above 0, or None")
        self._factory = factory
        self._name = name
        self._instructions = instructions
        self._parse = parse
        self._describe = describe
        self._timeout_s = timeout_s
        check_count("gymnasium: useless_replies", useless_replies)
        self._useless_replies = useless_replies

    @property
    def name(self) -> str:
        return self._name

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, each with its own seed for `reset`, so that attempts at one task start equally."""
        draws = random.Random(f"gymnasium tasks {seed}")
        seeds = [draws.randrange(1 << 31) for _ in range(count)]
        return [Task(f"{self._name}-{reset}-{i}", "", {"seed": reset}) for i, reset in enumerate(seeds)]

    async def solve(self, task: Task, ctx: Context) -> Reward | None:
        """Play one episode, to its end or to the end of the trajectory's budget.

        An exception of the environment, or a call that takes longer than `timeout_s`, is an `EnvironmentFailed`: the
        attempt is made again in a fresh environment. An invalid action uses a step of the trajectory, not of
        the environment: the model gets an error message and may try again.
        """
        thread = _OnThread(self._name, self._timeout_s)
        try:
            return await self._episode(thread, task, ctx)
        finally:
            thread.end()

    async def _episode(self, thread: _OnThread, task: Task, ctx: Context) -> Reward:
        environment = await thread.run("start", self._factory)
        try:
            seed = task.payload.get("seed")
            observation, _ = await thread.run("reset", lambda: environment.reset(seed=seed))
            opening = [self._instructions, task.prompt]
            opening.append(await thread.run("observation", self._text, environment, observation))
            ctx.append("user", "\n\n".join(part for part in opening if part))
            turns, useless = list[float](), 0
            while not ctx.done:
                if useless >= self._useless_replies:
                    ctx.metadata[NO_PROGRESS] = f"{useless} replies in a row had no action"
                    break
                reply = await ctx.generate()
                turns.append(0.0)
                useless += 1
                try:
                    if reply.finish_reason == "length":
                        raise ValueError(CUT)
                    action = self._parse(reply.answer, environment.action_space)
                except BadInput:
                    raise
                except ValueError as error:
                    ctx.append("user", str(error))
                    continue
                useless = 0
                step = await thread.run("step", environment.step, action)
                observation, gained, terminated, truncated, _ = step
                turns[-1] = float(gained)
                if terminated or truncated:
                    break
                ctx.append("user", await thread.run("observation", self._text, environment, observation))
            return Reward(0.0 if not turns else None, turns=turns)
        finally:
            await thread.close(environment.close)

    def _text(self, environment: Any, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation)
        if getattr(environment, "render_mode", None) == "ansi":
            return str(environment.render())
        return str(observation)


class _OnThread:
    """Runs calls one after the other on one thread, each for a limited time."""

    def __init__(self, name: str, timeout_s: float | None) -> None:
        self._thread = UserThread(name)
        self._timeout_s = timeout_s
        self._left = False  # whether a call has been left that may still run

    async def run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        called = self._thread.call(function, *args)
        try:
            with environment_step(what):
                async with asyncio.timeout(self._timeout_s):
                    return await called
        finally:
            self._left = self._left or called.cancelled()

    async def close(self, function: Callable[[], Any]) -> None:
        """The last call; behind one that was left it is waited for shortly: that one may hang, and is the cause."""
        if not self._left:
            await self.run("close", function)
            return
        called = self._thread.call(function)
        await asyncio.wait([called], timeout=_CLOSE_S)
        if not called.cancel():
            called.exception()

    def end(self) -> None:
        self._thread.end()
