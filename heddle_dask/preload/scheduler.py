"""Preload for schedulers: ``dask scheduler --preload heddle_dask.preload.scheduler``.

Registers the plugin before the first client comes; a client that registers it again changes nothing. The page in the
dashboard is registered when this is imported, before the dashboard starts.
"""

from __future__ import annotations

from distributed import Scheduler

from heddle_dask.live.scheduler.dashboard.registration import register
from heddle_dask.live.scheduler.plugin import PLUGIN_NAME, HeddleScheduler

register()


async def dask_setup(scheduler: Scheduler) -> None:
    """Add the plugin, once."""
    if PLUGIN_NAME not in scheduler.plugins:
        plugin = HeddleScheduler()
        await plugin.start(scheduler)
        scheduler.add_plugin(plugin, name=PLUGIN_NAME)
