"""The identity of a prompt."""

from __future__ import annotations

from heddle_dask.environments.base import Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.splits import prompt_key
from heddle_dask.live.driver.programs.attempts import attempts_of, group_attempts


async def solve(task: object, ctx: object) -> float:
    return 0.0


def test_the_id_of_a_task_that_asks_the_same_does_not_count() -> None:
    one = Task("a-1", "What is 1+1?", {"answer": 2}, group="g")
    assert prompt_key("math", one) == prompt_key("math", Task("b-2", "What is 1+1?", {"answer": 2}))
    others = [Task("a-1", "What is 1+2?", {"answer": 2}), Task("a-1", "What is 1+1?", {"answer": 3})]
    keys = {prompt_key("math", each) for each in (one, *others)} | {prompt_key("search", one)}
    assert len(keys) == 4


def test_a_task_without_prompt_and_payload_is_known_by_its_name() -> None:
    assert prompt_key("e", Task("a", "")) != prompt_key("e", Task("b", ""))
    assert prompt_key("e", Task("a", "", group="g")) == prompt_key("e", Task("b", "", group="g"))
    assert prompt_key("e", Task("a", "\ud800")), "a lone surrogate is text too"


def test_the_key_is_the_same_in_every_process() -> None:
    assert prompt_key("math", Task("a", "1+1", {"answer": 2})) == "36cb7c1224e747420010ecba"


def test_attempts_of_later_epochs_have_the_key_and_other_groups() -> None:
    environment = FunctionEnvironment(solve, name="e")  # type: ignore[arg-type]
    task = Task("t", "1+1")
    (first,) = attempts_of(environment, [task], 1, 0, "")
    (later,) = group_attempts(environment, task, "group-7", 1, 0)
    assert first.spec.prompt_key == later.spec.prompt_key != ""
    assert first.spec.group_id != later.spec.group_id


def test_what_cannot_be_encoded_in_a_task_is_an_escape() -> None:
    """A task named after a file whose name is no UTF-8."""
    task = Task("r\udce9sum\udce9", "read r\udce9sum\udce9", group="\ud800")
    (attempt,) = attempts_of(FunctionEnvironment(solve, name="e"), [task], 1, 0, "")  # type: ignore[arg-type]
    assert attempt.name == "r\\udce9sum\\udce9/0" and task.prompt == "read r\\udce9sum\\udce9"
    assert attempt.spec.group_id == "\\ud800"
    assert Task("résumé", "日本").task_id == "résumé"
