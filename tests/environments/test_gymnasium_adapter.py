"""The adapter plays real Gymnasium environments, and its failures are the trajectory's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import EnvironmentFailed, Reply, Reward, Task
from heddle_dask.environments.gymnasium_adapter import GymnasiumEnvironment, parse_action


class ScriptedContext:
    """Gives out replies from a list; done when they are used up."""

    seed = 1
    max_context_tokens = 10_000
    context_tokens = 0

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = list(replies)
        self.messages: list[tuple[str, str]] = []
        self.metadata: dict[str, Any] = {}

    @property
    def done(self) -> bool:
        return not self.replies

    def append(self, role: str, text: str) -> None:
        self.messages.append((role, text))

    async def generate(self) -> Reply:
        return Reply(self.replies.pop(0), (1,), (0.0,), "stop")


def frozen_lake() -> Any:
    return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")


def play(environment: GymnasiumEnvironment, replies: Sequence[str]) -> tuple[Any, ScriptedContext]:
    context = ScriptedContext(replies)
    task = environment.tasks(1, seed=3)[0]
    reward = asyncio.run(environment.solve(task, context))  # type: ignore[arg-type]
    return Reward.of(reward).value, context


def test_frozen_lake_is_solved_by_the_known_path() -> None:
    environment = GymnasiumEnvironment(frozen_lake, name="lake", instructions="Cross the lake.")
    path = ["down: 1", "1", "Going right, so 2", "1", "2", "2", "never asked"]
    reward, context = play(environment, path)
    assert reward == 1.0
    assert context.replies == ["never asked"]
    assert len(context.messages) == 6
    role, opening = context.messages[0]
    assert role == "user"
    assert opening.startswith("Cross the lake.")
    assert "FHFH" in opening


def test_falling_into_a_hole_ends_with_no_reward() -> None:
    reward, context = play(GymnasiumEnvironment(frozen_lake), ["2", "1", "1"])
    assert (reward, len(context.replies)) == (0.0, 1)


def test_end_of_the_budget_gives_the_reward_so_far() -> None:
    reward, context = play(GymnasiumEnvironment(frozen_lake), ["1"])
    assert (reward, len(context.messages)) == (0.0, 2)


def test_unreadable_action_is_told_to_the_model() -> None:
    _, context = play(GymnasiumEnvironment(frozen_lake), ["left", "7", "1"])
    sentence = ("user", "Invalid action. Reply with an integer from 0 to 3.")
    assert context.messages[1:3] == [sentence, sentence]


def test_replies_without_an_action_end_the_episode() -> None:
    reward, context = play(GymnasiumEnvironment(frozen_lake, useless_replies=3), ["2", "left", "7", "no", "2"])
    assert (reward, context.replies) == (0.0, ["2"])
    assert context.metadata == {"no_progress": "3 replies in a row had no action"}


def test_a_number_in_the_thinking_is_no_action() -> None:
    _, context = play(GymnasiumEnvironment(frozen_lake), ["Is it 1?\n</think>\nI do not know.", "x"])
    assert "Invalid action" in context.messages[1][1]


def test_blackjack_is_played_with_its_observation_as_text() -> None:
    reward, context = play(GymnasiumEnvironment(lambda: gymnasium.make("Blackjack-v1")), ["0"])
    assert reward in (-1.0, 0.0, 1.0)
    assert context.messages[0][1].startswith("(")


def test_tasks_are_the_same_for_the_same_seed() -> None:
    environment = GymnasiumEnvironment(frozen_lake)
    assert environment.tasks(5, seed=1) == environment.tasks(5, seed=1)
    assert environment.tasks(5, seed=1) != environment.tasks(5, seed=2)
    assert len({task.task_id for task in environment.tasks(50, seed=1)}) == 50


class Recorder:
    """An environment by duck typing that notes who calls what."""

    action_space = gymnasium.spaces.Text(max_length=5)

    def __init__(self, calls: list[tuple[str, Any, int]], fail_in: str = "") -> None:
        self.calls = calls
        self.fail_in = fail_in

    def _note(self, name: str, value: Any = None) -> None:
        self.calls.append((name, value, threading.get_ident()))
        if name == self.fail_in:
            raise RuntimeError(f"broken {name}")

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._note("reset", seed)
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._note("step", action)
        return "next", 0.5, False, action == "end", {}

    def close(self) -> None:
        self._note("close")


def test_calls_come_in_order_on_one_other_thread() -> None:
    calls: list[tuple[str, Any, int]] = []
    environment, context = GymnasiumEnvironment(lambda: Recorder(calls)), ScriptedContext([" go ", "too long", "end"])
    reward = asyncio.run(environment.solve(environment.tasks(1, seed=3)[0], context))  # type: ignore[arg-type]
    assert reward is not None and (reward.value, reward.turns) == (1.0, (0.5, 0.0, 0.5))
    assert [name for name, _, _ in calls] == ["reset", "step", "step", "close"]
    assert [value for name, value, _ in calls if name == "step"] == ["go", "end"]
    assert len({thread for _, _, thread in calls}) == 1
    assert calls[0][2] != threading.get_ident()
    assert [text for _, text in context.messages][:2] == ["begin", "next"]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_exception_of_the_environment_comes_out_and_it_is_closed(where: str) -> None:
    calls: list[tuple[str, Any, int]] = []
    with pytest.raises(EnvironmentFailed, match=f"{where}: RuntimeError: broken {where}"):
        play(GymnasiumEnvironment(lambda: Recorder(calls, fail_in=where)), ["a", "b"])
    assert calls[-1][0] == "close"


def test_cancelled_step_is_closed_after_it_ends() -> None:
    calls: list[tuple[str, Any, int]] = []
    entered, leave = threading.Event(), threading.Event()

    class Slow(Recorder):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            entered.set()
            leave.wait(30)
            return super().step(action)

    async def main() -> None:
        environment = GymnasiumEnvironment(lambda: Slow(calls))
        solving = environment.solve(Task("t", ""), ScriptedContext(["a"]))  # type: ignore[arg-type]
        task = asyncio.create_task(solving)
        await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, leave.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [name for name, _, _ in calls] == ["reset", "step", "close"]


def test_a_call_that_hangs_is_the_cause_and_keeps_no_process_alive() -> None:
    code = """
import asyncio, threading
from environments.test_gymnasium_adapter import Recorder, ScriptedContext
from heddle_dask.environments.gymnasium_adapter import GymnasiumEnvironment
from heddle_dask.environments import gymnasium_adapter
gymnasium_adapter._CLOSE_S = 0.1
class Hangs(Recorder):
    def _note(self, name, value=None):
        if name == self.fail_in:
            threading.Event().wait()
for where in ("reset", "step", "close"):
    environment = GymnasiumEnvironment(lambda: Hangs([], where), timeout_s=0.1)
    try:
        asyncio.run(environment.solve(environment.tasks(1, 3)[0], ScriptedContext(["end"])))
    except Exception as error:
        print(type(error).__name__, error)
"""
    tests = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tests, timeout=100)
    told = [f"EnvironmentFailed {where} took too long" for where in ("reset", "step", "close")]
    assert (ended.returncode, ended.stdout.splitlines()) == (0, told), ended.stderr


def test_other_spaces_need_a_parse_function() -> None:
    with pytest.raises(BadInput, match="Box action"):
        parse_action("1", gymnasium.spaces.Box(0, 1))
    with pytest.raises(ValueError, match="from 5 to 6"):
        parse_action("9" * 10_000, gymnasium.spaces.Discrete(2, start=5))
    assert parse_action("5 or rather 6", gymnasium.spaces.Discrete(2, start=5)) == 6
