"""Bootstrap samples of recorded trajectories, of any size.

Whole groups are drawn with replacement (Efron's bootstrap, by cluster), since attempts at one prompt resemble each
other. A group drawn twice becomes two groups. Every trajectory is as likely as it is in the file.

Trajectories with an unknown token count are left out. Trajectories with a truncated recording are kept as recorded.
"""

from __future__ import annotations

import random
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.planned import PlannedTrajectory, PromptDoesNotFit, is_replayable, planned_trace
from heddle_dask.workloads.traces import read_traces


def bootstrap(
    path: Path | str,
    *,
    trajectories: int,
    seed: int,
    token_scale: float = 1.0,
    tool_scale: float = 1.0,
    max_context_tokens: int,
) -> list[PlannedTrajectory]:
    """Draw `trajectories` trajectories of a trace, by name or file, in whole groups; the last group may be cut short.

    Draw number k, from 0, appends ``~k`` to the ids of the group and its trajectories. Scales and the end of a context
    are those of `planned.planned_trace`. The domain is the file's name without its extensions. A larger number of
    trajectories does not change the first ones.

    Raises
    ------
    BadInput
        The file cannot be read or has no replayable trajectory, an id occurs twice, a prompt fills the
        context, or `trajectories` is below 1.
    """
    if trajectories < 1:
        raise BadInput(f"trace file {str(path)!r}: {trajectories} trajectories asked, give 1 or more")
    groups = _planned_groups(
        path, token_scale=token_scale, tool_scale=tool_scale, max_context_tokens=max_context_tokens
    )
    # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
    draws = random.Random(f"bootstrap of {file_domain(path)}, seed {seed}")
    planned: list[PlannedTrajectory] = []
    number = 0
    while len(planned) < trajectories:
        group = groups[draws.randrange(len(groups))]
        planned += [_numbered(one, number) for one in group[: trajectories - len(planned)]]
        number += 1
    return planned


def file_domain(path: Path | str) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def _planned_groups(
    path: Path | str, *, token_scale: float, tool_scale: float, max_context_tokens: int
) -> list[list[PlannedTrajectory]]:
    where = f"trace file {str(path)!r}"
    groups: dict[str, list[PlannedTrajectory]] = {}
    seen: set[str] = set()
    for trace in read_traces(path):
        if trace.trajectory_id in seen:
            raise BadInput(f"{where}: id {trace.trajectory_id!r} comes twice")
        seen.add(trace.trajectory_id)
        if not is_replayable(trace):
            continue
        group = groups.setdefault(trace.group_id, [])
        try:
            one = planned_trace(
                trace,
                domain=file_domain(path),
                token_scale=token_scale,
                tool_scale=tool_scale,
                max_context_tokens=max_context_tokens,
                sample_index=len(group),
            )
        except PromptDoesNotFit as error:
            # Skipping it would silently shorten the tail.
            raise BadInput(f"{where}: {error}") from error
        group.append(one)
    if not groups:
        raise BadInput(f"{where}: no trajectory with known token counts")
    return list(groups.values())


def _numbered(planned: PlannedTrajectory, number: int) -> PlannedTrajectory:
    # Not `dataclasses.replace`, which is slower: a hundred thousand are made. The steps are shared.
    return PlannedTrajectory(
        trajectory_id=f"{planned.trajectory_id}~{number}",
        group_id=f"{planned.group_id}~{number}",
        sample_index=planned.sample_index,
        domain=planned.domain,
        prompt_tokens=planned.prompt_tokens,
        steps=planned.steps,
        message_tokens=planned.message_tokens,
        max_steps=planned.max_steps,
        prompt_key=planned.prompt_key,
    )
