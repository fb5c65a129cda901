"""Settings of Python's garbage collector for processes that must answer within milliseconds or hold many objects."""

from __future__ import annotations

import gc

# Thresholds of generations 0, 1 and 2 (`gc.set_threshold`). Python's defaults are 700, 10 and 10.
_THRESHOLDS = (20_000, 20, 20)


def collect_seldom() -> None:
    """Exclude loaded modules from collection and collect the rest less often; call it once after start-up.

    A full collection stops a process that has loaded Dask for 40 ms, every few seconds while messages arrive. It was
    most of the 99th percentile of a step's latency (experiments.md, step latency). Reference counts free nearly all
    garbage of a message; cycles are still collected, later. The same holds for a simulation, which keeps many plans
    until its end.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
