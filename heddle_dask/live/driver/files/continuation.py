"""Whether a session may continue a stored run: it must use the same model, tokenizer, kind of engine, sampling, kind of
logprobs and environment. A batch that is resumed must also have the same limits, seed, samples, tasks and version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.environments.task_sources import TaskSource
from heddle_dask.live.driver.options import Sampling

_COMPARED = ("environment", "model", "tokenizer", "engine", "sampling", "chat_template_kwargs", "logprobs")
# A program that runs again with other limits, or in another version, would ask for other steps than the journal holds;
# another seed draws other tasks.
_COMPARED_ON_RESUME = ("limits", "seed", "samples", "task_list", "heddle_dask")


def task_list(tasks: Sequence[Task]) -> dict[str, Any]:
    """What tells the tasks of one batch from those of another: their number, and a digest of ids and prompts."""
    digest = sha256(json.dumps([[task.task_id, task.prompt] for task in tasks]).encode())
    return {"count": len(tasks), "digest": digest.hexdigest()[:16]}


def source_list(source: TaskSource) -> dict[str, Any]:
    """The same of a stream of groups: its tasks follow from the source."""
    return {"source": source.description}


def _complete(name: str, metadata: Mapping[str, Any]) -> Any:
    """What is compared of one entry, with the values that an earlier version did not store, since it knew no others."""
    value = metadata[name]
    if not isinstance(value, Mapping):
        return value
    if name == "engine":
        return value.get("kind")
    if name != "sampling":
        return value
    # Not those of `Sampling()`, which are the user's settings of today. Seeds do not change the distribution.
    complete = {**{each.name: each.default for each in fields(Sampling)}, **value}
    return {each: setting for each, setting in complete.items() if each != "seeded"}


def _recorded(name: str, recorded: Mapping[str, Any], described: Mapping[str, Any]) -> Any:
    """What the run was made with; a context limit that is given now compares with the one that its engines had."""
    value = _complete(name, recorded)
    if name != "limits" or not isinstance(value, Mapping) or "context_tokens" not in recorded:
        return value
    given = described[name].get("max_context_tokens")
    if value.get("max_context_tokens") is None and given is not None:
        return {**value, "max_context_tokens": recorded["context_tokens"]}
    return value


def check_continues(out: Path, recorded: Mapping[str, Any], described: Mapping[str, Any], *, resumes: bool) -> None:
    """Refuse a session that would put trajectories of another kind into a run.

    Parameters
    ----------
    recorded, described
        Metadata of the run, and of the session. What one of them lacks is not compared. A session that resumes is
        compared with the last batch.

    Raises
    ------
    BadInput
        They differ; the message has both values.
    """
    compared = (*_COMPARED, *_COMPARED_ON_RESUME) if resumes else _COMPARED
    if resumes:
        recorded = {**recorded, **(recorded.get("batch_facts") or [{}])[-1]}
    for name in compared:
        if name not in recorded or name not in described:
            continue
        was, now = _recorded(name, recorded, described), _complete(name, described)
        if was != now:
            verb = "resumed" if resumes else "appended to"
            raise BadInput(f"{out} was made with {_differing(name, was, now)}: it can only be {verb} with the same")


def _differing(name: str, was: Any, now: Any) -> str:
    if name != "task_list":
        return f"{name} {was}, not {now}"
    if "source" in was or "source" in now:
        return f"tasks from {_told(was)}, not {_told(now)}"
    if was.get("count") != now["count"]:
        return f"{was.get('count')} tasks, not {now['count']}"
    return f"{was['count']} other tasks than these {now['count']}"


def _told(tasks: Mapping[str, Any]) -> str:
    return str(tasks.get("source") or f"a list of {tasks.get('count')}")
