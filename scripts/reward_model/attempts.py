"""Pairs of attempts at tasks of the environment ``math``: one that solves the task, and one with a slip.

A scripted expert talks to the real environment program, once as it is and once with a wrong digit in a call of its tool
or in its answer. What an attempt is worth says the environment: a pair counts when it rewards the first and not the
second. Training pairs are of the environment's train split, and those for measuring of its test split.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from heddle_dask.environments.base import Context, Environment, Task
from heddle_dask.environments.splits import Split
from scripts.tiny_agent.conversations import encode, make_environment
from scripts.tiny_agent.experts import make_expert
from scripts.tiny_agent.scripted_context import Expert, ScriptedContext, Turn
from scripts.tiny_agent.tokenizer import END_OF_TURN, token_id

ENVIRONMENT = "math"
LONGEST_TOKENS = 420
"""Longer attempts are left out: they would take most of the training."""


@dataclass(frozen=True, slots=True)
class AttemptPair:
    """The token ids of a solved and of a failed attempt at one task, each up to the end of its last turn."""

    solved: np.ndarray
    failed: np.ndarray

    @property
    def longest(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.solved), len(self.failed))


def make_pairs(count: int, seed: int, split: Split, tokenizer: Any) -> list[AttemptPair]:
    """Pairs of at most `count` tasks, the same for a seed."""
    return asyncio.run(_make_all(count, seed, split, tokenizer))


async def _make_all(count: int, seed: int, split: Split, tokenizer: Any) -> list[AttemptPair]:
    environment = make_environment(ENVIRONMENT, split)
    pairs = []
    for number, task in enumerate(environment.tasks(count, seed)):
        # The same draws for both: they differ in the slip and in what follows from it.
        draws = f"pair-{split}-{seed}-{number}"
        solved, right = await _attempt(environment, task, make_expert(task, random.Random(draws)), tokenizer)
        slipped = with_slip(make_expert(task, random.Random(draws)), random.Random(f"slip-{draws}"))
        failed, wrong = await _attempt(environment, task, slipped, tokenizer)
        pair = AttemptPair(solved, failed)
        if right == 1.0 and wrong == 0.0 and pair.longest <= LONGEST_TOKENS:
            pairs.append(pair)
    return pairs


async def _attempt(environment: Environment, task: Task, expert: Expert, tokenizer: Any) -> tuple[np.ndarray, object]:
    context = ScriptedContext(expert)
    reward = await environment.solve(task, cast(Context, context))
    return up_to_last_turn(encode(context.messages, context.learned, tokenizer).token_ids), reward


def with_slip(expert: Expert, rng: random.Random) -> Expert:
    """The expert with one wrong digit: in the first call that has one, or in its answer."""
    in_answer = rng.random() < 0.5
    return _slipping(expert, rng, r"Answer: -?\d+" if in_answer else r"print\([^)]*\)")


def _slipping(expert: Expert, rng: random.Random, place: str) -> Generator[Turn, str, None]:
    slipped = False
    turn = next(expert, None)
    while turn is not None:
        found = None if slipped else re.search(place, turn.text)
        if found is not None and any(character.isdigit() for character in found[0]):
            slipped = True
            wrong = _with_wrong_digit(found[0], rng)
            turn = Turn(turn.text[: found.start()] + wrong + turn.text[found.end() :], turn.learn)
        heard = yield turn
        try:
            turn = expert.send(heard)
        except StopIteration:
            return


def _with_wrong_digit(text: str, rng: random.Random) -> str:
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([each for each in "123456789" if each != text[place]])
    return text[:place] + digit + text[place + 1 :]


def up_to_last_turn(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The tokens up to the end of the last turn: what a program's context holds when it ends."""
    array = np.asarray(ids, dtype=np.int32)
    ends = np.flatnonzero(array == token_id(END_OF_TURN))
    return array[: int(ends[-1]) + 1]
