"""The pages: all panels under `/heddle`, and each panel alone under `/individual-heddle-…`, for JupyterLab."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Scheduler

from heddle_dask.live.scheduler.dashboard import _dask_dashboard as dask
from heddle_dask.live.scheduler.dashboard.panel import Panel
from heddle_dask.live.scheduler.dashboard.panels.actions import ActionsPanel
from heddle_dask.live.scheduler.dashboard.panels.engines import EnginesPanel
from heddle_dask.live.scheduler.dashboard.panels.failures import FailuresPanel
from heddle_dask.live.scheduler.dashboard.panels.headline import Headline
from heddle_dask.live.scheduler.dashboard.panels.lengths import LengthsPanel
from heddle_dask.live.scheduler.dashboard.panels.live import LivePanel
from heddle_dask.live.scheduler.dashboard.panels.moves import MovesPanel
from heddle_dask.live.scheduler.dashboard.panels.timeline import TimelinePanel
from heddle_dask.live.scheduler.dashboard.panels.training import TrainingPanel
from heddle_dask.live.scheduler.dashboard.view import Views
from heddle_dask.views.history.history_pictures import picture_of_run
from heddle_dask.views.history.run_snapshot import RunSnapshot

PANELS: tuple[type[Panel], ...] = (
    Headline,
    EnginesPanel,
    LivePanel,
    TimelinePanel,
    LengthsPanel,
    ActionsPanel,
    FailuresPanel,
    MovesPanel,
    TrainingPanel,
)
# The snapshot itself is taken at its own interval; a tab only looks whether there is a new one.
LOOK_EVERY_MS = 250

PLUGIN_NAME = "heddle"

_log = logging.getLogger(__name__)
# Of the latest snapshot of each scheduler, common to all tabs; those of one run beside them, by its name.
_views: WeakKeyDictionary[Scheduler, dict[str, Views]] = WeakKeyDictionary()
_MOST_FILTERS = 16


class OpenPage:
    """The panels of one tab, which always show the same snapshot."""

    def __init__(self, scheduler: Scheduler, panels: Sequence[Panel], run: str = "") -> None:
        self.panels = panels
        self._run = run  # name or session of the run that is looked at; empty: all
        self._scheduler = scheduler
        self._shown: RunSnapshot | None = None
        self._failed = False

    def update(self) -> None:
        """Show the latest snapshot, if it is a new one. After a failure, which is logged, the tab stays as it is."""
        if self._failed:
            return
        try:
            self._update()
        except Exception:
            self._failed = True
            _log.exception("a tab of the heddle page is not updated any more")

    def _update(self) -> None:
        plugin: Any = self._scheduler.plugins.get(PLUGIN_NAME)
        snapshot: RunSnapshot | None = None if plugin is None else plugin.snapshots.latest()
        if snapshot is None or snapshot is self._shown:
            return
        views, shown = _views_of(self._scheduler, self._run), snapshot
        if self._run:
            with contextlib.suppress(KeyError):  # it has ended: the page shows what there is
                shown = picture_of_run(snapshot, self._run)
        # The first panel is the headline. It comes last: the offset there tells that all others have arrived.
        for panel in reversed(self.panels):
            panel.show(views.of(type(panel).make, shown), shown)
        self._shown = snapshot


def _views_of(scheduler: Scheduler, run: str) -> Views:
    of_runs = _views.setdefault(scheduler, {})
    if run not in of_runs and len(of_runs) > _MOST_FILTERS:
        del of_runs[next(iter(of_runs))]
    return of_runs.setdefault(run, Views())


def heddle_page(scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
    """The page of the tab; with ``?run=NAME`` that of one run."""
    asked = dask.argument(doc, "run")
    page = OpenPage(scheduler, [panel() for panel in PANELS], asked)
    _fill(doc, page)
    doc.title = "Dask: Heddle"
    doc.template = _template()
    doc.template_variables.update(extra)
    doc.template_variables["heddle_panels"] = [panel.name for panel in page.panels]


def panel_page(panel: type[Panel], scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
    _fill(doc, OpenPage(scheduler, [panel()]))
    doc.title = f"Dask: Heddle: {panel.title}"


def _fill(doc: Any, page: OpenPage) -> None:
    page.update()
    dask.update_every(doc, page, LOOK_EVERY_MS)
    dask.add_roots(doc, [panel.root for panel in page.panels])
    doc.theme = dask.dask_theme()


@lru_cache(maxsize=1)
def _template() -> Any:
    return dask.page_template((Path(__file__).parent / "page.html").read_text())


PAGES: Mapping[str, Callable[[Scheduler, Mapping[str, Any], Any], None]] = {
    "/heddle": heddle_page,
    **{f"/individual-heddle-{panel.name}": partial(panel_page, panel) for panel in PANELS},
}
