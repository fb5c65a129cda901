"""Prompts and bridges token by token as the package `renderers` has them, which writes each family by hand.

Its twelve families whose chat template TRL ships; for others no package at hand has a template or a tokenizer. Of
GPT-OSS there is a template, but its renderer wants the tokenizer of Harmony, which is nowhere installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds.model_families import FAMILIES, write_model
from worlds.rendered_by_others import SITE

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.chat.template import ChatTemplate

CITY = {"type": "string", "description": "Its name."}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}]

SYSTEM, ASKED, AGAIN = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "How is it?"),
    ChatMessage("user", "Now?"),
)
SAID, THOUGHT = ChatMessage("assistant", "Fine."), ChatMessage("assistant", "Fine.", "plan")
ONE, OTHER = (CalledTool("weather", '{"city": "Bern", "days": 2}', name) for name in "ab")
CALLED = ChatMessage("assistant", calls=(ONE,), thinking="plan")
TWICE = ChatMessage("assistant", calls=(ONE, OTHER), thinking="plan")
SUNNY, RAINY = (
    ChatMessage("tool", "sunny", call_id="a", name="weather"),
    ChatMessage("tool", "r", call_id="b", name="weather"),
)

OPENINGS: dict[str, tuple[tuple[ChatMessage, ...], list[Any]]] = {
    "question": ((ASKED,), []),
    "system": ((SYSTEM, ASKED), []),
    "turns": ((SYSTEM, ASKED, SAID, AGAIN), []),
    "tools": ((ASKED,), TOOLS),
    "system and tools": ((SYSTEM, ASKED), TOOLS),
    "call": ((SYSTEM, ASKED, CALLED, SUNNY), TOOLS),
    "calls": ((ASKED, TWICE, SUNNY, RAINY, SAID, AGAIN), TOOLS),
}
BRIDGES: dict[str, tuple[ChatMessage, tuple[ChatMessage, ...], list[Any]]] = {
    "> question": (THOUGHT, (AGAIN,), []),
    "> result": (CALLED, (SUNNY,), TOOLS),
    "> results": (TWICE, (SUNNY, RAINY), TOOLS),
    "> result and question": (CALLED, (SUNNY, AGAIN), TOOLS),
}
CUT = {f"{name}, cut" for name in BRIDGES}
RESULTS = {name for name in (*BRIDGES, *CUT) if "result" in name}
# What is not equal, and why. A bridge that `renderers` does not make (it renders all again) is not compared.
DIFFERENT = {
    # A turn that its limit has cut: `renderers` ends it by <|endoftext|>, the template by the marker of the next role.
    "glm-4.5": CUT,
    # The template takes one call in a turn: both refuse.
    "llama-3": {"calls", "> results", "> results, cut"},
    # TRL has another revision of the template: calls are separated by a line break, and no thinking begins behind
    # results.
    "deepseek-r1": {"call", "calls", *RESULTS},
}


@pytest.fixture(scope="module")
def compared(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[Any, Any]]]:
    """For each family and case, the tokens as rendered here and there; a text where one refuses."""
    if not (SITE / "renderers").is_dir():
        pytest.skip("the wheel of renderers is not in build/peers: `make test` brings it")
    folder = tmp_path_factory.mktemp("families")
    for name, family in FAMILIES.items():
        write_model(family, Path(model_dir), folder / name)
    asked = [{"family": name, "folder": str(folder / name), "cases": cases()} for name in FAMILIES]
    done = subprocess.run(
        [sys.executable, "tests/worlds/rendered_by_others.py"],
        cwd=Path(__file__).parents[2],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = iter(json.loads(done.stdout))
    return {
        name: own(
            ChatTemplate.load(str(folder / name)).with_variables(family.variables),
            [next(answers) for _ in range(len(OPENINGS) + len(BRIDGES))],
        )
        for name, family in FAMILIES.items()
    }


def cases() -> list[dict[str, Any]]:
    openings = [{"messages": shown(messages), "tools": tools} for messages, tools in OPENINGS.values()]
    bridges = [
        {"messages": shown([ASKED]), "tools": tools, "reply": reply.for_template(), "new": shown(new)}
        for reply, new, tools in BRIDGES.values()
    ]
    return [*openings, *bridges]


def shown(messages: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]


def own(template: ChatTemplate, theirs: list[Any]) -> dict[str, tuple[Any, Any]]:
    """Each case as rendered here, beside the other rendering."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for (name, (messages, tools)), other in zip(OPENINGS.items(), theirs, strict=False):
        pairs[name] = tokens(lambda t, m=messages: t.render(shown(m)), template, tools), other
    for (name, (_, new, tools)), other in zip(BRIDGES.items(), theirs[len(OPENINGS) :], strict=True):
        if isinstance(other, str):
            pairs[name] = "", other
            continue
        prompt, turn, whole, cut = other
        end = turn[-1]
        pairs[name] = (
            tokens(lambda t, n=new, e=end: t.following(shown(n), ended=True, end_id=e).token_ids, template, tools),
            whole and whole[len(prompt) + len(turn) :],
        )
        pairs[f"{name}, cut"] = (
            tokens(lambda t, n=new: t.following(shown(n), ended=False).token_ids, template, tools),
            cut and cut[len(prompt) + len(turn) - 1 :],
        )
    return pairs


def tokens(render: Any, template: ChatTemplate, tools: list[Any]) -> Any:
    try:
        return render(template.with_variables({"tools": tools}) if tools else template)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_prompts_and_bridges_are_those_of_the_package_renderers(compared: Any, name: str) -> None:
    pairs = compared[name]
    different = {case for case, (here, there) in pairs.items() if there is not None and here != there}
    refused = {case for case, (_, there) in pairs.items() if isinstance(there, str)}
    assert different | refused == DIFFERENT.get(name, set()) & pairs.keys()
    equal = [case for case, (here, there) in pairs.items() if here == there]
    assert {"question", "system", "turns", "tools"} <= set(equal)
    assert any(case.startswith(">") for case in equal), "a bridge is compared"
