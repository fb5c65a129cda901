"""An agent that is a command, on a cluster with emulated engines: what is recorded, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import psutil
import pytest
from worlds.command_agents import WriteFile, script
from worlds.live_world import emulated, run, until
from worlds.shared_cluster import shared_cluster

from heddle_dask import Context, Rollout, Task
from heddle_dask.environments.agent_description import AgentDescription
from heddle_dask.environments.base import Environment, Reward
from heddle_dask.environments.command_agent import CommandAgent
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.reference_agent import ReferenceAgent
from heddle_dask.records.trajectory import TrajectoryRecord

pytestmark = pytest.mark.cluster
GATEWAY = "gateway_process"

WRITES = script(
    """
first = ask(sys.argv[1])
ask(sys.argv[1], first, "go on")
open("answer.txt", "w").write("hello")
open("/tmp/own.log", "w").write("two requests")
print("all", os.getcwd(), sorted(os.listdir("/sys")) if os.path.exists("/sys") else "", "done")
print("to stderr", file=sys.stderr)
sys.exit(3)
""",
    "writes",
    answer="stdout",
    keep=("/tmp/own.log", "/tmp/none"),
)
# Ends by no signal but the last one, and leaves its session.
STAYS = script(
    """
import signal, subprocess, time
ask("hello")
open("answer.txt", "w").write("hello")
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "trap '' TERM; while true; do sleep 0.1; done; : forked-away"], start_new_session=True)
time.sleep(1000)
""",
    "stays",
)
MUTE = script("sys.exit('no key at all')", "mute")
ABSENT = AgentDescription("absent", ("no-such-agent", "{instruction}"), memory="64 MiB", install=("make it",))


class BrokenVerdict(WriteFile):
    """Its verifier has a fault of its own."""

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> float:
        raise KeyError("no such test")


class EachAgent:
    """The agents of a test in one rollout: a task is named like the agent that works on it."""

    name = "each agent"
    can_replay = False

    def __init__(self, agents: Mapping[str, Environment]) -> None:
        self._agents = agents

    def tasks(self, count: int, seed: int) -> list[Task]:
        return [replace(agent.tasks(1, seed)[0], task_id=name) for name, agent in self._agents.items()]

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        return await self._agents[task.task_id].solve(task, ctx)


def rolled_out(model_dir: str, agents: Mapping[str, Environment]) -> dict[str, TrajectoryRecord]:
    async def body() -> dict[str, TrajectoryRecord]:
        async with shared_cluster(1) as client:
            rollout = Rollout(client, env=EachAgent(agents), model=model_dir, engines=emulated(model_dir))
            return {record.task_id: record for record in await rollout.run(len(agents))}

    result: dict[str, TrajectoryRecord] = run(body())
    return result


def test_how_agents_end(model_dir: str) -> None:
    agents: dict[str, Environment] = {
        "writes": CommandAgent(WRITES, WriteFile()),
        "stays": CommandAgent(STAYS, WriteFile(limit_s=10.0)),
        "mute": CommandAgent(MUTE, WriteFile()),
        "absent": CommandAgent(ABSENT, WriteFile()),
        "no image": CommandAgent(WRITES, WriteFile(image="nowhere.tar")),
        "no verdict": CommandAgent(WRITES, BrokenVerdict()),
        "no solution": ReferenceAgent(WriteFile()),
    }
    found = rolled_out(model_dir, agents)
    writes = found["writes"]
    # Its exit code is its own affair: what it left counts.
    assert (writes.status, writes.reward, len(writes.steps)) == ("completed", 1.0, 2), writes.detail
    facts = writes.metadata["agent"]
    assert facts["exit_code"] == 3 and facts["seconds"] > 0 and facts["ended_by"] == ""
    assert facts["answer"] == "all /home/agent  done" and facts["stderr"] == "to stderr\n"
    assert facts["files"] == {"/tmp/own.log": "two requests", "/tmp/none": None}
    assert writes.metadata["gateway"]["requests"] == 2
    stays = found["stays"]
    assert (stays.status, stays.cause, stays.reward) == ("truncated", "time", 1.0), stays.detail
    assert stays.metadata["agent"]["ended_by"] == "timeout"
    time.sleep(0.1)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "forked-away" in " ".join(p.info["cmdline"] or ())]
    mute = found["mute"]
    assert (mute.status, mute.cause, mute.reward) == ("failed", "agent", None)
    assert "agent mute: it has not asked the model once; exit code 1: no key at all" in mute.detail.splitlines()[0]
    # What lies with the machines is no failure of the agent, and an unknown verdict is none at all.
    for name, said in {"absent": "agent absent is not installed: ", "no image": "could not be prepared"}.items():
        assert (found[name].status, found[name].cause) == ("failed", "environment") and said in found[name].detail
    assert found["absent"].detail.splitlines()[0].endswith("; make it")
    for name, said in {"no verdict": "KeyError: 'no such test'", "no solution": "has no solution"}.items():
        assert (found[name].status, found[name].reward) == ("completed", None), found[name].detail
        assert said in found[name].metadata["verifier"]


def test_agents_hold_no_cpu(model_dir: str) -> None:
    """More agents than the tool worker has CPUs run side by side."""
    waits = script("import time\nask('hello')\ntime.sleep(4)\nask('hello again')", "waits")

    async def body() -> list[TrajectoryRecord]:
        async with shared_cluster(1) as client:
            env = CommandAgent(waits, WriteFile())
            return list(await Rollout(client, env=env, model=model_dir, engines=emulated(model_dir)).run(20))

    records = run(body())
    assert {record.status for record in records} == {"completed"}, records[0].detail
    runs = [next(a for a in record.actions if a.label == "agent waits") for record in records]
    assert {a.cpus for a in runs} == {0}
    begun = [a.finished_s - a.run_s for a in runs]
    at_once = max(sum(b <= at < a.finished_s for a, b in zip(runs, begun, strict=True)) for at in begun)
    assert at_once > 8, begun


WAITS_FOR_AN_ANSWER = script(
    """
import subprocess
ask("hello")
subprocess.Popen(["sh", "-c", "sleep 100; : about-to-ask"])
ask("hello again", tokens=60)
open("answer.txt", "w").write("hello")
""",
    "interrupted",
)


def test_an_agent_whose_gateway_is_lost_is_attempted_again(model_dir: str) -> None:
    def seen(mark: str) -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]

    async def body() -> TrajectoryRecord:
        async with (
            shared_cluster(1) as client,
            Rollout(
                client,
                env=CommandAgent(WAITS_FOR_AN_ANSWER, WriteFile()),
                model=model_dir,
                engines=emulated(
                    model_dir, seconds_per_token=0.1, emulation={"mean_length_tokens": 100_000, "end_token_id": None}
                ),
            ) as rollout,
        ):
            running = asyncio.ensure_future(rollout.run(1))
            await until(lambda: seen("about-to-ask"))
            await asyncio.sleep(1.5)  # the request is open; its answer takes six seconds
            (gateway,) = [p for p in psutil.Process().children(recursive=True) if GATEWAY in " ".join(p.cmdline())]
            gateway.kill()
            (record,) = await running
        return record

    record: TrajectoryRecord = run(body())
    assert (record.status, record.reward) == ("completed", 1.0), record.detail
