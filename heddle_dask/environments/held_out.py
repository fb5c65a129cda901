"""Which tasks a training trains on, and which it is judged by."""

from __future__ import annotations

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.loading import BUILT_IN, SPLITS

_WITHOUT_SPLITS = ("replay",)


def training_name(env: str) -> str:
    """The name of an environment with its tasks for training: ``math:hard`` is ``math:hard:train``.

    A user's environment has one kind of tasks and keeps its name.

    Raises
    ------
    BadInput
        It names held-out tasks, or a recorded trace.
    """
    words = env.split(":")
    if words[0] not in BUILT_IN:
        return env
    if words[0] in _WITHOUT_SPLITS:
        raise BadInput(f"--env {env}: a recorded trace has no policy to train: use an environment")
    if "test" in words[1:]:
        raise BadInput(f"--env {env}: these are the held-out tasks: leave :test away")
    return env if "train" in words[1:] else f"{env}:train"


def held_out_name(env: str) -> str:
    """The name of the same environment with its held-out tasks: ``math:hard:train`` is ``math:hard``.

    A user's environment keeps its name: other seeds draw its held-out tasks.
    """
    words = env.split(":")
    if words[0] not in BUILT_IN:
        return env
    return ":".join(word for word in words if word not in SPLITS)
