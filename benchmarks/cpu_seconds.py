"""CPU seconds of this process and all its descendants, with engines counted separately."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from heddle_dask.engines.spec import ENGINE_KINDS, engine_kind

# Modules in the command lines of engine servers; their workers are child processes.
_SERVERS = tuple(engine_kind(name).server_module for name in ENGINE_KINDS)


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds of engine processes, and of scheduler, workers, tools and driver; running processes only."""

    engines_s: float
    control_s: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """CPU seconds used since `before`."""
        return CpuSeconds(self.engines_s - before.engines_s, self.control_s - before.control_s)


def cpu_seconds() -> CpuSeconds:
    """CPU seconds used until now."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    engines: set[int] = set()
    engines_s = control_s = 0.0
    # Parents come before their children.
    for process in processes:
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            if is_server(process.cmdline()) or process.ppid() in engines:
                engines.add(process.pid)
                engines_s += used.user + used.system
            else:
                control_s += used.user + used.system
    return CpuSeconds(engines_s, control_s)


def is_server(command: Sequence[str]) -> bool:
    """Whether a command line starts an engine: ``-m`` and its module, not only a mention of it."""
    return any(flag == "-m" and module.startswith(_SERVERS) for flag, module in itertools.pairwise(command))
