"""Takes the images of docs/dashboard.md: the page with a simulated rollout, in Debian's Chromium.

Usage: python scripts/dashboard_images.py FOLDER [SIZE...]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.async_api import Browser, async_playwright

from heddle_dask.benchmarks.dashboard_demo import PlayedRun, demo_dashboard
from heddle_dask.benchmarks.dashboard_run import simulated_run
from heddle_dask.live.scheduler.dashboard.pages import PANELS

WIDE = {"width": 1500, "height": 1000}
# Share of the trajectories that have ended: the middle of a small rollout, and the beginning of a large one.
MOMENTS = {10: 0.3, 500: 0.5, 10_000: 0.35}
SETTLED_MS = 2500


async def take(browser: Browser, url: str, path: Path, selector: str | None = None) -> None:
    """One image: of the whole page, or of what the selector finds."""
    page = await browser.new_page(viewport=WIDE)  # type: ignore[arg-type]
    page.on("console", lambda message: message.type == "error" and print("console:", message.text))
    await page.goto(url)
    await page.wait_for_timeout(SETTLED_MS)
    if selector is None:
        await page.screenshot(path=path, full_page=True)
    else:
        await page.locator(selector).screenshot(path=path)
    await page.close()
    with Image.open(path) as image:
        image.convert("RGB").save(path, optimize=True)
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
            run = PlayedRun(simulated_run(size) if size else [], lambda: 0.0)
            moment_s = run.ended_s(MOMENTS.get(size, 0.5))
            async with demo_dashboard(PlayedRun(run.pairs, lambda moment_s=moment_s: moment_s)) as url:  # type: ignore[misc]
                await take(browser, url, folder / f"dashboard-{size or 'empty'}.png")
                if size == 500:
                    for panel in PANELS:
                        path = folder / f"dashboard-panel-{panel.name}.png"
                        await take(browser, url, path, f".heddle-page > .heddle-{panel.name}")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]] or [0, *MOMENTS]))
