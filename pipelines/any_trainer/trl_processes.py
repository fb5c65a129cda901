"""TRL in one process or in many, as ``accelerate launch`` starts them: one script, one cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final

import torch.distributed
from accelerate import PartialState

from heddle_dask.core.errors import BadInput, one_line_of
from heddle_dask.training.trl_rollouts import MainFailed, OneProcess, TrainerProcesses, TrlRollouts, TrlSampler

# What launchers set for the processes of a trainer: an engine that inherits it takes itself for one of them.
_OF_LAUNCHER: Final = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    | {f"{group}WORLD_SIZE" for group in ("", "LOCAL_", "GROUP_", "ROLE_")}
)
_PREFIXES: Final = ("ACCELERATE_", "TORCHELASTIC_")
_NEVER: Final = timedelta(days=30)


@contextlib.contextmanager
def trl_rollouts(
    opened: Callable[[], AbstractContextManager[TrlSampler]], engine_gpus: str | None = None
) -> Iterator[TrlRollouts]:
    """The rollout function of this process; every process of the trainer calls this.

    Parameters
    ----------
    opened
        Opens the cluster and the rollout, as a context whose value is a `TrlEngines`. Called in the main process
        alone, without what a launcher has set in its environment.
    engine_gpus
        ``CUDA_VISIBLE_DEVICES`` of what `opened` starts, such as ``"4,5,6,7"``: other GPUs of this machine than the
        trainer's. None: as in this process.

    Raises
    ------
    BadInput
        The main process could not open them.
    """
    state = PartialState()
    processes: TrainerProcesses = AcceleratedProcesses(state) if state.num_processes > 1 else OneProcess()
    if not state.is_main_process:
        answer = processes.scatter([])
        if isinstance(answer, MainFailed):
            raise BadInput(f"TRL: the main process has failed: {answer.line}")
        yield TrlRollouts(None, processes)
        return
    with contextlib.ExitStack() as stack:
        try:
            with _environment(engine_gpus):
                rollouts = TrlRollouts(stack.enter_context(opened()), processes)
        except BaseException as error:
            processes.scatter([MainFailed(one_line_of(error))] * state.num_processes)
            raise
        processes.scatter([None] * state.num_processes)
        yield rollouts


class AcceleratedProcesses:
    """Implements `training.trl_rollouts.TrainerProcesses` over the processes that accelerate knows.

    A process group of its own, on the CPU, without a time limit: while the main process rolls out, the others wait for
    as long as that takes. When one ends, so does the connection, and the launcher ends the others.
    """

    def __init__(self, state: PartialState) -> None:
        self._is_main = state.is_main_process
        self._count = state.num_processes
        self._group = torch.distributed.new_group(backend="gloo", timeout=_NEVER)

    def gather(self, mine: list[str]) -> list[list[str]]:
        found: list[Any] = [None] * self._count
        torch.distributed.gather_object(mine, found if self._is_main else None, dst=0, group=self._group)
        return found if self._is_main else []

    def scatter(self, shares: Sequence[Any]) -> Any:
        received = [None]
        given = list(shares) if self._is_main else None
        torch.distributed.scatter_object_list(received, given, src=0, group=self._group)
        return received[0]


@contextlib.contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """The environment of what is started here: as before the launcher, and with these GPUs."""
    before = dict(os.environ)
    for name in before:
        if name in _OF_LAUNCHER or name.startswith(_PREFIXES):
            del os.environ[name]
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
