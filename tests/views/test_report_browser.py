"""The report in a real browser: no error, no request, and its table, theme and saved charts work."""

from __future__ import annotations

import os
import re
import shutil
import xml.dom.minidom
from pathlib import Path

import pytest
from worlds.run_builders import outline_of, session_of, timed_trajectory

from heddle_dask.views.report.run_figures import RunFigures
from heddle_dask.views.report.run_report import About, run_report

playwright = pytest.importorskip("playwright.sync_api")


@pytest.mark.slow
def test_the_report_works_in_a_browser(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    records = [timed_trajectory(number, steps=1 + number % 9) for number in range(60)]
    figures = RunFigures([session_of(records)], one_clock=True)
    for record in records:
        figures.add(outline_of(record))
    path = tmp_path / "report.html"
    path.write_text(run_report(figures, About("run.zarr", [("trajectories", "60")], {})), encoding="utf-8")
    said: list[str] = []
    asked: list[str] = []
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(color_scheme="dark", accept_downloads=True)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())

        def paper() -> str:
            return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

        dark = paper()
        page.click("#theme")
        light = paper()
        assert (dark, light) == ("rgb(22, 24, 29)", "rgb(255, 255, 255)")
        rows = page.locator("#rows tbody tr")
        assert rows.count() == 25 and page.inner_text("#rows-count") == "1 to 25 of 60"
        page.click("#rows th:has-text('steps')")
        steps = page.locator("#rows th").all_inner_texts().index("steps")
        assert [rows.nth(0).locator("td").nth(steps).inner_text() for _ in range(1)] == ["9"]
        page.click("#rows th:has-text('steps')")
        assert rows.nth(0).locator("td").nth(steps).inner_text() == "1"
        page.click("#rows-after")
        page.click("#rows-after")
        assert page.inner_text("#rows-count") == "51 to 60 of 60" and rows.count() == 10
        page.fill("#rows-search", "t59")
        assert (
            page.inner_text("#rows-count") == "1 to 1 of 1" and rows.nth(0).locator("td").nth(0).inner_text() == "t59"
        )
        with page.expect_download() as downloaded:
            page.locator("figure:has(svg) .save").nth(1).click()
        saved = Path(downloaded.value.path()).read_text(encoding="utf-8")
        name = downloaded.value.suggested_filename
        browser.close()
    assert said == [] and [url for url in asked if not url.startswith(("file:", "blob:"))] == []
    assert name == "timeline-of-trajectories.svg"
    xml.dom.minidom.parseString(saved)
    assert "var(" not in saved and re.search(r'fill="#0072b2"', saved)
