"""Debian's Chromium without a screen, and what the tests read from the page of the dashboard."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

CHROMIUM = "chromium"
# All data of the page in one turn of the browser's event loop: figures, headings, and what the charts draw.
_READ = """() => {
  const found = {sources: {}, figures: {}, offsets: {}, texts: {}};
  const numbers = (values) => Array.from(values, (value) => value);
  for (const doc of Bokeh.documents) {
    for (const model of doc._all_models.values()) {
      if (!model.name || !model.name.startsWith("heddle-")) continue;
      if (model.type === "ColumnDataSource") {
        found.sources[model.name] =
          Object.fromEntries(Object.entries(model.data).map(([name, column]) => [name, numbers(column)]));
      } else if (model.type === "Div") {
        const block = document.createElement("div");
        block.innerHTML = model.text;
        found.texts[model.name] = block.textContent;
        for (const each of block.querySelectorAll("[data-figure]"))
          found.figures[each.dataset.figure] = Number(each.dataset.value);
        for (const each of block.querySelectorAll("[data-cause]"))
          found.figures[each.dataset.boundary + ": " + each.dataset.cause] = Number(each.dataset.value);
        for (const each of block.querySelectorAll(".heddle-offset"))
          found.offsets[each.dataset.panel] = Number(each.dataset.offset);
      }
    }
  }
  return found;
}"""


@dataclass
class Seen:
    """What went wrong in a tab, and where it sent requests."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(f"page error: {error}"))
        page.on("request", self._request)
        page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url}"))
        page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).hostname or ""))
        page.on(
            "response",
            lambda response: response.status >= 400 and self.errors.append(f"{response.status}: {response.url}"),
        )

    def _console(self, message: ConsoleMessage) -> None:
        # Warnings come from Dask's own pages, too.
        if message.type == "error":
            self.errors.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.hosts.add(urlsplit(request.url).hostname or "")


def chromium_path() -> str:
    """Debian's Chromium; a test that needs it is skipped where it is not installed."""
    found = shutil.which(CHROMIUM)
    if found is None:
        pytest.skip("Chromium is not installed: sh scripts/install_browser.sh")
    return found


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Root has no sandbox of its own; shared memory of a container is small.
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


async def read_page(page: Page) -> dict[str, Any]:
    """The figures of the page, all of one snapshot."""
    for _ in range(400):
        found: dict[str, Any] = await page.evaluate(_READ)
        if found["offsets"] and len(set(found["offsets"].values())) == 1:
            return found
        await page.wait_for_timeout(5)
    raise AssertionError(f"the panels never showed one snapshot: {found['offsets']}")
