"""What a script sees of a rollout on stderr."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from heddle_dask.live.driver.runs import progress
from heddle_dask.live.driver.runs.shown_progress import ShownProgress

COUNTS = {"finished": 1, "generating": 2, "tokens": 30}


async def _shown(shown: ShownProgress, until: Any = lambda: True) -> None:
    shown.note("an engine answers")
    shown.expect(4)
    async with shown.following(lambda: COUNTS):
        for number in range(2):
            failed = {"status": "failed", "cause": "agent", "detail": "KeyError: 3", "trajectory_id": f"t{number}"}
            shown.ended(SimpleNamespace(**failed, group_id="g", reward=None))  # type: ignore[arg-type]
        while not until():
            await asyncio.sleep(0.01)


def test_lines_go_to_stderr_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.01)
    seen: list[str] = []

    def told() -> bool:
        seen.append(capsys.readouterr().err)
        return "done 1/4" in "".join(seen)

    asyncio.run(_shown(ShownProgress(True), told))
    out, err = capsys.readouterr()
    text = "".join([*seen, err])
    assert out == "" and "an engine answers" in text
    assert "done 1/4 · 2 running" in text and "done 1/4 · 0 running" in text.splitlines()[-1]
    assert text.count("failed by") == 1 and "t0 failed by agent: KeyError: 3" in text


@pytest.mark.parametrize("is_silent", [False, True])
def test_silence_and_lines_of_ones_own(capsys: pytest.CaptureFixture[str], is_silent: bool) -> None:
    lines: list[str] = []
    asyncio.run(_shown(ShownProgress(False if is_silent else lines.append)))
    assert lines == ([] if is_silent else ["an engine answers"])
    assert capsys.readouterr() == ("", "")


BATCH = """
import asyncio
from types import SimpleNamespace
from heddle_dask.live.driver.runs.shown_progress import ShownProgress
shown = ShownProgress(True)
shown.expect(4)
counts = {"finished": 0, "generating": 2, "tokens": 30}
async with shown.following(lambda: counts):
    await asyncio.sleep(0)
    shown.ended(SimpleNamespace(status="completed", group_id="g", reward=1.0))
    counts.update(finished=1)
"""


def test_a_notebook_has_a_bar() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    messages: list[dict[str, Any]] = []
    try:
        answer = client.execute_interactive(BATCH, timeout=60, output_hook=messages.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    assert answer["content"]["status"] == "ok", answer["content"]
    shown = [m["content"] for m in messages if m["msg_type"] in ("display_data", "update_display_data")]
    assert len(shown) > 1 and len({content["transient"]["display_id"] for content in shown}) == 1
    assert shown[0]["data"]["text/html"].startswith('<progress max="4" value="0"></progress> done 0/4')
    assert shown[-1]["data"]["text/html"].startswith('<progress max="4" value="1"></progress> done 1/4 · 0 running')
