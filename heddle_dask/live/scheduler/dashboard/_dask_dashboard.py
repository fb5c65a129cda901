"""Everything that the page uses of Dask's dashboard and that is not documented.

`tests/live/test_dask_dashboard.py` has a test per assumption made here: when a new release of `distributed` or `bokeh`
breaks one, that test says which. Nothing here imports Bokeh before the dashboard has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dask
from distributed import Scheduler

# Called with the scheduler, the template's variables and a Bokeh document, once per opened tab.
PageFunction = Callable[[Scheduler, Mapping[str, Any], Any], None]

_ROUTES = "distributed.scheduler.http.routes"
_DASHBOARD = "distributed.dashboard.scheduler"


def import_with_routes(module: str) -> None:
    """Have schedulers of this process import `module` while they set up their HTTP server.

    At that moment `dashboard_is_coming` is known. The module needs a list `routes`.
    """
    modules = list(dask.config.get(_ROUTES))
    if module not in modules:
        dask.config.set({_ROUTES: [*modules, module]})


def dashboard_is_coming() -> bool:
    """Whether a scheduler of this process serves a dashboard: it imports the dashboard before all routes."""
    return _DASHBOARD in sys.modules


def add_pages(pages: Mapping[str, PageFunction], tab: str) -> None:
    """Have every dashboard that starts later serve these pages, by path, with a tab for one of them."""
    import distributed.dashboard.scheduler as dashboard

    if tab in dashboard.applications:
        return
    dashboard.applications.update(pages)
    variables = dashboard.template_variables

    def with_tab(scheduler: Scheduler) -> dict[str, Any]:
        found: dict[str, Any] = variables(scheduler)
        _add_tab(found, tab)
        return found

    dashboard.template_variables = with_tab


def has_dashboard(scheduler: Scheduler) -> bool:
    return bool(_bokeh_applications(scheduler))


def serves(scheduler: Scheduler, path: str) -> bool:
    """Whether the dashboard of a running scheduler has this page."""
    return any(path in app.app_paths for app in _bokeh_applications(scheduler))


def add_pages_to(scheduler: Scheduler, pages: Mapping[str, PageFunction], tab: str) -> bool:
    """Add pages to the dashboard of a running scheduler; False if it has no dashboard.

    They are served, and have their tab and their lines under "More...". But `individual-plots.json`, which JupyterLab
    reads, lists only pages with which the dashboard started.
    """
    before = _bokeh_applications(scheduler)
    if not before:
        return False
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables

    variables = template_variables(scheduler)
    _add_tab(variables, tab)
    _add_panels(variables, pages)
    application = BokehApplication(pages, scheduler, prefix=before[0].prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(scheduler.io_loop)
    application.start()
    return True


def page_template(source: str) -> Any:
    """A Jinja template that may extend Dask's ``base.html``, which has the navigation bar."""
    from distributed.dashboard.components.scheduler import env

    return env.from_string(source)


def dask_theme() -> Any:
    """The theme of Dask's own pages."""
    from distributed.dashboard.components.scheduler import BOKEH_THEME

    return BOKEH_THEME


def add_roots(doc: Any, roots: Iterable[Any]) -> None:
    """Add models to a document; it looks for their references once, and not once for each of them."""
    with doc.models.freeze():
        for root in roots:
            doc.add_root(root)


def argument(doc: Any, name: str) -> str:
    """An argument of the page's address; empty without one."""
    context = doc.session_context
    values = [] if context is None else context.request.arguments.get(name, [])
    return values[0].decode(errors="replace") if values else ""


def update_every(doc: Any, component: Any, interval_ms: int) -> None:
    """Call ``component.update()`` every `interval_ms`, for as long as the tab is open."""
    from distributed.dashboard.components import add_periodic_callback

    add_periodic_callback(doc, component, interval_ms)


def _bokeh_applications(scheduler: Scheduler) -> list[Any]:
    applications = scheduler.http_application.applications
    return [application for application in applications if hasattr(application, "app_paths")]


def _add_tab(variables: dict[str, Any], tab: str) -> None:
    """Put the tab before the last one, which is Dask's list of workers, in the list that all its pages share."""
    pages, name = variables["pages"], tab.strip("/")
    if name not in pages:
        pages.insert(len(pages) - 1, name)


def _add_panels(variables: dict[str, Any], pages: Mapping[str, PageFunction]) -> None:
    """List the panels in the menu of all pages, as Dask does for those with which it starts."""
    for path in pages:
        if path.startswith("/individual-"):
            name = " ".join(path.split("-")[1:]).title()
            variables["plots"].append({"url": path.strip("/"), "name": name})
