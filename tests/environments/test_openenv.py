"""Environments of OpenEnv: its own template on a server, replies as actions, and a server that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from worlds.openenv_server import openenv_server

from heddle_dask.apis.openenv import NoAction, OpenEnvEnvironment, action_in
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import NO_PROGRESS, EnvironmentFailed, Reply, Reward, Task
from heddle_dask.environments.loading import load_environment

TEXT = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}}
MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}


class Script:
    """A context whose model says these texts."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.told = list(replies), list[str]()
        self.metadata: dict[str, Any] = {}

    @property
    def done(self) -> bool:
        return not self.replies

    def append(self, role: str, text: str) -> None:
        assert role == "user"
        self.told.append(text)

    async def generate(self) -> Reply:
        return Reply(self.replies.pop(0), (), (), "stop")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with openenv_server(tmp_path_factory.mktemp("openenv")) as url:
        yield url


def played(env: Any, ctx: Script, task: Task | None = None) -> Reward:
    reward = asyncio.run(env.solve(task or Task("t", "Say something.", {"seed": 3}), ctx))
    assert isinstance(reward, Reward)
    return reward


def test_its_own_environment_is_played(server: str) -> None:
    env = load_environment(f"openenv:{server}")
    ctx = Script("hello", '{"message": "twelve chars"}', "<think>what?</think>x")
    reward = played(env, ctx)
    assert reward.value == pytest.approx(0.5 + 1.0 + 0.1) and reward.metadata["environment_steps"] == 3
    assert ctx.told[0].startswith("Say something.") and "Echo environment ready!" in ctx.told[0]
    assert '"echoed_message": "hello", "message_length": 5' in ctx.told[1]
    first, second = env.tasks(2, 1)
    assert first.payload != second.payload and env.name.startswith("openenv:127.0.0.1:")


def test_attempts_that_a_full_server_refuses_wait(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template has one session."""
    monkeypatch.setattr("heddle_dask.apis.openenv._WAIT_S", 0.02)
    env = OpenEnvEnvironment(server)

    async def body() -> list[Reward | None]:
        attempts = (env.solve(Task(f"{i}", ""), Script("a" * i, "bb")) for i in range(1, 5))  # type: ignore[arg-type]
        return await asyncio.gather(*attempts)

    assert [each.value for each in asyncio.run(body()) if each] == [pytest.approx(0.1 * i + 0.2) for i in range(1, 5)]


def test_a_model_without_actions_is_told_and_ended(server: str) -> None:
    env = OpenEnvEnvironment(f"{server}?sessions=1", useless_replies=2)
    ctx = Script("", "", "late")
    assert played(env, ctx).value == 0.0
    assert ctx.told[1] == ctx.told[2] and "Reply with one JSON object" in ctx.told[1]
    assert ctx.metadata[NO_PROGRESS] == "2 replies in a row had no action" and ctx.replies == ["late"]
    refused = Script('{"message": 3}', "fine")
    assert played(env, refused).value == pytest.approx(0.4)
    assert refused.told[1].startswith("error: Invalid message") and "string_type" in refused.told[1]


def test_a_server_that_is_gone_is_no_fault_of_the_agent() -> None:
    with pytest.raises(EnvironmentFailed, match=r"the server of OpenEnv at http://127.0.0.1:9: "):
        played(OpenEnvEnvironment("http://127.0.0.1:9"), Script("a"))


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (TEXT, "plain words", {"message": "plain words"}),
        (TEXT, 'Done: {"message": "in JSON"}', {"message": "in JSON"}),
        (TEXT, 'Code: {"other": 1}', {"message": 'Code: {"other": 1}'}),
        (MOVE, 'First {"x": 0}, then {"x": 1, "y": {"z": 2}} {broken', {"x": 1, "y": {"z": 2}}),
        (MOVE, "left", None),
        (MOVE, "[1, 2]", None),
    ],
)
def test_actions_are_found_in_replies(schema: dict[str, Any], text: str, action: dict[str, Any] | None) -> None:
    if action is None:
        with pytest.raises(NoAction, match=r'"y": \{"type": "integer"\}'):
            action_in(Reply(text, (), (), "stop"), schema)
        return
    assert action_in(Reply(text, (), (), "stop"), schema) == action


@pytest.mark.parametrize("address", ["echo_env", "ftp://host", "http://host?slots=3", "http://host?sessions=many"])
def test_what_is_no_server_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="openenv"):
        OpenEnvEnvironment(address)
