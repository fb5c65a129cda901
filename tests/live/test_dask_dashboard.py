"""One test per assumption that `dashboard._dask_dashboard` makes about Dask's dashboard."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Scheduler
from tornado.httpclient import AsyncHTTPClient, HTTPClientError

from heddle_dask.live.scheduler.dashboard import _dask_dashboard as internals
from heddle_dask.live.scheduler.dashboard.registration import TAB, ensure_page
from heddle_dask.live.scheduler.plugin import HeddleScheduler

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def dashboard_of_dask_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Dask's dashboard as it is before our page is registered; another test of the process may have done so."""
    import distributed.dashboard.scheduler as dashboard

    own = {path: page for path, page in dashboard.applications.items() if "heddle" not in path}
    monkeypatch.setattr(dashboard, "applications", own)
    monkeypatch.setattr(dashboard, "template_variables", dashboard.template_variables)
    routes = [each for each in dask.config.get("distributed.scheduler.http.routes") if "heddle" not in each]
    with dask.config.set({"distributed.scheduler.http.routes": routes}):
        yield


def with_scheduler(body: Callable[[Scheduler], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        options.setdefault("dashboard_address", "127.0.0.1:0")
        async with Scheduler(host="127.0.0.1", port=0, **options) as scheduler:
            await body(scheduler)

    asyncio.run(asyncio.wait_for(run(), 60))


async def fetch(scheduler: Scheduler, path: str) -> str:
    port = scheduler.http_server.port
    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}{path}", request_timeout=30)
    return answer.body.decode()


def one_page(scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
    from bokeh.models import Div

    doc.add_root(Div(text="a page of ours", name="ours"))
    doc.theme = internals.dask_theme()
    doc.template = internals.page_template(
        "{% extends 'base.html' %}{% block content %}<p>{{ ours }}</p>{{ plot_script }}{% endblock %}"
    )
    doc.template_variables.update(extra)
    doc.template_variables["ours"] = "text of ours"


def test_routes_modules_are_imported_when_the_scheduler_knows_whether_it_has_a_dashboard(
    tmp_path: Path,
) -> None:
    """In a process of its own: Dask imports its dashboard once per process."""
    (tmp_path / "routes_of_ours.py").write_text(
        "from heddle_dask.live.scheduler.dashboard import _dask_dashboard as internals\n"
        "routes = []\nprint('coming', internals.dashboard_is_coming())\n"
    )
    script = (
        "import asyncio, sys\n"
        "from distributed import Scheduler\n"
        "from heddle_dask.live.scheduler.dashboard import _dask_dashboard as internals\n"
        "internals.import_with_routes('routes_of_ours')\n"
        "internals.import_with_routes('routes_of_ours')\n"
        "async def run():\n"
        "    async with Scheduler(host='127.0.0.1', port=0, dashboard=sys.argv[1] == 'yes',\n"
        "                         dashboard_address='127.0.0.1:0'):\n"
        "        print('bokeh', 'bokeh' in sys.modules)\n"
        "asyncio.run(run())\n"
    )
    for answer, expected in (("yes", "True"), ("no", "False")):
        told = subprocess.run(
            [sys.executable, "-c", script, answer],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert told.stdout.split("\n")[:2] == [f"coming {expected}", f"bokeh {expected}"], told.stderr


def test_a_page_added_before_the_start_is_a_tab_and_a_panel_of_jupyterlab() -> None:
    internals.add_pages({"/ours": one_page, "/individual-ours-alone": one_page}, "/ours")
    internals.add_pages({"/ours": one_page, "/individual-ours-alone": one_page}, "/ours")

    async def body(scheduler: Scheduler) -> None:
        assert internals.serves(scheduler, "/ours")
        assert "text of ours" in await fetch(scheduler, "/ours")
        status = await fetch(scheduler, "/status")
        assert status.count('href="ours"') == 1
        assert "Ours Alone" in status
        assert "/individual-ours-alone" in await fetch(scheduler, "/individual-plots.json")

    with_scheduler(body)


@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
def test_a_page_added_to_a_running_scheduler_is_served_and_has_its_tab_once(prefix: str) -> None:
    async def body(scheduler: Scheduler) -> None:
        await fetch(scheduler, f"{prefix}/status")
        assert internals.has_dashboard(scheduler)
        assert not internals.serves(scheduler, "/later")
        pages = {"/later": one_page, "/individual-later-alone": one_page}
        assert internals.add_pages_to(scheduler, pages, "/later")
        assert internals.serves(scheduler, "/later")
        page = await fetch(scheduler, f"{prefix}/later")
        assert "text of ours" in page
        assert page.count('href="later"') == 1
        status = await fetch(scheduler, f"{prefix}/status")
        assert status.count('href="later"') == 1
        assert 'href="individual-later-alone">Later Alone<' in status
        assert "individual-later" not in await fetch(scheduler, f"{prefix}/individual-plots.json")

    with_scheduler(body, http_prefix=prefix)


def test_assets_are_named_relative_to_the_page_or_by_the_prefix() -> None:
    """Else a proxy that serves the dashboard under another path would not find them."""

    async def body(scheduler: Scheduler) -> None:
        internals.add_pages_to(scheduler, {"/later": one_page}, "/later")
        page = await fetch(scheduler, "/later")
        scripts = [part.split('"')[1] for part in page.split("<script src=")[1:]]
        assert scripts
        assert all(script.startswith("static/") for script in scripts)
        assert "cdn" not in page

    with_scheduler(body)


def test_without_a_dashboard_there_is_nothing_to_add_to() -> None:
    async def body(scheduler: Scheduler) -> None:
        assert not internals.has_dashboard(scheduler)
        assert not internals.add_pages_to(scheduler, {"/later": one_page}, "/later")
        await HeddleScheduler().start(scheduler)
        with pytest.raises(HTTPClientError):
            await fetch(scheduler, TAB)

    with_scheduler(body, dashboard=False)


def test_components_are_updated_while_their_tab_is_open() -> None:
    from bokeh.document import Document

    class Component:
        def update(self) -> None: ...

    doc, component = Document(), Component()
    internals.update_every(doc, component, 123)
    assert [callback.period for callback in doc.session_callbacks] == [123]


def test_roots_that_are_added_together_are_all_in_the_document_with_their_models() -> None:
    from bokeh.document import Document
    from bokeh.layouts import column
    from bokeh.models.widgets import Div

    doc = Document()
    inner = [Div(text="one", name="one"), Div(text="two", name="two")]
    internals.add_roots(doc, [column(inner[0]), column(inner[1])])
    assert len(doc.roots) == 2
    assert [doc.get_model_by_name(name) for name in ("one", "two")] == inner
    inner[0].text = "changed"
    assert "changed" in str(doc.to_json())


def test_the_plugin_adds_the_page_to_a_scheduler_that_runs_without_the_preload() -> None:
    async def body(scheduler: Scheduler) -> None:
        assert not internals.serves(scheduler, TAB)
        plugin = HeddleScheduler()
        await plugin.start(scheduler)
        scheduler.add_plugin(plugin, name="heddle")
        assert "heddle-headline" in await fetch(scheduler, TAB)
        assert ensure_page(scheduler)
        assert (await fetch(scheduler, "/status")).count('href="heddle"') == 1
        assert len(scheduler.http_application.applications) == 2

    with_scheduler(body)


@pytest.mark.parametrize("broken", ["_bokeh_applications", "add_pages_to"])
def test_a_dashboard_that_cannot_show_the_page_does_not_stop_the_scheduler(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise ImportError("No module named 'bokeh'")

    monkeypatch.setattr(internals, broken, fail)

    async def body(scheduler: Scheduler) -> None:
        await HeddleScheduler().start(scheduler)
        assert "<html" in await fetch(scheduler, "/status")

    with_scheduler(body)
    assert "the dashboard has no heddle page" in caplog.text


def test_the_preload_runs_where_bokeh_is_not_installed(tmp_path: Path) -> None:
    """A `bokeh` that cannot be imported stands before the real one."""
    (tmp_path / "bokeh").mkdir()
    (tmp_path / "bokeh" / "__init__.py").write_text("raise ImportError('no bokeh here')\n")
    script = (
        "import asyncio\n"
        "from distributed import Scheduler\n"
        "async def run():\n"
        "    async with Scheduler(host='127.0.0.1', port=0, dashboard=True, dashboard_address='127.0.0.1:0',\n"
        "                         preload='heddle_dask.preload.scheduler') as scheduler:\n"
        "        print('plugins', 'heddle' in scheduler.plugins)\n"
        "asyncio.run(run())\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "plugins True" in told.stdout, told.stderr


def test_the_settings_are_as_before_once_a_module_is_registered_twice() -> None:
    with dask.config.set({"distributed.scheduler.http.routes": ["a"]}):
        internals.import_with_routes("b")
        internals.import_with_routes("b")
        assert dask.config.get("distributed.scheduler.http.routes") == ["a", "b"]
