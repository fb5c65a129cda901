"""The names of the faults; the faults themselves import Dask."""

from __future__ import annotations

NAMES = (
    "none",
    "tmp-full",
    "tmp-stays-full",
    "disk-full",
    "disk-read-only",
    "few-files",
    "clock-ahead",
    "clock-back",
    "tenth-fails",
    "net-cut",
    "net-cut-for-good",
    "net-slow",
    "net-loss",
    "addresses",
    "engine-killed",
    "engine-stopped",
    "rollout-killed",
    "rollout-stopped",
    "tool-killed",
    "tool-stopped",
    "scheduler-killed",
    "scheduler-stopped",
)
