"""Takes the images of docs/dashboard.md: the page with a simulated rollout, in Debian's Chromium.

Usage: python -m scripts.dashboard_images FOLDER [SIZE...]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image, ImageColor
from playwright.async_api import Browser, async_playwright

from benchmarks.dashboard_demo import PlayedRun, demo_dashboard
from benchmarks.dashboard_run import simulated_run
from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.pages import PANELS

# Share of the trajectories that have ended: the middle of a small rollout, and the beginning of a large one.
MOMENTS = {10: 0.3, 500: 0.5, 10_000: 0.35}
COLOURS = [
    *style.PHASE_COLOURS.values(),
    style.FREE,
    style.LIVE,
    style.ENDED,
    style.FAILURE,
    style.EDGE,
    style.QUIET,
]
SETTLED_MS = 2500


async def take(browser: Browser, url: str, folder: Path, name: str, panels: Sequence[str]) -> None:
    """The whole page, and each of these panels alone."""
    page = await browser.new_page(viewport={"width": 1500, "height": 1000})
    page.on("console", lambda message: message.type == "error" and print("console:", message.text))
    await page.goto(url)
    await page.wait_for_timeout(SETTLED_MS)
    await page.screenshot(path=folder / f"dashboard-{name}.png", full_page=True)
    shrink(folder / f"dashboard-{name}.png")
    for panel in panels:
        path = folder / f"dashboard-panel-{panel}.png"
        await page.locator(f".heddle-page > .heddle-{panel}").screenshot(path=path)
        shrink(path)
    await page.close()


def shrink(path: Path) -> None:
    """Give the image a palette: a third of the bytes. All colours of the page are in it, however few their pixels."""
    with Image.open(path) as image:
        drawn = image.convert("RGB")
    most_frequent = drawn.quantize(200, dither=Image.Dither.NONE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(most_frequent[: 3 * 200] + [part for colour in COLOURS for part in ImageColor.getrgb(colour)])
    drawn.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


async def main(folder: Path, sizes: list[int]) -> None:
    """The page with every size, and each panel of the middle one."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Chromium is not installed: sh scripts/install_browser.sh")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=arguments)
        for size in sizes:
            pairs = simulated_run(size) if size else []
            moment_s = PlayedRun(pairs, lambda: 0.0).ended_s(MOMENTS.get(size, 0.5))
            panels = [panel.name for panel in PANELS] if size == 500 else []
            async with demo_dashboard(PlayedRun(pairs, partial(float, moment_s))) as url:
                await take(browser, url, folder, str(size or "empty"), panels)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]] or [0, *MOMENTS]))
