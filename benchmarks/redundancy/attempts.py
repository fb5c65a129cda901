"""Attempts at tasks whose length and reward are known, in groups: of traces, stored runs and finished groups."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TrajectoryOutline
from heddle_dask.workloads.traces import read_traces

Groups = list[list["RecordedAttempt"]]


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One attempt: `seconds` from its start to its end, LLM steps, generated tokens, and the reward."""

    group: str
    seconds: float
    steps: int
    tokens: int
    reward: float


def groups_of_trace(trace: str | Path, size: int, token_s: float, seed: int) -> Groups:
    """Groups of `size` attempts at one task, in a seeded order; each attempt is in at most one.

    Parameters
    ----------
    token_s
        Seconds for one generated token; tools take what was recorded, waits for people nothing.
    """
    by_task = defaultdict(list)
    for each in read_traces(trace):
        tokens = [step.generated_tokens for step in each.steps]
        if each.success is None or not each.complete or None in tokens:
            continue
        count = sum(number for number in tokens if number is not None)
        tools_s = sum(0.0 if step.human else step.tool_s or 0.0 for step in each.steps)
        by_task[each.group_id].append(
            RecordedAttempt(each.group_id, count * token_s + tools_s, len(tokens), count, float(each.success))
        )
    draw = random.Random(f"redundancy {seed}")
    groups = []
    for _, mine in sorted(by_task.items()):
        draw.shuffle(mine)
        groups += [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
    draw.shuffle(groups)
    return groups


def groups_of_run(run: Path, size: int) -> Groups:
    """The groups of a stored rollout, with the times that their attempts took there."""
    reader = RunReader(run)
    return groups_of_records((reader.outline(row) for row in range(len(reader))), size)


def groups_of_records(records: Iterable[TrajectoryOutline], size: int) -> Groups:
    """The groups in which `size` attempts came to an end and have a reward; in the order of their ids.

    More attempts than `size` are left out: those with the highest numbers, which says nothing about their lengths.
    """
    by_group = defaultdict(list)
    for each in records:
        if each.reward is not None and each.status in ("completed", "truncated"):
            by_group[each.group_id].append(each)
    return [
        [attempt_of(each) for each in sorted(mine, key=lambda each: each.sample_index)[:size]]
        for _, mine in sorted(by_group.items())
        if len(mine) >= size
    ]


def attempt_of(record: TrajectoryOutline) -> RecordedAttempt:
    """A trajectory with a reward."""
    assert record.reward is not None
    return RecordedAttempt(
        record.group_id,
        record.finished_s - record.started_s,
        len(record.steps),
        record.generated_tokens,
        record.reward,
    )
