"""CPU seconds of this process and all that it has started, engines apart from the rest."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from heddle_dask.engines.kinds import ENGINE_KINDS

# Modules in the command lines of engine servers; their workers are their children.
_SERVERS = tuple(kind.server_module for kind in ENGINE_KINDS.values())


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Of engine processes, and of scheduler, workers, tools and driver; of processes that live."""

    engines_s: float
    control_s: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """What was used meanwhile."""
        return CpuSeconds(self.engines_s - before.engines_s, self.control_s - before.control_s)


def cpu_seconds() -> CpuSeconds:
    """What has been used until now."""
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
    """Whether a command line is that of an engine: ``-m`` and its module, not one that only names it."""
    return any(flag == "-m" and module.startswith(_SERVERS) for flag, module in itertools.pairwise(command))
