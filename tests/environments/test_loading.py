"""Every form of ``--env`` loads, and everything wrong with one is named in one line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.gymnasium_adapter import GymnasiumEnvironment
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.replay import ReplayEnvironment

MODULE = """
import gymnasium
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task

async def solve(task, ctx):
    return 0.25

def tasks(count, seed):
    return [Task(f"t{seed}-{i}", "p") for i in range(count)]

class Mine:
    name = "mine"
    def __init__(self, size=1):
        self.size = size
    def tasks(self, count, seed):
        return []
    async def solve(self, task, ctx):
        return None

ready = Mine(7)
class nested:
    factory = Mine

def lake(size="4x4"):
    return gymnasium.make("FrozenLake-v1", map_name=size)

number = 3
def returns_number():
    return 3
def breaks():
    raise RuntimeError("two\\nlines")
def refuses():
    raise BadInput("own words")
def needs(argument):
    return None
def gives_coroutine():
    return solve(None, None)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_bad.py").write_text("import heddle_dask\n1 / 0\n")
    (tmp_path / f"{name}_lacks.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_coroutine_function_is_an_environment(module: str) -> None:
    environment = load_environment(f"{module}:solve")
    assert isinstance(environment, FunctionEnvironment)
    assert environment.name == f"{module}:solve"
    assert [task.task_id for task in environment.tasks(2, seed=5)] == ["t5-0", "t5-1"]
    nothing: Any = None
    assert asyncio.run(environment.solve(Task("t", ""), nothing)) == 0.25


def test_function_without_tasks_gets_numbered_ones() -> None:
    async def solve(task: Task, ctx: Any) -> None: ...

    tasks = FunctionEnvironment(solve, name="x").tasks(2, seed=1)
    assert [(task.task_id, task.prompt) for task in tasks] == [("x-1-0", ""), ("x-1-1", "")]


def test_factory_class_instance_and_nested_names_load(module: str) -> None:
    assert load_environment(f"{module}:Mine", options={"size": 4}).size == 4  # type: ignore[attr-defined]
    assert load_environment(f"{module}:ready").size == 7  # type: ignore[attr-defined]
    assert load_environment(f"{module}:nested.factory").name == "mine"


def test_gymnasium_factory_is_wrapped(module: str) -> None:
    environment = load_environment(f"{module}:lake", options={"size": "8x8"})
    assert isinstance(environment, GymnasiumEnvironment)
    assert environment.name == f"{module}:lake"


@pytest.mark.parametrize("spec", ["math", "code:hard", "search:easy"])
def test_built_in_names_load(spec: str) -> None:
    environment = load_environment(spec)
    assert len(environment.tasks(2, seed=0)) == 2


def test_replay_loads_with_its_options(tmp_path: Path) -> None:
    step = {"gen_tokens": 1, "obs_tokens": 0, "tool": None, "tool_s": None}
    body = {"id": "a", "group": "g", "prompt_tokens": 1, "complete": True, "steps": [step]}
    (tmp_path / "x.jsonl").write_text(json.dumps(body))
    environment = load_environment(f"replay:{tmp_path}/x.jsonl", options={"token_scale": 0.5})
    assert isinstance(environment, ReplayEnvironment)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("maths", {}, r"no environment 'maths'; allowed are math\[:tier\]\[:split\], code"),
        ("", {}, "no environment ''; allowed are"),
        (
            "math:medium",
            {},
            "no tier or split 'medium'; allowed are one tier .easy, hard. and one split .train, test.",
        ),
        ("math:", {}, "no tier or split ''"),
        ("math:train:test", {}, "no tier or split 'test'"),
        ("math", {"size": 1}, "has no option 'size'; it takes none"),
        ("replay", {}, "name the trace, as in replay:"),
        ("replay:", {}, "name the trace, as in replay:"),
        ("replay:none.jsonl", {}, "No such file"),
        ("replay:x", {"speed": 1}, "no option 'speed'; allowed are token_scale, tool_scale"),
        ("no_such_package.module:solve", {}, "no module 'no_such_package' on the import path"),
        ("{module}:absent", {}, "has no 'absent'"),
        ("{module}:", {}, "has no ''"),
        ("{module}:number", {}, "a int is neither a coroutine function"),
        ("{module}:returns_number", {}, "returned a int"),
        ("{module}:gives_coroutine", {}, "returned a coroutine"),
        ("{module}:breaks", {}, "RuntimeError: two lines"),
        ("{module}:refuses", {}, "own words"),
        ("{module}:needs", {}, "TypeError: .*argument"),
        ("{module}:solve", {"size": 1}, "has no option 'size'"),
        ("{module}_bad:solve", {}, "importing .* failed: ZeroDivisionError"),
        ("{module}_lacks:solve", {}, "No module named 'no_such_library_at_all'"),
        (".relative:solve", {}, "importing '.relative' failed: TypeError"),
        (":solve", {}, "ValueError: Empty module name"),
    ],
)
def test_everything_wrong_is_one_line(module: str, spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        load_environment(spec.replace("{module}", module), options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["math", "code", "search"])
def test_tier_and_split_are_selected_by_name(kind: str) -> None:
    chosen = {
        "": ("easy", "test"),
        ":train": ("easy", "train"),
        ":hard:train": ("hard", "train"),
        ":train:hard": ("hard", "train"),
    }
    for words, expected in chosen.items():
        environment: Any = load_environment(kind + words)
        assert (environment.tier, environment.split) == expected
        assert load_environment(environment.name) == environment


def test_an_environment_of_verifiers_needs_its_package() -> None:
    with pytest.raises(BadInput, match=r"'verifiers:gsm8k' needs verifiers 0.4 .* pip install 'verifiers>=0.4"):
        load_environment("verifiers:gsm8k")
    with pytest.raises(BadInput, match="say what behind the colon, as in verifiers:"):
        load_environment("verifiers:")
