"""Prompts of files and folders: rows as tasks, the splits of a data set, and what is said of those that are wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow
import pyarrow.parquet
import pytest

from heddle_dask.apis.rewarded import rewarded
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import AgentTasks, is_agent_tasks, load_agent_tasks
from heddle_dask.environments.base import Task
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.rewards import Transcript
from heddle_dask.environments.task_sets.prompts import Prompts

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1?", "answer": "2", "domain": "sums"},
    {"id": 7, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]},
    {"task_id": "last", "problem": "3 + 3?", "reward_model": {"ground_truth": "6"}},
]


def written(path: Path, rows: Sequence[object] = ROWS) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


class Said:
    """A context that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []

    def append(self, role: str, text: str) -> None:
        self.messages.append((role, text))

    async def generate(self, max_tokens: int | None) -> None:
        self.messages.append(("assistant", f"{max_tokens}"))


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz"])
def test_rows_are_tasks(name: str, tmp_path: Path) -> None:
    loaded = load_agent_tasks(str(written(tmp_path / name)))
    assert is_agent_tasks(loaded) and (loaded.name, loaded.size) == ("sums", 3)
    first, second, third = loaded.tasks(3, 0)
    assert (first.task_id, first.prompt, first.domain) == ("sums-0", "1 + 1?", "sums")
    assert (second.task_id, third.task_id) == ("7", "last")
    assert first.payload["answer"] == "2" and third.payload["reward_model"] == {"ground_truth": "6"}
    assert loaded.instruction(second) == "Be brief.\n\n2 + 2?" and loaded.sandbox(first) == {}
    # A seed draws an order, of which fewer tasks are the beginning.
    drawn = [[task.task_id for task in loaded.tasks(count, 5)] for count in (2, 3)]
    assert drawn[1][:2] == drawn[0] and sorted(drawn[1]) == ["7", "last", "sums-0"]


def test_a_model_answers_in_one_reply(tmp_path: Path) -> None:
    env = load_environment(f"prompts:{written(tmp_path / 'sums.jsonl')}", options={"system": "Sum.", "reply_tokens": 9})
    for task, told in zip(env.tasks(2, 0), ("Sum.", "Be brief."), strict=True):
        ctx = Said()
        assert asyncio.run(env.solve(task, ctx)) is None  # type: ignore[arg-type]
        assert ctx.messages == [("system", told), ("user", task.prompt), ("assistant", "9")]


def test_folders_of_the_package_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i} + {i}?", "answer": 2 * i} for i in range(20)]
    made = datasets.Dataset.from_list(rows).shuffle(seed=1)
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict({"train": made, "test": made.select(range(4))}).save_to_disk(str(tmp_path / "two"))
    wanted = [(row["prompt"], row["answer"]) for row in made]
    for text, count in (("one", 20), ("two:train", 20), ("two:test", 4)):
        loaded = load_agent_tasks(str(tmp_path / text))
        tasks = loaded.tasks(count, 0)
        assert loaded.size == count
        assert [(task.prompt, task.payload["answer"]) for task in tasks] == wanted[:count]
    with pytest.raises(BadInput, match="has the splits train, test: name one"):
        load_agent_tasks(str(tmp_path / "two"))
    with pytest.raises(BadInput, match="no split 'dev'"):
        load_agent_tasks(f"{tmp_path / 'two'}:dev")


def test_published_folders_have_their_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        table = pyarrow.Table.from_pylist([{"question": f"{name}?", "level": number}])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("about")
    tasks = Prompts(f"{tmp_path}:train").tasks(2, 0)
    assert [task.payload["level"] for task in tasks] == [0, 1]
    assert Prompts(f"{tmp_path}:test", prompt="question").name == f"{tmp_path.name}-test"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "hello"}], "row 1 has no messages, prompt, .* it has text: name the column"),
        (["hello"], "row 1 is a str: use a JSON object"),
        ([{"prompt": 3}], "prompt is a int: use a text, or a list of messages"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "needs a role .* and a text"),
        ([], "it has no rows"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(rows: Sequence[object], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said) as told:
        load_agent_tasks(str(written(tmp_path / "rows.jsonl", rows)))
    assert "\n" not in str(told.value)


def test_paths_and_names_that_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="line 2 is no JSON"):
        load_agent_tasks(str(tmp_path / "broken.jsonl"))
    with pytest.raises(BadInput, match="no rows there"):
        load_agent_tasks(str(tmp_path / "empty"))
    with pytest.raises(BadInput, match="there is no such path; allowed are"):
        load_agent_tasks("missing")
    with pytest.raises(BadInput, match="has 3 tasks, and 4 are asked for"):
        load_agent_tasks(str(written(tmp_path / "sums.jsonl"))).tasks(4, 0)
    with pytest.raises(BadInput, match="unexpected keyword argument 'colour'"):
        load_agent_tasks(str(tmp_path / "sums.jsonl"), options={"colour": 1})
    with pytest.raises(BadInput, match="a module lacks name, tasks, sandbox"):
        load_agent_tasks("os:path")


OWN = """
from heddle_dask.environments.agent_tasks import AgentTasks
from heddle_dask.environments.base import Task

class Mine(AgentTasks):
    name = "mine"
    def tasks(self, count, seed):
        return [Task(f"{i}", "Do it.") for i in range(count)]
    def sandbox(self, task):
        return {"files": {"a": "b"}}
    async def verify(self, task, sandbox, ctx):
        return 1.0

def long(task, transcript):
    return float(len(transcript.text))
"""


def test_a_file_of_python_has_tasks_and_rewards(tmp_path: Path) -> None:
    path = tmp_path / "my tasks.py"
    path.write_text(OWN)
    loaded: AgentTasks = load_agent_tasks(f"{path}:Mine")
    (task,) = loaded.tasks(1, 0)
    assert (loaded.size, loaded.limit_s(task), loaded.instruction(task)) == (None, None, "Do it.")
    with pytest.raises(BadInput, match="has no solution of its author"):
        asyncio.run(loaded.run_reference(task, None))  # type: ignore[arg-type]
    env = rewarded(Prompts(str(written(tmp_path / "sums.jsonl"))), f"{path}:long")
    # A worker cannot import the file.
    sent = cloudpickle.dumps(env._reward.function)  # type: ignore[attr-defined]
    assert (
        b"len" in sent and cloudpickle.loads(sent)(Task("t", ""), Transcript("t", "t", 0, "completed", (), "ab")) == 2
    )
    with pytest.raises(BadInput, match="has no 'wide'"):
        rewarded(env, f"{path}:wide")
    (tmp_path / "broken.py").write_text("raise RuntimeError('two\\nlines')")
    with pytest.raises(BadInput, match=r"importing '.*broken.py' failed: RuntimeError: two lines"):
        rewarded(env, f"{tmp_path}/broken.py:f")
