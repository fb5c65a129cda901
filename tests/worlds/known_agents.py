"""The four agents of other projects as the tests run them: unchanged, installed by scripts/install_agents.sh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.command_agents import ANSWER_FILE, CONTENT, WriteFile

from heddle_dask.environments.agent_description import agent_named, known_agents
from heddle_dask.environments.command_agent import CommandAgent

REPOSITORY = Path(__file__).parents[2]
INSTALLED = REPOSITORY / "build" / "agents"
_FOLDERS = {
    "claude-code": INSTALLED / "npm",
    "codex": INSTALLED / "npm",
    "mini-swe-agent": INSTALLED / "python",
    "openai-agents": REPOSITORY / "tests" / "agents" / "openai_agent",
}
_PROGRAMS = {
    "claude-code": INSTALLED / "npm" / "node_modules" / ".bin" / "claude",
    "codex": INSTALLED / "npm" / "node_modules" / ".bin" / "codex",
    "mini-swe-agent": INSTALLED / "python" / "bin" / "mini",
    "openai-agents": INSTALLED / "python" / "agents",
}
EVERY = tuple(known_agents())
ANSWER = "All done."
_WRITE = f"printf {CONTENT} > {ANSWER_FILE}"
# The tools of each with which the model works, call by call.
_CALLS: dict[str, list[dict[str, Any]]] = {
    "claude-code": [{"name": "Bash", "arguments": {"command": _WRITE, "description": "Write the file"}}],
    "codex": [{"name": "exec_command", "arguments": {"cmd": _WRITE}}],
    "mini-swe-agent": [
        {"name": "bash", "arguments": {"command": _WRITE}},
        {"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}},
    ],
    "openai-agents": [{"name": "write_file", "arguments": {"path": ANSWER_FILE, "content": CONTENT}}],
}


def script_of(name: str, folder: Path) -> str:
    """A script for an emulated engine, by which the model uses the tools of an agent and then says `ANSWER`."""
    lines: list[dict[str, Any]] = [
        {"turn": turn, "content": "I use a tool.", "calls": [call]} for turn, call in enumerate(_CALLS[name])
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"content": ANSWER}])))
    return str(path)


def known_agent(name: str, *, limit_s: float = 100.0) -> CommandAgent:
    """The agent at the task of writing a file; skips the test where it is not installed."""
    if not _PROGRAMS[name].exists():
        pytest.skip(f"{name} is not installed: make build/agents/.there")
    description = agent_named(name, folder=str(_FOLDERS[name].resolve()))
    python = str((INSTALLED / "python").resolve())
    # Its packages are beside those of the project's environment, which a user's agent has in one of its own.
    environment = {**description.environment, **({} if "npm" in description.folder else {"PYTHONPATH": python})}
    tasks = WriteFile(memory="3 GiB", disk="1 GiB", folders=(python,))
    return CommandAgent(replace(description, environment=environment), tasks, limit_s=limit_s)
