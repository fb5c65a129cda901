"""Prompts of any table of rows: a model answers each in one reply, or an agent works on it; a reward is given beside.

The column of the prompt is ``messages``, ``prompt``, ``question``, ``problem`` or ``instruction``; all other columns
are the payload of the task, which the reward reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import AgentTasks, chosen
from heddle_dask.environments.base import Context, Reward, Role, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.task_sets.row_files import Row, path_and_split, rows_of

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem", "instruction")
_ID_COLUMNS = ("task_id", "id", "instance_id")
_DOMAIN_COLUMNS = ("domain", "data_source")
_ROLES = ("system", "user", "assistant")


class Prompts(AgentTasks):
    """The rows of a file or folder as tasks: an environment, and tasks for an agent.

    Parameters
    ----------
    source
        A path as `row_files.rows_of` takes it.
    prompt
        Its column; empty: the first of `PROMPT_COLUMNS` that a row has.
    system
        System message before each prompt that has none.
    reply_tokens
        Maximum number of tokens of the reply; None: the limit of the run's budget.

    Raises
    ------
    BadInput
        It cannot be read, or a row has no prompt, or what is no JSON.
    """

    def __init__(self, source: str, *, prompt: str = "", system: str = "", reply_tokens: int | None = None) -> None:
        path, split = path_and_split(source)
        self._name = path.name.partition(".")[0] + (f"-{split}" if split else "")
        self._reply_tokens = reply_tokens
        rows = rows_of(source)
        self._tasks = [_task(row, number, self._name, prompt, system, source) for number, row in enumerate(rows)]

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._tasks)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return chosen(self._tasks, count, seed, self._name)

    def sandbox(self, task: Task) -> Mapping[str, Any]:
        return {}

    def instruction(self, task: Task) -> str:
        return "\n\n".join(text for _, text in _messages(task))

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> float | Reward | None:
        """Unknown: the reward that is given with the run reads the transcript."""
        return None

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        """One reply; its reward is given with the run."""
        for role, text in _messages(task):
            ctx.append(role, text)
        await ctx.generate(max_tokens=self._reply_tokens)
        return None


def _messages(task: Task) -> list[tuple[Role, str]]:
    return [(cast(Role, each["role"]), each["content"]) for each in task.payload["messages"]]


def _task(row: Row, number: int, name: str, column: str, system: str, source: str) -> Task:
    where = f"tasks {source!r}: row {number + 1}"
    chosen_column = column or next((each for each in PROMPT_COLUMNS if row.get(each)), "")
    if not row.get(chosen_column):
        told = column or ", ".join(PROMPT_COLUMNS)
        raise BadInput(f"{where} has no {told}; it has {', '.join(row)}: name the column of the prompt")
    messages = _checked_messages(row[chosen_column], f"{where}: {chosen_column}")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    payload = {key: value for key, value in row.items() if key != chosen_column and value is not None}
    try:
        json.dumps(payload)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {error}: rows are of JSON values; images and bytes are not supported") from None
    task_id = next((str(row[each]) for each in _ID_COLUMNS if row.get(each) not in (None, "")), f"{name}-{number}")
    domain = next((str(row[each]) for each in _DOMAIN_COLUMNS if row.get(each)), "")
    prompt = "\n\n".join(each["content"] for each in messages if each["role"] != "system")
    return Task(task_id, prompt, {**payload, "messages": messages}, domain=domain)


def _checked_messages(value: object, where: str) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise BadInput(f"{where} is a {type(value).__name__}: use a text, or a list of messages")
    messages = [dict(each) if isinstance(each, Mapping) else {} for each in value]
    for each in messages:
        if each.get("role") not in _ROLES or not isinstance(each.get("content"), str):
            raise BadInput(
                f"{where}: {str(each)[:80]!r} is no message: it needs a role ({', '.join(_ROLES)}) and a text"
            )
    return [{"role": each["role"], "content": each["content"]} for each in messages]
