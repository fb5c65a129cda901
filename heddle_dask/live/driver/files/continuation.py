"""Whether a session may continue a stored run: it must use the same model, tokenizer, kind of engine, sampling, kind of
logprobs and environment. A batch that is resumed must also have the same limits, seed, tasks and version, and at least
as many samples.

Models, rewards and tasks are compared by what they contain: a changed file or function under the same name is another
input, unless the user accepts the change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.environments.input_identity import payloads_digest, prompts_digest, root_digest
from heddle_dask.environments.task_sources import TaskSource
from heddle_dask.live.driver.options import Sampling
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix

_COMPARED = ("environment", "model", "tokenizer", "engine", "sampling", "chat_template_kwargs", "logprobs")
# A program that runs again with other limits, or in another version, would ask for other steps than the journal holds;
# another seed draws other tasks.
_COMPARED_ON_RESUME = ("limits", "seed", "samples", "heddle_dask")
# Contents, whose change may be accepted.
_CONTENTS = ("weights", "rewards", "services", "service_models", "task_list")

ACCEPT = "--accept-changes, or Output(accept_changes=True)"


def task_list(tasks: Sequence[Task], prefixes: Mapping[str, TrajectoryPrefix] | None = None) -> dict[str, Any]:
    """What tells the tasks of one batch from those of another: their number, a digest of ids and prompts, one of what
    else their environment knows of them, such as hidden tests, and what their attempts go on from."""
    facts = {"count": len(tasks), "digest": prompts_digest(tasks), "payload": payloads_digest(tasks)}
    return facts | {"prefixes": {name: prefix.facts for name, prefix in prefixes.items()}} if prefixes else facts


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


def check_continues(
    out: Path, recorded: Mapping[str, Any], described: Mapping[str, Any], *, resumes: bool, accepts: bool = False
) -> list[str]:
    """Refuse a session that would put trajectories of another kind into a run.

    Parameters
    ----------
    recorded, described
        Metadata of the run, and of the session. What one of them lacks is not compared. A session that resumes is
        compared with the last batch, as are contents.
    accepts
        Whether changed contents are accepted.

    Returns
    -------
    list of str
        What has changed and was accepted, in words.

    Raises
    ------
    BadInput
        They differ; the message has both values, or says which content has changed.
    """
    batches = list(recorded.get("batch_facts") or [{}])
    last = {**recorded, **batches[-1]}
    verb = "resumed" if resumes else "appended to"
    for name in (*_COMPARED, *_COMPARED_ON_RESUME) if resumes else _COMPARED:
        compared = last if resumes else recorded
        if name not in compared or name not in described:
            continue
        was, now = _recorded(name, compared, described), _complete(name, described)
        if name == "model" and described.get("weights") and "weights" in compared:
            continue  # its content tells, wherever it lies
        if name == "samples" and type(was) is type(now) is int and was < now:
            _check_members_join(out, was, described)
        elif was != now:
            at_least = f"{was} or more" if name == "samples" else "the same"
            raise BadInput(f"{out} was made with {name} {was}, not {now}: it can only be {verb} with {at_least}")
    changed = []
    for name in _CONTENTS:
        if name not in described or name not in last:
            continue
        if name == "task_list":
            changed += _changed_tasks(out, [last, *reversed(batches)], described[name], resumes)
        elif _content(name, last) != _content(name, described):
            changed.append(_CHANGED[name].format_map(described))
    if changed and not accepts:
        raise BadInput(f"{out} was made with {changed[0]}: it can only be {verb} with the same; to accept it: {ACCEPT}")
    return changed


def check_roots(out: Path, recorded: Iterable[Mapping[str, Any]], *, accepts: bool) -> list[str]:
    """The same for the roots of sandboxes, as the journal has them (`SandboxRoots`); those elsewhere are not compared.

    Raises
    ------
    BadInput
        A root has other files than before.
    """
    known = {str(body.get("root")): body.get("digest") for body in recorded}
    changed = [
        f"other files in the sandbox root {root}" for root, was in known.items() if root_digest(root) not in ("", was)
    ]
    if changed and not accepts:
        raise BadInput(f"{out} was made with {changed[0]}: go on with the same; to accept it: {ACCEPT}")
    return changed


def _content(name: str, metadata: Mapping[str, Any]) -> Any:
    """What answers depend on: services may run on more GPUs, or lie elsewhere."""
    if name != "services":
        return metadata[name]
    return [{each: service.get(each) for each in _ANSWERS_DEPEND_ON} for service in metadata[name]]


_ANSWERS_DEPEND_ON = ("name", "backend", "max_tokens", "dtype", "extra_args")
_CHANGED = {
    "weights": "other weights than those that are now in {model}",
    "rewards": "another reward function than that of today",
    "services": "model services that were declared otherwise",
    "service_models": "model services of other weights",
}


def _check_members_join(out: Path, samples: int, described: Mapping[str, Any]) -> None:
    """Refuse new members of groups that were rewarded as a whole."""
    if any(name.endswith("group_reward") for name in described.get("rewards", ())):
        raise BadInput(
            f"{out} was made with samples {samples}, and its groups are rewarded as a whole: no attempt can be added"
        )


def _changed_tasks(out: Path, batches: Sequence[Mapping[str, Any]], now: Mapping[str, Any], resumes: bool) -> list[str]:
    """Tasks of the newest batch that has the same names, if their content is another now.

    Batches that are appended may have other tasks; a batch that is resumed has the same.
    """
    lists = [batch["task_list"] for batch in batches if batch.get("task_list")]
    if resumes and lists and any(lists[0].get(name) != now.get(name) for name in _TOLD_APART):
        raise BadInput(f"{out} was made with {_differing(lists[0], now)}: it can only be resumed with the same")
    known = [each for each in lists if "payload" in each and each.get("digest") == now.get("digest")]
    if known and known[0]["payload"] != now.get("payload"):
        return ["other payloads of the same tasks, such as hidden tests"]
    return []


_TOLD_APART = ("source", "count", "digest", "prefixes")


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if "source" in was or "source" in now:
        return f"tasks from {_told(was)}, not {_told(now)}"
    if was.get("count") != now["count"]:
        return f"{was.get('count')} tasks, not {now['count']}"
    if was.get("digest") == now.get("digest"):
        return "other prefixes of the same tasks"
    return f"{was['count']} other tasks than these {now['count']}"


def _told(tasks: Mapping[str, Any]) -> str:
    return str(tasks.get("source") or f"a list of {tasks.get('count')}")
