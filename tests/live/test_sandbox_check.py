"""A rollout asks the tool workers for their sandbox, tells the mode, and refuses a weak one by default."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from worlds.dask_cluster import with_cluster

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.environments.code_env import CodeEnvironment
from heddle_dask.environments.search_env import SearchEnvironment
from heddle_dask.live.driver.connection import sandbox_check
from heddle_dask.live.driver.connection.sandbox_check import (
    WorkerSandbox,
    check_sandbox,
    worker_sandbox,
)

STRONG = WorkerSandbox("bubblewrap", isolates_network=True)
AS_ROOT = WorkerSandbox("weak", isolates_network=True, as_root=True)
AS_USER = WorkerSandbox("weak", isolates_network=True)
ON_NETWORK = WorkerSandbox("weak", as_root=True)
NONE = WorkerSandbox("none", error="no sandbox works on node: install the package `bubblewrap`")


class Cluster:
    """A client whose workers answer; the first questions come before any tool worker has joined."""

    scheduler = None

    def __init__(self, *answers: WorkerSandbox | None, late: int = 0) -> None:
        self.answers = answers
        self.late = late

    async def run(self, function: object, on_error: str) -> dict[str, Any]:
        self.late -= 1
        return {} if self.late >= 0 else {f"tcp://{i}": answer for i, answer in enumerate(self.answers)}


def check(cluster: Cluster, policy: str, env: Any = None) -> tuple[dict[str, str], list[str]]:
    lines: list[str] = []
    asked = check_sandbox(cluster, (env or CodeEnvironment(),), policy, 5.0, lines.append)  # type: ignore[arg-type]
    return asyncio.run(asked), lines


@pytest.mark.parametrize(
    ("sandbox", "text"), [(STRONG, "bubblewrap"), (AS_ROOT, "weak, as root")], ids=["strong", "root"]
)
def test_a_strong_sandbox_and_the_weak_one_of_root_are_told(sandbox: WorkerSandbox, text: str) -> None:
    assert check(Cluster(None, sandbox, late=1), "strong") == ({"sandbox": text}, [f"sandbox: {text}"])


@pytest.mark.parametrize(
    ("sandbox", "text"),
    [(AS_USER, "weak, as a user"), (ON_NETWORK, "weak, as root, network not isolated")],
    ids=["user", "network"],
)
def test_a_weak_sandbox_is_refused_unless_accepted(sandbox: WorkerSandbox, text: str) -> None:
    with pytest.raises(BadInput, match=f"{text}.*--sandbox weak"):
        check(Cluster(STRONG, sandbox), "strong")
    assert check(Cluster(sandbox), "weak")[0] == {"sandbox": text}


def test_a_worker_without_sandbox_is_refused_always() -> None:
    with pytest.raises(BadInput, match="install the package"):
        check(Cluster(NONE), "weak")


def test_an_environment_without_sandbox_asks_nothing() -> None:
    assert check(Cluster(NONE), "strong", SearchEnvironment()) == ({}, [])


def test_a_worker_tells_its_own_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found() -> Any:
        return SimpleNamespace(mode="weak", confinement=SimpleNamespace(isolates_network=True))

    async def missing() -> Any:
        raise HeddleError("no sandbox works")

    def told(cpus: int) -> WorkerSandbox | None:
        worker = SimpleNamespace(state=SimpleNamespace(total_resources={"TOOL": cpus}))
        return asyncio.run(worker_sandbox(worker))

    monkeypatch.setattr(sandbox_check.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sandbox_check, "shared_sandbox", found)
    assert told(0) is None
    assert told(2) == AS_USER
    monkeypatch.setattr(sandbox_check, "shared_sandbox", missing)
    assert told(2) == WorkerSandbox("none", error="no sandbox works")


def test_a_scheduler_without_the_plugin_is_not_asked_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        assert await check_sandbox(client, [CodeEnvironment()], "weak", 0.1, print) == {}

    with_cluster(body)
    assert not [record for record in caplog.records if "No handler" in record.getMessage()]
