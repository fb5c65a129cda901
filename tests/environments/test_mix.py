"""Sources of tasks and mixes: functions of seed and position, with shares that follow the weights."""

from __future__ import annotations

from collections import Counter

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Context, EnvironmentFailed, Task, environment_step
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.mix import (
    MixedEnvironment,
    MixedSource,
    MixPart,
    mix_of,
    mixed_environment,
    mixed_source,
    parse_mix,
    part_of,
)
from heddle_dask.environments.task_sources import EnvironmentSource, ListSource


async def solve(task: Task, ctx: Context) -> float:
    return 1.0


def environment(name: str, most: int = 1000) -> FunctionEnvironment:
    def tasks(count: int, seed: int) -> list[Task]:
        return [Task(f"t{(seed + n) % most}", "p") for n in range(min(count, most))]

    return FunctionEnvironment(solve, name=name, tasks=tasks)


def test_a_mix_by_its_text() -> None:
    assert parse_mix("math:hard") == (MixPart("math:hard", 1.0),)
    assert parse_mix("math:hard=2, code=0.5,shell") == (
        MixPart("math:hard", 2.0),
        MixPart("code", 0.5),
        MixPart("shell", 1.0),
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("replay:a=b,c.jsonl", {"replay:a=b,c.jsonl": 1}),
        ("prompts:a=2,b.jsonl", {"prompts:a=2,b.jsonl": 1}),
        ("openenv:http://h:80?sessions=16", {"openenv:http://h:80?sessions=16": 1}),
        ("math=2,openenv:http://h?sessions=16", {"math": 2, "openenv:http://h?sessions=16": 1}),
        ("openenv:http://h?sessions=16=3, math:hard", {"openenv:http://h?sessions=16": 3, "math:hard": 1}),
        ("prompts:a=b,c.jsonl=0.5,code=1,prompts:d", {"prompts:a=b,c.jsonl": 0.5, "code": 1, "prompts:d": 1}),
        ("math,prompts:lr=5e-4/x.jsonl", {"math": 1, "prompts:lr=5e-4/x.jsonl": 1}),
    ],
)
def test_paths_and_addresses_keep_their_commas_and_equals_signs(text: str, parts: dict[str, float]) -> None:
    assert parse_mix(text) == tuple(MixPart(*part) for part in parts.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("math=0,code=1", "environment 'math' has weight 0: use a finite number above 0"),
        ("math=-1,code=1", "has weight -1"),
        ("math=x", "has weight x"),
        ("math=inf,code", "has weight inf"),
        ("math=1,math=2", "'math' is there 2 times"),
        ("math,,code", "a part is empty"),
        ("math=1,nothing=1", "no environment 'nothing'"),
        ("math:easy=1,math=1", "environment 'math' is 2 times in a mix"),
    ],
)
def test_mixes_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        mixed_environment(text, load_environment)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput):
        mixed_source(text, load_environment, 0)


def test_the_same_tasks_at_the_same_positions() -> None:
    one, other = (mixed_source("math:hard=3,code=1", load_environment, 7) for _ in range(2))
    assert one.description == other.description
    # In any order, and without those before.
    backwards = [other.task(position) for position in reversed(range(300))][::-1]
    assert backwards == [one.task(position) for position in range(300)]
    names = Counter(each.environment.name for each in backwards if each)
    assert 200 < names["math:hard"] < 250 and names.total() == 300
    assert mixed_source("math:hard=3,code=1", load_environment, 8).task(0) != one.task(0)


def test_an_environment_with_few_tasks_gives_them_in_every_round() -> None:
    source = EnvironmentSource(environment("few", most=3), 0)
    drawn = [source.task(position) for position in range(7)]
    assert [each.task.task_id for each in drawn[:3]] == ["t0", "t1", "t2"]
    assert Counter(each.task.task_id for each in drawn[3:6]) == Counter(["t0", "t1", "t2"])
    hardly = EnvironmentSource(load_environment("shell"), 0)
    assert hardly.task(10_000).environment.name == "shell"


def test_a_list_ends() -> None:
    source = ListSource([Task("a", ""), Task("b", "")], environment("e"))
    assert [source.task(position) is None for position in range(4)] == [False, False, True, True]
    with pytest.raises(BadInput, match="empty"):
        ListSource([], environment("e"))
    mixed = MixedSource([(source, 1.0)], 0)
    assert mixed.task(1) is not None and mixed.task(2) is None


def test_a_mixed_environment_keeps_its_parts_apart() -> None:
    mixed = MixedEnvironment([(environment("a"), 2.0), (environment("b"), 1.0)])
    assert mixed.name == "a=2,b=1"
    tasks = mixed.tasks(30, 3)
    # Both parts have tasks of the same ids.
    assert len({task.task_id for task in tasks}) == 30
    names = Counter(part_of(mixed, task).name for task in tasks)
    shares = mix_of(mixed, tasks, samples=4)
    assert {name: share.sampled for name, share in shares.items()} == {n: 4 * c for n, c in names.items()}
    assert shares["a"].share == pytest.approx(2 / 3)
    again = MixedEnvironment([(environment("a"), 2.0), (environment("b"), 1.0)])
    assert again.tasks(30, 3) == tasks
    with pytest.raises(BadInput, match="is of no part"):
        again.part_of(Task("other", ""))
    assert mix_of(environment("a"), tasks, 1) == {}


def test_what_fails_in_a_reset_or_step_is_the_environment() -> None:
    with pytest.raises(EnvironmentFailed, match=r"^step: ValueError: broken$"), environment_step("step"):
        raise ValueError("broken")
    with pytest.raises(EnvironmentFailed, match=r"^reset took too long$"), environment_step("reset"):
        raise TimeoutError
