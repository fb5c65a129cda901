"""Renders conversations by the package `renderers`, in a process of its own: `python FILE` reads JSON and writes JSON.

Read: a list of ``{"family", "folder", "cases": [{"messages", "tools", "reply"?, "new"?}]}``. Written: for each case the
ids of the whole prompt; or, where a reply and new messages are given, prompt, sampled turn, and the prompt that follows
it: whole, and of a turn that was cut before its end token.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

SITE = Path(__file__).parents[2] / "build/peers/site"


def rendered(renderer: Any, case: dict[str, Any]) -> Any:
    messages, tools = case["messages"], case["tools"] or None
    prompt = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    if "reply" not in case:
        return prompt
    turn = sampled_turn(renderer, prompt, [*messages, case["reply"]], case["new"], tools)
    answers = [renderer.bridge_to_next_turn(prompt, each, case["new"], tools=tools) for each in (turn, turn[:-1])]
    return [prompt, turn, *(None if each is None else each.token_ids for each in answers)]


def sampled_turn(renderer: Any, prompt: list[int], messages: Any, new: Any, tools: Any) -> list[int]:
    """What the model would sample for the last message: what the conversation has behind the prompt, to its end."""
    whole = renderer.render_ids(messages, tools=tools)
    stops = renderer.get_stop_token_ids()
    if whole[: len(prompt)] != prompt:
        # The template shows no thinking of earlier turns.
        said = f"{messages[-1]['reasoning_content']}\n</think>\n\n{messages[-1]['content']}"
        return [*renderer._tokenizer.encode(said, add_special_tokens=False), stops[0]]
    if not any(token in stops for token in whole[len(prompt) :]):
        # The marker of the next role ends the turn.
        longer = renderer.render_ids([*messages, *new], tools=tools)
        whole = [*whole, next(token for token in longer[len(prompt) :] if token in stops)]
    return whole[len(prompt) : next(at for at in range(len(prompt), len(whole)) if whole[at] in stops) + 1]


def main() -> None:
    sys.path.append(str(SITE))
    warnings.simplefilter("ignore")
    from renderers.base import create_renderer
    from renderers.configs import config_from_name
    from transformers import PreTrainedTokenizerFast

    answers = []
    for asked in json.load(sys.stdin):
        folder = Path(asked["folder"])
        special = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
        tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
        config = type(config_from_name(asked["family"]))(thinking_retention="all")
        renderer = create_renderer(tokenizer, config)
        for case in asked["cases"]:
            try:
                answers.append(rendered(renderer, case))
            except (AssertionError, KeyError, TypeError, ValueError) as error:
                answers.append(f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
