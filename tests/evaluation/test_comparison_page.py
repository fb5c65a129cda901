"""The page of an evaluation: arms side by side at each task; names cannot become HTML; it works in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.record_builders import plain_trajectory

from heddle_dask.evaluation.attempt_outcomes import AttemptOutcome, outcome_of
from heddle_dask.evaluation.comparison_page import comparison_page
from heddle_dask.evaluation.estimates import evaluated_arm

HOSTILE = '<script>alert("x")</script>\'&</title>'


def attempt(task: str, reward: float | None, **facts: Any) -> AttemptOutcome:
    return replace(outcome_of(plain_trajectory(0)), task_id=task, reward=reward, **facts)


def the_page(name: str = "b") -> str:
    first = evaluated_arm("a", [attempt(f"t{n}", float(n % 2)) for n in range(40) for _ in range(2)], (1, 2))
    failed = {"status": "failed", "cause": "agent", "detail": name}
    others = [attempt(f"t{n}", 1.0, domain="hard") for n in range(1, 40)]
    second = evaluated_arm(name, [attempt("t0", None, **failed), *others], (1, 2))
    return comparison_page("runs/ev", [first, second], 1.0)


def test_the_page_tells_the_arms_apart_task_by_task() -> None:
    page = the_page()
    assert "50.0 [35, 65]" in page and "97.5 [92, 100]" in page
    assert "47.5 [32, 62]" in page and "Pass@1 less that of a" in page
    assert "1 failed by agent" in page
    found = re.search(r'id="rows-data">(.*?)</script>', page)
    assert found is not None
    rows = json.loads(found[1])
    names = [column["name"] for column in rows["columns"]]
    assert names[2:6] == ["apart", "a", "b", "a: samples"]
    assert len(rows["rows"]) == 40 and rows["rows"][0][:4] == ["t0", "", 0.0, 0.0]


def test_names_and_messages_stay_text() -> None:
    page = the_page(HOSTILE)
    assert HOSTILE not in page and page.count("</script>") == 2


@pytest.mark.slow
def test_the_page_sorts_tasks_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    path = tmp_path / "index.html"
    path.write_text(the_page(HOSTILE), encoding="utf-8")
    said: list[str] = []
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        page.click("#rows th:has-text('apart')")
        assert page.locator("#rows tbody tr").first.locator("td").nth(2).inner_text() == "1.00"
        page.fill("#rows-search", "hard")
        assert page.inner_text("#rows-count") == "none"  # the first arm gives the domain of a task
        page.fill("#rows-search", "t39")
        assert page.inner_text("#rows-count") == "1 to 1 of 1"
        browser.close()
    assert not said
