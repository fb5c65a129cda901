"""Held-out tasks by construction: what a problem asks determines its split, for any seed.

The identity of a prompt is the same in every process, epoch and run, so that attempts at it can be compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Literal, get_args

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.environments.tool_agent import LoopLimits


def prompt_key(environment: str, task: Task) -> str:
    """A digest of what a task asks for: the environment's name, the prompt, and the payload that goes with it.

    The task's group and id count only for a task without prompt and payload: many environments number their tasks
    in every run again.
    """
    payload = dict(task.payload)
    named = "" if task.prompt or payload else task.group or task.task_id
    text = repr((environment, task.prompt, payload, named))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


Split = Literal["train", "test"]
Tier = Literal["easy", "hard"]

_TEST_ONE_IN = 10


def problem_key(problem: str) -> int:
    """Checksum of a problem's text; equal on every machine and in every process."""
    return zlib.crc32(problem.encode())


def split_of(problem: str) -> Split:
    """The split of a problem; one problem in ten is for testing."""
    return "test" if problem_key(problem) % _TEST_ONE_IN == 0 else "train"


@dataclass(frozen=True)
class SplitEnvironment:
    """What the environments of this package share: two tiers, two splits, and limits of the agent's loop."""

    kind: ClassVar[str]
    tier: Tier = "easy"
    split: Split = "test"
    limits: LoopLimits = field(default_factory=LoopLimits)

    def __post_init__(self) -> None:
        for what, value, known in (
            ("tier", self.tier, get_args(Tier)),
            ("split", self.split, get_args(Split)),
        ):
            if value not in known:
                raise BadInput(f"unknown {what} {value!r}: choose {' or '.join(known)}")

    @property
    def name(self) -> str:
        """The shortest name that selects it: ``math``, ``math:hard``, ``math:hard:train``."""
        hard, train = self.tier == "hard", self.split == "train"
        return ":".join([self.kind, *(["hard"] if hard else []), *(["train"] if train else [])])


def draw_tasks(
    draw: Callable[[random.Random], Task],
    count: int,
    *,
    seed: int,
    split: Split,
    problem_of: Callable[[Task], str] = lambda task: task.prompt,
) -> Sequence[Task]:
    """`count` different tasks of one split.

    Parameters
    ----------
    problem_of
        The part of a task that determines its split: tasks with equal problems are in the same one.
    """
    if count < 0:
        raise BadInput(f"count of tasks must not be negative, got {count}")
    rng = random.Random(f"{split}-{seed}")
    tasks: dict[str, Task] = {}
    for _ in range(1000 + 100 * count):
        if len(tasks) == count:
            break
        task = draw(rng)
        if split_of(problem_of(task)) == split:
            tasks.setdefault(task.prompt, task)
    if len(tasks) < count:
        raise BadInput(f"asked for {count} tasks, found only {len(tasks)} different ones")
    return list(tasks.values())
