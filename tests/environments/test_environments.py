"""Environment programs against scripted models: rewards, held-out splits, repairs, bounds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.chat.tool_calls import MalformedCall, ToolCall, format_call, parse_calls
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import CUT, ActionFailed, Environment, Reply, Task
from heddle_dask.environments.code_env import CodeEnvironment, rules_of, stages_of
from heddle_dask.environments.corpus import Bm25, build_world, search_world
from heddle_dask.environments.list_programs import run_stages
from heddle_dask.environments.math_env import MathEnvironment, read_answer
from heddle_dask.environments.search_env import SearchEnvironment
from heddle_dask.environments.splits import split_of
from heddle_dask.environments.tool_agent import LoopLimits

CUT_MARK = "[cut]"
"""Ends the text of a reply that its limit has cut."""
ENVIRONMENTS = [MathEnvironment, CodeEnvironment, SearchEnvironment]
TIERS = ["easy", "hard"]


class Script:
    """A context whose model says the given lines in turn; tools are really run."""

    max_context_tokens = 4096
    context_tokens = 0
    seed = 0

    def __init__(self, *replies: str, steps_allowed: int = 99, broken: str = "") -> None:
        self.replies = list(replies)
        self.steps_allowed = steps_allowed
        self.broken = broken
        self.messages: list[tuple[str, str]] = []
        self.kinds: list[str] = []
        self.metadata: dict[str, Any] = {}
        self.steps = 0

    @property
    def done(self) -> bool:
        return self.steps >= self.steps_allowed

    def append(self, role: str, text: str) -> None:
        self.messages.append((role, text))

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        raise NotImplementedError

    async def generate(self, **options: Any) -> Reply:
        self.steps += 1
        text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.messages.append(("assistant", text))
        cut = text.removesuffix(CUT_MARK)
        return Reply(cut, (), (), "stop" if cut == text else "length")

    async def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        kind = options.get("kind", "tool")
        self.kinds.append(kind)
        if self.broken == kind:
            raise ActionFailed("lost", "the worker died")
        value = function(*args)
        return await value if hasattr(value, "__await__") else value

    def tool_texts(self) -> list[str]:
        return [text for role, text in self.messages if role == "tool"]


def solve(environment: Environment, task: Task, context: Script) -> float | None:
    return asyncio.run(environment.solve(task, context))


def python(code: str) -> str:
    return format_call("python", {"code": code})


# Tool calls.


@given(st.text(min_size=1), st.dictionaries(st.text(), st.text()))
def test_formatted_call_is_read_back(name: str, arguments: dict[str, str]) -> None:
    text = "some thought\n" + format_call(name, arguments)
    if "tool_call>" not in name + "".join([*arguments, *arguments.values()]):
        assert parse_calls(text) == [ToolCall(name, arguments)]


@given(st.text())
def test_reading_calls_never_raises(text: str) -> None:
    for call in parse_calls(text + "<tool_call>" + text + "</tool_call>" + text):
        assert isinstance(call, ToolCall | MalformedCall)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "python"}', "without </tool_call>"),
        ('<tool_call>{"name": "python"</tool_call>', "not JSON"),
        ("<tool_call>[1]</tool_call>", "not an object"),
        ("<tool_call>{}</tool_call>", '"name"'),
        ('<tool_call>{"name": "p", "arguments": 3}</tool_call>', '"arguments"'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_malformed_call_says_what_is_wrong(text: str, reason: str) -> None:
    (call,) = parse_calls(text)
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    assert "\n" not in call.reason


def test_several_calls_and_bare_line_breaks_are_read() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"code": "x\ny"}}</tool_call> and ' + format_call("b", {})
    assert parse_calls(text) == [ToolCall("a", {"code": "x\ny"}), ToolCall("b", {})]


def test_arguments_as_text_are_read() -> None:
    text = '<tool_call>{"name": "a", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>'
    assert parse_calls(text) == [ToolCall("a", {"code": "1"})]


def test_a_lone_surrogate_in_the_arguments_is_an_escape() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"\\udc80": ["\\ud800", 1, {"x": "é"}]}}</tool_call>'
    assert parse_calls(text) == [ToolCall("a", {"\\udc80": ["\\ud800", 1, {"x": "é"}]})]


# Tasks.


@pytest.mark.parametrize("make", ENVIRONMENTS)
@pytest.mark.parametrize("tier", TIERS)
def test_tasks_are_different_and_follow_the_seed(make: Any, tier: str) -> None:
    environment = make(tier=tier)
    tasks = environment.tasks(40, 3)
    assert environment.tasks(40, 3) == tasks
    assert environment.tasks(40, 4) != tasks
    assert len({task.task_id for task in tasks}) == len({task.prompt for task in tasks}) == 40
    for task in tasks:
        assert json.loads(json.dumps(task.payload)) == task.payload


@pytest.mark.parametrize("make", ENVIRONMENTS)
@pytest.mark.parametrize("tier", TIERS)
def test_test_tasks_cannot_occur_in_training(make: Any, tier: str) -> None:
    for split in ("train", "test"):
        for task in make(tier=tier, split=split).tasks(80, 0):
            assert split_of(rules_of(task) if make is CodeEnvironment else task.prompt) == split


@pytest.mark.parametrize("tier", TIERS)
def test_no_rules_of_a_code_test_task_occur_in_training(tier: Any) -> None:
    train, test = (
        {json.dumps(task.payload["stages"]) for task in CodeEnvironment(tier, split).tasks(100, 0)}
        for split in ("train", "test")
    )
    assert not train & test


def test_search_splits_have_worlds_of_their_own() -> None:
    worlds = [
        {task.payload["world"] for task in SearchEnvironment("easy", split).tasks(200, 0)}
        for split in ("train", "test")
    ]
    assert not worlds[0] & worlds[1]


def test_tasks_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from heddle_dask.environments.math_env import MathEnvironment as M\n"
        "from heddle_dask.environments.code_env import CodeEnvironment as C\n"
        "from heddle_dask.environments.search_env import SearchEnvironment as S\n"
        "for make in (M, C, S):\n"
        "    for tier in ('easy', 'hard'):\n"
        "        print(make(tier).tasks(20, 7))\n"
        "from heddle_dask.environments.corpus import search_world\n"
        "print(search_world('mayor of the town', 2, 5))\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


@pytest.mark.parametrize("make", ENVIRONMENTS)
def test_unknown_tier_and_split_are_refused(make: Any) -> None:
    with pytest.raises(BadInput, match="easy or hard"):
        make(tier="medium")
    with pytest.raises(BadInput, match="train or test"):
        make(split="validation")
    with pytest.raises(BadInput, match="negative"):
        make().tasks(-1, 0)


def test_too_many_tasks_are_refused() -> None:
    from heddle_dask.environments.splits import draw_tasks

    with pytest.raises(BadInput, match="only"):
        draw_tasks(lambda rng: Task("t", "the one problem"), 5, seed=0, split="train")


def test_names_tell_the_tier() -> None:
    names = [make(tier=tier).name for make in ENVIRONMENTS for tier in TIERS]
    assert names == ["math", "math:hard", "code", "code:hard", "search", "search:hard"]


# Math.


def test_math_in_one_call_scores() -> None:
    environment = MathEnvironment()
    task = environment.tasks(1, 0)[0]
    answer = task.payload["answer"]
    context = Script(python(f"print({answer})"), f"Answer: {answer}")
    assert solve(environment, task, context) == 1.0
    assert context.tool_texts() == [str(answer)]


def test_wrong_number_scores_zero() -> None:
    environment = MathEnvironment()
    task = environment.tasks(1, 0)[0]
    assert solve(environment, task, Script(f"Answer: {task.payload['answer'] + 1}")) == 0.0


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Answer: 12", 12),
        ("Answer: -1,234.5", -1234.5),
        ("Answer: 3\nNo.\nAnswer: 4", 4),
        ("answer: **42**", 42),
        ("Answer: $\\boxed{42}$", 42),
        ("12", None),
        ("Answer: ,", None),
        ("Answer: .", None),
    ],
)
def test_answer_is_read_from_the_last_line_that_gives_one(reply: str, value: float | None) -> None:
    assert read_answer(reply) == value


def test_what_goes_wrong_in_a_call_comes_back_as_text() -> None:
    environment = MathEnvironment()
    task = environment.tasks(1, 0)[0]
    context = Script(
        "<tool_call>nonsense</tool_call>",
        format_call("fly", {}),
        format_call("python", {"text": "1"}),
        python("print(1/0)"),
        python("x = 1"),
        "I am not sure.",
        f"Answer: {task.payload['answer']}",
    )
    assert solve(environment, task, context) == 1.0
    texts = context.tool_texts()
    assert "not JSON" in texts[0]
    assert "no tool 'fly'" in texts[1]
    assert '"code"' in texts[2]
    assert "ZeroDivisionError" in texts[3]
    assert "no output" in texts[4]
    assert context.messages[-2] == ("user", 'Call the tool or reply "Answer: NUMBER".')


def test_lost_tool_comes_back_as_text() -> None:
    environment = MathEnvironment()
    task = environment.tasks(1, 0)[0]
    context = Script(python("print(1)"), "Answer: 0", broken="tool")
    solve(environment, task, context)
    assert context.tool_texts() == ["error: python failed: the worker died"]


def test_long_tool_text_keeps_its_end() -> None:
    environment = MathEnvironment(limits=LoopLimits(tool_text_chars=50))
    task = environment.tasks(1, 0)[0]
    context = Script(python("print('x' * 1000 + 'end')"), "Answer: 0")
    solve(environment, task, context)
    (text,) = context.tool_texts()
    assert text.endswith("xend")
    assert len(text) < 70


@pytest.mark.parametrize("make", ENVIRONMENTS)
def test_endless_talk_is_bounded_and_scores_zero(make: Any) -> None:
    environment = make(limits=LoopLimits(max_steps=5))
    context = Script("Let me think.")
    assert solve(environment, environment.tasks(1, 0)[0], context) == 0.0
    assert context.steps == 5


@pytest.mark.parametrize("make", ENVIRONMENTS)
def test_agent_stops_when_the_context_is_done(make: Any) -> None:
    environment = make()
    context = Script("Let me think.", steps_allowed=3)
    assert solve(environment, environment.tasks(1, 0)[0], context) == 0.0
    assert context.steps == 3


def test_calls_of_one_reply_are_bounded() -> None:
    environment = MathEnvironment(limits=LoopLimits(calls_per_reply=2))
    context = Script(python("print(5)") * 3, "Answer: 0")
    solve(environment, environment.tasks(1, 0)[0], context)
    assert context.tool_texts() == ["5", "5", "error: at most 2 calls per reply"]


def search_with(*replies: str, **limits: int) -> tuple[float | None, Script]:
    environment = SearchEnvironment(limits=LoopLimits(**limits))
    task = environment.tasks(1, 3)[0]
    context = Script(*(reply.replace("RIGHT", task.payload["answer"]) for reply in replies))
    return solve(environment, task, context), context


def test_nothing_of_a_cut_reply_counts() -> None:
    call = format_call("search", {"query": "mayor"})
    reward, context = search_with(call + "and" + CUT_MARK, "Answer: RIGHT" + CUT_MARK, "Answer: nobody")
    assert reward == 0.0 and context.kinds == []
    assert [text for role, text in context.messages if role == "user"][1:] == [CUT, CUT]


def test_the_thinking_is_neither_searched_for_calls_nor_graded() -> None:
    call = format_call("search", {"query": "mayor"})
    reward, context = search_with(f"maybe {call} or Answer: RIGHT\n</think>\nI do not know.", "Answer: nobody")
    assert reward == 0.0 and context.kinds == []
    reward, context = search_with(f"<think>hm {call}</think>\n{call}", "<think>\nEasy.\n</think>\n\nAnswer: RIGHT")
    assert reward == 1.0 and context.kinds == ["tool"]


@pytest.mark.parametrize(
    "reply", [format_call("browse", {}), "<tool_call>nonsense</tool_call>", "Let me think.", "Answer: RIGHT" + CUT_MARK]
)
def test_replies_of_which_nothing_is_usable_end_the_trajectory(reply: str) -> None:
    reward, context = search_with(reply)
    assert (reward, context.steps) == (0.0, 8)
    assert "8 replies in a row" in context.metadata["no_progress"]
    usable = format_call("search", {"query": "mayor"})
    _, context = search_with(reply, usable, reply, reply, useless_replies=2)
    assert context.steps == 4, "a call that ran begins a new count"


# Code.


def test_code_is_graded_by_hidden_tests_as_a_reward_action() -> None:
    environment = CodeEnvironment()
    task = environment.tasks(1, 0)[0]
    body = "".join(f"    xs = {stage.python}\n" for stage in stages_of(task))
    right = f"def f(xs):\n{body}    return xs\n"
    context = Script(python(right + "print('tried')"), "Done.")
    assert solve(environment, task, context) == 1.0
    assert context.kinds == ["tool", "reward"]
    block = Script(python("print('first')"), f"Done:\n```python\n{right}```")
    assert solve(environment, task, block) == 1.0
    wrong = Script(python("def f(xs):\n    return 'nothing'"), "Done.")
    assert solve(environment, task, wrong) == 0.0


def test_code_reward_is_unknown_when_the_tests_could_not_run() -> None:
    environment = CodeEnvironment()
    task = environment.tasks(1, 0)[0]
    context = Script(python("print(1)"), "Done.", broken="reward")
    assert solve(environment, task, context) is None


def test_code_without_any_code_scores_zero() -> None:
    environment = CodeEnvironment()
    context = Script("Done.")
    assert solve(environment, environment.tasks(1, 0)[0], context) == 0.0
    assert context.kinds == []


def test_words_python_and_function_of_a_rule_agree() -> None:
    for tier in TIERS:
        for task in CodeEnvironment(tier).tasks(40, 1):  # type: ignore[arg-type]
            stages = stages_of(task)
            for (xs,), expected in task.payload["cases"]:
                value = xs
                for stage in stages:
                    value = eval(stage.python, {"xs": value})
                assert value == expected == run_stages(stages, xs)
            assert all(stage.words in task.prompt for stage in stages)


# Search.


def test_search_follows_the_path() -> None:
    environment = SearchEnvironment()
    for task in environment.tasks(20, 0):
        pages = build_world(task.payload["world"]).pages
        place = task.payload["start"]
        for relation in task.payload["path"]:
            found = search_world(f"{relation} of {place}", task.payload["world"], 2)
            assert pages[place].text in found
            place = pages[place].relations[relation]
        assert place == task.payload["answer"]
        context = Script(format_call("search", {"query": place}), f"Answer: {place}.")
        assert solve(environment, task, context) == 1.0


def test_search_that_finds_nothing_says_so() -> None:
    environment = SearchEnvironment()
    context = Script(
        format_call("search", {"query": "zzzz"}),
        format_call("search", {"query": ""}),
        "Answer: nobody",
    )
    assert solve(environment, environment.tasks(1, 0)[0], context) == 0.0
    assert context.tool_texts() == ["nothing found", "nothing found"]


@given(st.text(max_size=80))
def test_any_query_is_answered(query: str) -> None:
    texts = {page.text for page in build_world(0).pages.values()}
    assert set(search_world(query, 0, 3)) <= texts


def test_a_search_ranks_by_rare_words_in_short_texts() -> None:
    """The scores of bm25s 0.3 (method lucene, k1 1.5, b 0.75) for these texts, by which worlds were searched before."""
    texts = [
        "Oskel: river Drin. The mayor of Oskel is Brin Talo.",
        "Brin Talo: home town Oskel.",
        "Drin: port Oskel, length 40 km.",
        "Drin Drin",
        "Talo Works: founder Brin Talo, seat Oskel, product bells",
    ]
    index = Bm25(texts)
    scores = {0: 0.661427, 1: 0.122688, 2: 0.113315, 4: 0.092185}
    assert index.scores("mayor of oskel") == pytest.approx(scores, abs=1e-6)
    assert index.best("mayor of oskel", 9) == [0, 1, 2, 4]
    assert index.best("Drin", 2) == [3, 2]
    assert index.best("the of a", 3) == index.best("", 3) == []
