"""How the page gets into the Dask dashboard. Nothing here can stop a scheduler: without Bokeh there is no page."""

from __future__ import annotations

import logging

from distributed import Scheduler

from heddle_dask.live.scheduler.dashboard import _dask_dashboard as dask

TAB = "/heddle"
_ROUTES_MODULE = "heddle_dask.live.scheduler.dashboard.routes"
_log = logging.getLogger(__name__)


def register() -> None:
    """Have the schedulers that this process starts later serve the page; called by the preload at import.

    The dashboard then knows the page from its start, so that JupyterLab lists its panels.
    """
    try:
        dask.import_with_routes(_ROUTES_MODULE)
    except Exception:
        _log.warning("the dashboard has no heddle page", exc_info=True)


def add_to_coming_dashboard() -> None:
    """Add the page if a dashboard is about to start in this process."""
    try:
        if dask.dashboard_is_coming():
            from heddle_dask.live.scheduler.dashboard.pages import PAGES

            dask.add_pages(PAGES, TAB)
    except Exception:
        _log.warning("the dashboard has no heddle page", exc_info=True)


def ensure_page(scheduler: Scheduler) -> bool:
    """Add the page to the dashboard of a running scheduler that was started without our preload.

    Returns whether the scheduler serves the page: False without a dashboard, and without Bokeh.
    """
    try:
        if dask.serves(scheduler, TAB):
            return True
        if not dask.has_dashboard(scheduler):
            return False
        from heddle_dask.live.scheduler.dashboard.pages import PAGES

        return dask.add_pages_to(scheduler, PAGES, TAB)
    except Exception:
        _log.warning("the dashboard has no heddle page", exc_info=True)
        return False
