"""`search`: questions that need several pages in sequence, answered with a search tool.

Each question starts at one entity and follows relations: "What is Lena Brok's home town's river?". Easy: 1 to 4
relations, stated in the order in which they are followed. Hard: 4 to 6, where a relation may occur twice; some
questions are nested in reverse order ("the river of the home town of ..."). Reward 1.0 or 0.0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.corpus import Page, build_world, search_world
from heddle_dask.environments.splits import SplitEnvironment, Tier, draw_tasks, problem_key
from heddle_dask.environments.tool_agent import converse, text_argument

SYSTEM = (
    "Answer the question with the tool search(query), one fact per search:\n"
    + format_call("search", {"query": "mayor of Rome"})
    + '\nThen reply "Answer: NAME".'
)
_REMINDER = 'Call the tool or reply "Answer: NAME".'
_ANSWER = re.compile(r"Answer:\s*(.+)", re.IGNORECASE)
_TEST_WORLDS, _TRAIN_WORLDS = range(4), range(4, 64)


@dataclass(frozen=True)
class SearchEnvironment(SplitEnvironment):
    """Questions over an invented world.

    Parameters
    ----------
    tier
        ``"easy"``: 1 to 4 relations; ``"hard"``: 4 to 6.
    split
        Test questions are about other worlds and never occur in the train split.
    nested_share
        Share of nested questions in the hard tier.
    results
        Maximum number of pages that one search returns.
    """

    kind: ClassVar[str] = "search"
    nested_share: float = 0.25
    results: int = 2

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        worlds = _TEST_WORLDS if self.split == "test" else _TRAIN_WORLDS

        def draw(rng: random.Random) -> Task:
            world = rng.choice(worlds)
            if self.tier == "easy":
                return _draw(rng, "easy", world, nested=False)
            nested = self.nested_share >= 1 or rng.random() < self.nested_share
            return _draw(rng, "hard", world, nested=nested)

        return draw_tasks(draw, count, seed=seed, split=self.split)

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Attempt the question once: 1.0 if the final reply names the right entity."""

        async def search(arguments: Mapping[str, Any]) -> str:
            query = text_argument(arguments, "query")
            world = task.payload["world"]
            found = await ctx.call(search_world, query, world, self.results, label="search")
            return "\n".join(found) or "nothing found"

        ctx.append("system", SYSTEM)
        ctx.append("user", task.prompt)
        final = await converse(ctx, {"search": search}, _has_answer, reminder=_REMINDER, limits=self.limits)
        wanted = _plain(task.payload["answer"])
        return float(final is not None and _plain(read_answer(final)) == wanted)


def read_answer(reply: str) -> str:
    """The text after the last "Answer:" of a reply; empty without one."""
    found = _ANSWER.findall(reply)
    return str(found[-1]).strip() if found else ""


def _has_answer(reply: str) -> bool:
    return bool(read_answer(reply))


def _plain(answer: str) -> str:
    return " ".join(re.findall(r"\w+", answer.casefold()))


def _draw(rng: random.Random, tier: Tier, world: int, *, nested: bool) -> Task:
    hops = rng.choice((1, 2, 2, 3, 3, 4)) if tier == "easy" else rng.randint(4, 6)
    pages = build_world(world).pages
    start, path, answer = _draw_path(rng, pages, hops, repeats=tier == "hard")
    if nested:
        prompt = "What is the " + " of the ".join(reversed(path)) + f" of {start}?"
    else:
        prompt = "What is " + "'s ".join([start, *path]) + "?"
    payload = {"world": world, "start": start, "path": path, "answer": answer}
    return Task(f"search-{tier}-{problem_key(prompt):08x}", prompt, payload, domain=f"{hops} hops")


def _draw_path(
    rng: random.Random, pages: Mapping[str, Page], hops: int, *, repeats: bool
) -> tuple[str, list[str], str]:
    """A start, relations to follow from it, and their end; drawn again until they form a valid path."""
    titles = list(pages)
    while True:
        start = place = rng.choice(titles)
        path: list[str] = []
        for hop in range(1, hops + 1):
            page = pages[place]
            allowed = list(page.relations) if hop == hops else list(page.links)
            allowed = [name for name in allowed if repeats or name not in path]
            if not allowed:
                break
            path.append(rng.choice(allowed))
            place = page.relations[path[-1]]
        if len(path) == hops:
            return start, path, place
