"""Agents that are short scripts, and tasks for them: a file is to be written into the work directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle_dask.environments.agent_description import AgentDescription
from heddle_dask.environments.agent_tasks import AgentTasks
from heddle_dask.environments.base import ActionFailed, Context, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox

CONTENT = "hello"
ANSWER_FILE = "answer.txt"


class WriteFile(AgentTasks):
    """The reward is 1 if the file is there, as it was asked for.

    Parameters
    ----------
    sandbox
        Arguments of `Context.sandbox`.
    """

    name = "write-file"

    def __init__(self, limit_s: float | None = None, **sandbox: Any) -> None:
        self._limit_s = limit_s
        self._sandbox = {"memory": "128 MiB", **sandbox}

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        prompt = f"Create the file {ANSWER_FILE} in this directory. Its whole content is: {CONTENT}"
        return [Task(f"write-{number}", prompt) for number in range(count)]

    def sandbox(self, task: Task) -> Mapping[str, Any]:
        return self._sandbox

    def limit_s(self, task: Task) -> float | None:
        return self._limit_s

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> float:
        try:
            return float((await sandbox.get(ANSWER_FILE)).decode().strip() == CONTENT)
        except ActionFailed:
            return 0.0


_ASK = """
import json, os, sys, urllib.request
def ask(*contents, tokens=8):
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": tokens}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked, timeout=100))["choices"][0]["message"]["content"] or ""
"""


def script(text: str, name: str, **description: Any) -> AgentDescription:
    """An agent that is a Python script; `ask(text, …)` asks the model."""
    command = ("python3", "-c", _ASK + text, "{instruction}")
    return AgentDescription(name, command, memory="64 MiB", **description)
