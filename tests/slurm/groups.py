"""Cluster files of the lab, and agents whose steps last long enough for something to happen meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.lab import Lab
from worlds.journal_records import read_journal

REPOSITORY = Path(__file__).parents[2]
# Questions every second: a real cluster asks every 30 s.
SHARED = """
logs = "{logs}"
scratch = "{scratch}"
poll = "1s"
interface = "lo"
stage-weights = true
"""
GROUP = {
    "gpu": 'role = "rollout"\npartition = "gpu"\ngres = "gpu:1"\ncpus = 2\nwalltime = "30min"\ndrain = "20s"\n'
    'start-timeout = "60s"\n',
    "cpu": 'role = "tool"\npartition = "cpu"\ncpus = 4\nwalltime = "30min"\ndrain = "20s"\n',
}
AGENTS = '''
"""Steps of `TOKENS` tokens with a tool call after each; or, in the first task, an agent in a sandbox asks for them."""
import asyncio, os
from heddle_dask.environments.base import Task

STEPS, TOKENS = int(os.environ.get("STEPS", 3)), int(os.environ.get("TOKENS", 100))

def tasks(count, seed):
    return [Task(f"t{i}", f"Task number {i}.", max_steps=STEPS) for i in range(count)]

async def where_am_i():
    await asyncio.sleep(0.05)
    return os.environ.get("SLURM_JOB_NAME", "nowhere")


AGENT_S = float(os.environ.get("AGENT_S", 0))
AGENT = """
import json, os, sys, time, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url, until, messages = os.environ["OPENAI_BASE_URL"] + "/chat/completions", time.time() + float(sys.argv[1]), []
while time.time() < until:
    messages.append({"role": "user", "content": "and now?"})
    body = json.dumps({"model": "any", "max_tokens": 40, "messages": messages}).encode()
    # No time limit and no second try: the request is open until its step has ended, wherever that runs.
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
print(len(messages) // 2)
"""


async def agent_of_its_own(ctx):
    gate = await ctx.gateway()
    async with ctx.sandbox(files={"agent.py": AGENT}, gateway=gate) as box:
        settings = " ".join(f"{name}={value}" for name, value in gate.environment.items())
        done = await box.exec(f"{settings} python3 agent.py {AGENT_S}", cpus=0, timeout_s=600)
    assert done.exit_code == 0, done.stderr
    ctx.metadata["answered"] = int(done.stdout)
    return 1.0


async def solve(task, ctx):
    if AGENT_S and task.task_id == "t0":
        return await agent_of_its_own(ctx)
    ctx.append("user", task.prompt)
    jobs = []
    for step in range(STEPS):
        await ctx.generate(max_tokens=TOKENS, ignore_eos=True)
        jobs.append(await ctx.call(where_am_i))
        ctx.append("tool", jobs[-1])
    ctx.metadata["jobs"] = jobs
    return 1.0
'''


@dataclass(frozen=True)
class Background:
    """A rollout that goes on while other tests run."""

    lab: Lab
    process: subprocess.Popen[str]
    directory: Path


def write_cluster_file(directory: Path, *tables: str, scratch: Path | None = None, **groups: str) -> Path:
    """Write ``slurm.toml``: the lab's groups `gpu` and `cpu`, each with more lines, or groups of one's own.

    Users of sandboxes pass through `scratch`, where there are any.
    """
    chosen = groups or {"gpu": "", "cpu": ""}
    text = SHARED.format(logs=directory / "logs", scratch=scratch or directory / "scratch")
    for name, lines in chosen.items():
        text += f"\n[groups.{name}]\n{GROUP.get(name, '')}{lines}\n"
    path = directory / "slurm.toml"
    path.write_text(text + "\n".join(tables))
    return path


def write_agents(directory: Path, seconds_per_token: float = 0.02) -> None:
    """Write the module `agents` and the engines' cost."""
    (directory / "agents.py").write_text(AGENTS)
    (directory / "cost.toml").write_text(f"seconds_per_token = {seconds_per_token}\n")


def rollout_command(out: str, *options: str) -> list[str]:
    """`heddle rollout` on the groups of ``slurm.toml``, with emulated engines; to be run where these files are."""
    return [
        *(sys.executable, "-c", "from heddle_dask.cli.main import main; main()"),
        *("rollout", "--json", "--env", "agents:solve", "--no-dashboard"),
        *("--engine", "emulated", "--cost", "cost.toml", "--slots", "4", "--cluster", "slurm.toml"),
        *options,
        *("--out", out),
    ]


def start(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a rollout; its notes are in ``notes.txt``."""
    with (directory / "notes.txt").open("a") as notes:
        return subprocess.Popen(
            rollout_command("run.zarr", *options),
            cwd=directory,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{directory}", **environment},
            stdout=subprocess.PIPE,
            stderr=notes,
            text=True,
        )


def summary_of(process: subprocess.Popen[str], directory: Path) -> dict[str, Any]:
    """What the rollout says at its end."""
    out, _ = process.communicate()
    notes = (directory / "notes.txt").read_text()
    assert process.returncode == 0, notes
    return dict(json.loads(out.splitlines()[-1]))


def journal_kinds(directory: Path) -> list[str]:
    """The kinds of the records so far; none before the journal is there."""
    path = directory / "run.journal"
    return [kind for kind, _ in read_journal(path)] if path.exists() and path.stat().st_size else []
