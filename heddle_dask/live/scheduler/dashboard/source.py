"""Where the pages of a scheduler get what they show: one snapshot, and its views, for all open tabs."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from distributed import Scheduler

from heddle_dask.live.scheduler.dashboard.view import Views
from heddle_dask.views.history.run_snapshot import RunSnapshot

PLUGIN_NAME = "heddle"

_views: WeakKeyDictionary[Scheduler, Views] = WeakKeyDictionary()


def latest_snapshot(scheduler: Scheduler) -> RunSnapshot | None:
    """The latest snapshot of the plugin; None if there is no plugin."""
    plugin: Any = scheduler.plugins.get(PLUGIN_NAME)
    return None if plugin is None else plugin.snapshots.latest()


def views_of(scheduler: Scheduler) -> Views:
    """The views of the latest snapshot, common to all tabs."""
    return _views.setdefault(scheduler, Views())
