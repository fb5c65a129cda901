"""Trainers of others in one process or in many, as launchers start them: one script, one cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from accelerate import PartialState

from heddle_dask.training.trainer_processes import OneProcess, TrainerProcesses, TrainerSampler, handed_out
from heddle_dask.training.trl_rollouts import TrlRollouts

# What launchers set for the processes of a trainer: an engine that inherits it takes itself for one of them.
_OF_LAUNCHER: Final = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    | {f"{group}WORLD_SIZE" for group in ("", "LOCAL_", "GROUP_", "ROLE_")}
)
_PREFIXES: Final = ("ACCELERATE_", "TORCHELASTIC_")
_NEVER: Final = timedelta(days=30)


@contextlib.contextmanager
def trl_rollouts(
    opened: Callable[[], AbstractContextManager[TrainerSampler]], engine_gpus: str | None = None
) -> Iterator[TrlRollouts]:
    """The rollout function of this process, for TRL; the parameters are those of `main_process_engines`."""
    with main_process_engines(opened, engine_gpus) as (sampler, processes):
        yield TrlRollouts(sampler, processes)


@contextlib.contextmanager
def main_process_engines(
    opened: Callable[[], AbstractContextManager[TrainerSampler]], engine_gpus: str | None = None
) -> Iterator[tuple[TrainerSampler | None, TrainerProcesses]]:
    """The engines, in the main process alone, and the way to the other processes; every process calls this.

    Parameters
    ----------
    opened
        Opens the cluster and the rollout, as a context whose value is a `FollowingEngines`. Called in the main process
        alone, without what a launcher has set in its environment.
    engine_gpus
        ``CUDA_VISIBLE_DEVICES`` of what `opened` starts, such as ``"4,5,6,7"``: other GPUs of this machine than the
        trainer's. None: as in this process.

    Raises
    ------
    BadInput
        The main process could not open them.
    """
    state = PartialState(cpu=not torch.accelerator.is_available())
    processes: TrainerProcesses = AcceleratedProcesses(state) if state.num_processes > 1 else OneProcess()
    with contextlib.ExitStack() as stack:
        engines: list[TrainerSampler] = []

        def shares() -> list[None]:
            with _environment(engine_gpus):
                engines.append(stack.enter_context(opened()))
            return [None] * processes.count

        handed_out(processes, shares if state.is_main_process else None)
        yield (engines[0] if engines else None), processes


class AcceleratedProcesses:
    """Implements `training.trainer_processes.TrainerProcesses` over the processes that accelerate knows.

    A process group of its own, on the CPU, without a time limit: while the main process rolls out, the others wait for
    as long as that takes. When one ends, so does the connection, and the launcher ends the others.
    """

    def __init__(self, state: PartialState) -> None:
        self._is_main = state.is_main_process
        self.count = state.num_processes
        self._group = torch.distributed.new_group(backend="gloo", timeout=_NEVER)

    def gather(self, mine: list[str]) -> list[list[str]]:
        found: list[Any] = [None] * self.count
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
