"""The identity of a prompt: the same in every process, epoch and run, so that attempts at it can be compared."""

from __future__ import annotations

from hashlib import blake2b

from heddle_dask.environments.base import Task


def prompt_key(environment: str, task: Task) -> str:
    """A digest of what a task asks for: the environment's name, the prompt, and the payload that goes with it.

    The task's group and id count only for a task without prompt and payload: many environments number their tasks
    in every run again.
    """
    payload = dict(task.payload)
    named = "" if task.prompt or payload else task.group or task.task_id
    text = repr((environment, task.prompt, payload, named))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
