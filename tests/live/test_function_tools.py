"""Functions as tools: their schemas, the calls of a reply as actions side by side, and an agent of nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from worlds.scripted_plane import ScriptedPlane, context_on, sampled

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.chat.tool_calls import MalformedCall, ToolCall, format_call
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.contract import ReplyReading
from heddle_dask.environments.base import CUT, Reply, Task
from heddle_dask.environments.function_tools import ToolAgent
from heddle_dask.environments.tool_schema import arguments_for, schema_of
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.programs.context import NO_TOOLS_SHOWN, LiveContext
from heddle_dask.live.driver.runs.shown_progress import ShownProgress
from heddle_dask.live.wire.messages import ActionOutcome
from heddle_dask.live.wire.result_codec import step_from_body

SHOWS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: The first number.
        second: The second number.
    """
    return first + second


def search(query: str, label: str = "web") -> dict[str, list[str]]:
    """Search for pages.

    Args:
        query: What to search for.
        label: Where to search.
    """
    return {label: [query.upper()]}


def says(*texts: str, reason: str = "stop") -> list[Callable[..., Any]]:
    return [sampled(*text.encode(), reason=reason) for text in texts]


@pytest.fixture
def template(model_dir: str, tmp_path: Path) -> ChatTemplate:
    """A model whose template shows tools."""
    folder = shutil.copytree(model_dir, tmp_path / "model")
    chat = ChatTemplate.load(str(folder))
    chat._tokenizer.chat_template = SHOWS_TOOLS + chat._tokenizer.chat_template
    return chat


def tool_texts(ctx: LiveContext, plane: ScriptedPlane, template: ChatTemplate) -> str:
    return template.decode([*plane.seen[-1], template.end_token_ids[0]])


def test_a_schema_comes_from_type_hints_and_docstring() -> None:
    function = schema_of(search)["function"]
    assert (function["name"], function["description"]) == ("search", "Search for pages.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to search for."},
            "label": {"type": "string", "default": "web", "description": "Where to search."},
        },
        "required": ["query"],
    }


def numpy_style(query: str, most: int | None = None) -> list[str]:
    """Search for pages.

    Parameters
    ----------
    query
        What to search for,
        in words.
    most : int, optional
    """
    return []


def rest_style(query: str, most: int | None = None) -> list[str]:
    """Search for pages.

    :param query: What to search for, in words.
    """
    return []


def undocumented(query: str, most: int | None = None) -> list[str]:
    return []


class Searcher:
    """An engine."""

    def __call__(self, query: str, most: int | None = None) -> list[str]:
        """Search for pages."""
        return []

    def search(self, query: str, most: int | None = None) -> list[str]:
        """Search for pages."""
        return []


async def awaited(query: str, most: int | None = None) -> list[str]:
    """Search for pages."""
    return []


@pytest.mark.parametrize(
    ("function", "name", "about", "of_query"),
    [
        (numpy_style, "numpy_style", "Search for pages.", "What to search for, in words."),
        (rest_style, "rest_style", "Search for pages.", "What to search for, in words."),
        (undocumented, "undocumented", "", None),
        (Searcher(), "Searcher", "Search for pages.", None),
        (Searcher().search, "search", "Search for pages.", None),
        (awaited, "awaited", "Search for pages.", None),
        (partial(awaited, most=3), "awaited", "Search for pages.", None),
    ],
)
def test_descriptions_are_taken_where_the_docstring_has_them(
    function: Callable[..., Any], name: str, about: str, of_query: str | None
) -> None:
    schema = schema_of(function)["function"]
    assert (schema["name"], schema["description"]) == (name, about)
    query = schema["parameters"]["properties"]["query"]
    assert query == {"type": "string", **({"description": of_query} if of_query else {})}
    assert schema["parameters"]["properties"]["most"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert schema["parameters"].get("required") == ["query"]


@dataclass
class Place:
    title: str
    floor: int = 0


def test_parameters_may_have_any_name_and_rich_types() -> None:
    """Names that classes of pydantic have, values that look like schemas, and types of the user's."""

    def book(
        schema: Place, copy: Literal["one", "two"] = "one", title: str = "none", default: object = print, **more: int
    ) -> None:
        """Note: this looks like a section

        Parameters
        """

    parameters = schema_of(book)["function"]["parameters"]
    assert set(parameters["properties"]) == {"schema", "copy", "title", "default"}
    assert parameters["properties"]["copy"] == {"type": "string", "enum": ["one", "two"], "default": "one"}
    (place,) = parameters["$defs"].values()
    assert place["properties"] == {"title": {"type": "string"}, "floor": {"type": "integer", "default": 0}}
    json.dumps(parameters)


class Order(BaseModel):
    places: list[Place]
    notes: dict[str, Place] = {}


def book(
    order: Order,
    near: Place | None = None,
    others: Iterable[Place] = (),
    most: int = None,  # type: ignore[assignment] # noqa: RUF013
    **more: Place,
) -> str:
    """Book places."""
    return f"{order} {near} {others} {most} {more}"


def test_a_function_has_instances_of_the_classes_of_its_hints(template: ChatTemplate) -> None:
    hall, call = {"title": "hall", "floor": "2"}, {"title": "attic"}
    given = {
        "order": {"places": [hall], "notes": {"a": call}},
        "near": call,
        "others": [hall, call],
        "most": None,
        "extra": hall,
    }
    plane = ScriptedPlane(*says(format_call("book", given) + format_call("book", {"order": {"places": []}})))
    ctx = context_on(plane, "", template=template)

    async def body() -> list[str]:
        ctx.set_template(tools=[book])
        ctx.append("user", "book")
        return await ctx.run_tools(await ctx.generate())

    placed, attic = Place("hall", 2), Place("attic")
    order = Order(places=[placed], notes={"a": attic})
    assert asyncio.run(body()) == [
        book(order, attic, [placed, attic], None, extra=placed),
        book(Order(places=[])),
    ]


class Even(BaseModel):
    number: int

    def model_post_init(self, _: object) -> None:
        {0: "even"}[self.number % 2]


@pytest.mark.parametrize(
    ("function", "given", "error"),
    [
        (book, {}, "order: Missing required argument"),
        (book, {"order": {"places": [{"floor": 1}]}}, "order.places.0.title: Field required"),
        (book, {"order": {"places": []}, "near": "hall"}, "near: Input should be a dictionary or an instance of Place"),
        (book, {"order": {"places": []}, "others": [3]}, "0: Input should be a dictionary or an instance of Place"),
        (add, {"first": "x", "second": 1, "third": 2}, "first: Input should be a valid integer, .*; third: Unexpected"),
        (lambda even: even, {"even": {"number": 3}}, "KeyError: 1"),
    ],
)
def test_arguments_of_another_form_are_told_in_one_line(
    function: Callable[..., Any], given: dict[str, Any], error: str
) -> None:
    if not function.__annotations__:
        function.__annotations__ = {"even": Even}
    with pytest.raises(ValueError, match=f"^{error}") as refused:
        arguments_for(function, given)
    assert "\n" not in str(refused.value)


def test_what_is_no_tool_is_refused_in_one_line(model_dir: str) -> None:
    def bare(query):  # type: ignore[no-untyped-def]
        """Search."""

    def nameless(*queries: str) -> str:
        return ""

    def odd(plane: ScriptedPlane) -> str:
        return ""

    def unknown(query: Nowhere) -> str:  # type: ignore[name-defined] # noqa: F821
        return ""

    for tools, message in [
        ([bare], "tool 'bare': parameter 'query' has no type hint"),
        ([nameless], "tool 'nameless': parameter 'queries' has no name in a call"),
        ([odd], "tool 'odd': a type hint has no JSON schema: .*ScriptedPlane"),
        ([unknown], "tool 'unknown': .*'Nowhere' is not defined"),
        ([5], "use a list of functions"),
        (add, "use a list of functions"),
        ("add", "use a list of functions"),
        ([add, add], "two functions have one name: add"),
    ]:
        with pytest.raises(BadInput, match=message) as refused:
            context_on(ScriptedPlane(), model_dir).set_template(tools=tools)
        assert "\n" not in str(refused.value)


def test_calls_of_a_reply_run_side_by_side_and_their_results_are_appended(template: ChatTemplate) -> None:
    calls = format_call("add", {"first": 2, "second": 3}) + format_call("search", {"query": "a", "label": "x"})
    plane = ScriptedPlane(*says(f"<think>add?</think>{calls}", "It is 5."))
    ctx = context_on(plane, "", template=template)

    async def body() -> list[Any]:
        ctx.set_template(tools=[add, search])
        ctx.append("user", "2+3?")
        first = await ctx.run_tools(await ctx.generate(), timeout_s=5)
        last = await ctx.generate()
        return [first, await ctx.run_tools(last), last.answer]

    assert asyncio.run(body()) == [["5", '{"x": ["A"]}'], [], "It is 5."]
    assert [action.label for action in ctx.actions] == ["add", "search"]
    assert [request.timeout_s for request in plane.actions] == [5, 5]
    seen = tool_texts(ctx, plane, template)
    assert '"description": "Add two numbers."' in seen
    assert seen.index("\n5\n") < seen.index('\n{"x": ["A"]}\n')


def test_what_is_wrong_in_a_call_is_a_text_for_the_model(template: ChatTemplate) -> None:
    calls = [
        "<tool_call>nonsense</tool_call>",
        format_call("fly", {}),
        format_call("add", {"first": 2}),
        format_call("add", {"first": 2, "second": 3}),
    ]
    plane = ScriptedPlane(*says("".join(calls)))
    plane.outcomes = [ActionOutcome("raised", message="ValueError: too large")]
    ctx = context_on(plane, "", template=template)

    async def body() -> list[str]:
        ctx.set_template(tools=[add, {"type": "function", "function": {"name": "fly"}}])
        ctx.append("user", "2+3?")
        return await ctx.run_tools(await ctx.generate())

    texts = asyncio.run(body())
    assert "not JSON" in texts[0]
    assert texts[1:3] == [
        "error: no tool 'fly'; there is add",
        "error: add: second: Missing required argument",
    ]
    assert texts[3] == "error: add failed: action add raised: ValueError: too large"


def test_replies_without_a_usable_call_end_the_conversation(template: ChatTemplate) -> None:
    useless, usable = format_call("fly", {}), format_call("add", {"first": 1, "second": 1})
    plane = ScriptedPlane(*says(useless, usable), *says(*[usable] * 4, reason="length"), *says(*[useless] * 9))
    ctx = context_on(plane, "", template=template, budget=Budget(max_steps=30))

    async def body() -> list[list[str]]:
        ctx.set_template(tools=[add])
        ctx.append("user", "go on")
        heard = []
        while not ctx.done:
            heard.append(await ctx.run_tools(await ctx.generate()))
        return heard

    heard = asyncio.run(body())
    assert heard[2:6] == [[CUT]] * 4 and len(ctx.actions) == 1
    assert len(heard) == 10
    assert ctx.metadata == {"no_progress": "8 replies in a row called no tool that there is"}


def test_an_agent_of_tools_needs_no_loop_of_its_own(template: ChatTemplate) -> None:
    agent = ToolAgent([add], lambda task, answer: float(answer == task.payload["answer"]), system="Be brief.")
    task = Task("sum", "2+3?", {"answer": "5"})
    plane = ScriptedPlane(*says(format_call("add", {"first": 2, "second": 3}), "<think>easy</think>5"))
    assert asyncio.run(agent.solve(task, context_on(plane, "", template=template))) == 1.0
    with pytest.raises(BadInput, match="environment 'tools' draws no tasks"):
        agent.tasks(1, 0)
    endless = ScriptedPlane(*says(*[format_call("add", {"first": 2, "second": 3})] * 3))
    budget = Budget(max_steps=3)
    assert asyncio.run(agent.solve(task, context_on(endless, "", template=template, budget=budget))) == 0.0


def test_a_template_that_shows_no_tools_is_told(template: ChatTemplate, model_dir: str) -> None:
    for shows, chat in ((True, template), (False, ChatTemplate.load(model_dir))):
        told: list[str] = []
        ctx = context_on(ScriptedPlane(), "", template=chat)
        ctx._services = replace(ctx._services, note_once=told.append)
        ctx.set_template(enable_thinking=False)
        ctx.set_template(tools=[])
        assert told == []
        ctx.set_template(tools=[add])
        assert told == ([] if shows else [NO_TOOLS_SHOWN])


def test_what_each_trajectory_may_tell_is_told_once() -> None:
    told: list[str] = []
    shown = ShownProgress(told.append)
    for line in ("one", "two", "one"):
        shown.note_once(line)
    assert told == ["one", "two"]


def test_calls_that_the_engine_has_read_go_before_those_read_here(template: ChatTemplate) -> None:
    """Of a form that is not read here; thinking and cut replies call nothing all the same."""

    def message(content: str | None, arguments: str) -> str:
        return json.dumps({"content": content, "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]})

    read, wrong = message("So:", '{"first": 1, "second": 2}'), message(None, "x")
    plane = ScriptedPlane(
        sampled(*b"So: add(1, 2)", reason="stop", read=read),
        sampled(*b"add(", reason="stop", read=wrong),
        sampled(*b"<think>add(1, 2)", reason="stop", read=read),
        sampled(*b"3", reason="stop", read=json.dumps({"content": "3"})),
        sampled(*format_call("add", {}).encode(), reason="stop", read=json.dumps({"content": "unreadable"})),
    )
    lines: list[Any] = []
    ctx = context_on(plane, "", template=template, journal=lines)
    ctx._services = replace(ctx._services, engine_reads_calls=True)

    async def replies() -> list[Reply]:
        ctx.set_template(tools=[add])
        ctx.append("user", "1+2?")
        made = []
        for _ in range(5):
            made.append(await ctx.generate())
            ctx.append("user", "and?")
        return made

    made = asyncio.run(replies())
    assert [reply.answer for reply in made[:4]] == ["So:", "add(", "", "3"]
    assert made[0].calls == [ToolCall("add", {"first": 1, "second": 2})]
    assert isinstance(made[1].calls[0], MalformedCall)
    assert [reply.calls for reply in made[2:]] == [[], [], [ToolCall("add", {})]]
    asked = plane.calls[0].reading
    assert asked is not None and json.loads(asked.tools) == [schema_of(add)]
    assert template.decode([*asked.thinking_end, 0]).startswith("</think>")
    again = step_from_body(lines[0][1])
    assert again.read == read, "a resumed run reads no reply again"


def test_a_reply_is_read_from_the_end_of_its_thinking_on() -> None:
    reading = ReplyReading("[]", 0, (7, 8))
    assert reading.part_to_read([1, 7, 8, 2, 7, 8, 3, 0], (0,)) == [7, 8, 2, 7, 8, 3]
    assert reading.part_to_read([1, 7, 2], (0,)) == [1, 7, 2]
    assert ReplyReading("[]").part_to_read([1, 0], (0,)) == [1]
    assert reading.part_to_read([0], (0,)) == []
