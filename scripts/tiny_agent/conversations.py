"""Training text: whole conversations of experts in the real environment programs, as token ids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from heddle_dask.environments.base import Context, Environment, Task
from heddle_dask.environments.code_env import CodeEnvironment
from heddle_dask.environments.math_env import MathEnvironment
from heddle_dask.environments.search_env import SearchEnvironment
from heddle_dask.environments.splits import Split, Tier
from scripts.tiny_agent.experts import make_expert
from scripts.tiny_agent.scripted_context import ScriptedContext
from scripts.tiny_agent.tokenizer import END_OF_TURN, render

SHARES = {
    "math": 0.26,
    "math:hard": 0.09,
    "code": 0.22,
    "code:hard": 0.08,
    "search": 0.26,
    "search:hard": 0.09,
}
"""Share of the conversations by environment and tier."""
CARELESSNESS = {"math:hard": 0.4, "code:hard": 0.5, "search:hard": 0.4}
"""Share of hard attempts that are imitated although they fail."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as tokens; `learned` marks those that the model is to imitate."""

    token_ids: np.ndarray
    learned: np.ndarray


def make_environment(name: str, split: Split) -> Environment:
    """An environment by name, ``math`` or ``math:hard`` and so on."""
    kind, _, tier_name = name.partition(":")
    tier: Tier = "hard" if tier_name == "hard" else "easy"
    if kind == "math":
        return MathEnvironment(tier, split)
    return CodeEnvironment(tier, split) if kind == "code" else SearchEnvironment(tier, split)


def _training_environment(name: str) -> Environment:
    """As `make_environment`, but hard questions are all nested: long straight ones are left to chance."""
    if name == "search:hard":
        return SearchEnvironment("hard", "train", nested_share=1.0)
    return make_environment(name, "train")


def make_conversations(count: int, seed: int, tokenizer: Any) -> list[Conversation]:
    """About `count` conversations of all environments' train splits, mixed, the same for a seed."""
    rng = random.Random(f"conversations-{seed}")
    contexts = asyncio.run(_converse_all(count, seed, rng))
    conversations = [encode(context.messages, context.learned, tokenizer) for context in contexts]
    rng.shuffle(conversations)
    return conversations


async def _converse_all(count: int, seed: int, rng: random.Random) -> list[ScriptedContext]:
    # One event loop for all: the sandbox is found out once per loop.
    contexts = []
    for name, share in SHARES.items():
        environment = _training_environment(name)
        for task in environment.tasks(round(count * share), seed):
            contexts.append(await converse(environment, task, rng, CARELESSNESS.get(name, 0.0)))
    return contexts


async def converse(environment: Environment, task: Task, rng: random.Random, carelessness: float) -> ScriptedContext:
    """Let an expert attempt a task.

    Raises
    ------
    AssertionError
        A careful expert failed: environment and expert do not fit.
    """
    context = ScriptedContext(make_expert(task, rng, carelessness))
    reward = await environment.solve(task, cast(Context, context))
    if not carelessness and reward != 1.0:
        raise AssertionError(f"the expert failed {task.task_id}: {context.messages}")
    return context


def encode(
    messages: Sequence[dict[str, str]],
    learned: Sequence[bool],
    tokenizer: Any,
) -> Conversation:
    """Token ids of a conversation up to its last turn's end, and which of them are learned.

    The text is what the chat template renders; a learned turn includes its end token.
    """
    ids: list[int] = []
    marks: list[bool] = []
    rest = iter(learned)
    for message in messages:
        text = render(tokenizer, [message])
        head = text.index("\n") + 1 if message["role"] == "assistant" else len(text)
        tail = text.rindex(END_OF_TURN) + len(END_OF_TURN) if head < len(text) else head
        learn = next(rest) if message["role"] == "assistant" else False
        for part, mark in ((text[:head], False), (text[head:tail], learn), (text[tail:], False)):
            part_ids = tokenizer.encode(part, add_special_tokens=False) if part else []
            ids += part_ids
            marks += [mark] * len(part_ids)
    return Conversation(np.array(ids, dtype=np.int32), np.array(marks, dtype=bool))
