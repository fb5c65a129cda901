"""Prompts at once, on an emulated engine whose cost says what they must take."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.bursts import Burst, bursts, bursts_that_fit
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec


def test_points_fit_the_slots_the_context_and_the_memory() -> None:
    points = list(bursts_that_fit(capacity_tokens=40_000, slots=16, context_tokens=2_000))
    assert Burst(16, 0, 256) in points and Burst(16, 1024, 16) in points
    assert all(point.requests <= 16 and point.kv_tokens <= 32_000 for point in points)
    assert not any(point.new_tokens == 4000 or point.cached_tokens == 4096 for point in points)


def test_every_point_has_a_row_when_it_is_done(tmp_path: Path) -> None:
    spec = EngineSpec(
        "emulated",
        "none",
        slots=4,
        max_model_len=400,
        tcp=True,
        options=EmulatedOptions(cost={"seconds_per_token": 1e-4}),
    )

    async def run() -> None:
        process = EngineProcess(spec, tmp_path / "engine")
        address = await process.start(60)
        try:
            asked = [
                "--port",
                str(address.port),
                "--slots",
                "4",
                "--context",
                "400",
                "--out",
                str(tmp_path / "rows"),
            ]
            result = await asyncio.to_thread(CliRunner().invoke, bursts, asked)
            assert result.exit_code == 0, result.output
            again = await asyncio.to_thread(CliRunner().invoke, bursts, asked)
            assert again.exit_code != 0 and "name another file" in str(again.exception)
        finally:
            await process.stop()

    asyncio.run(run())
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    expected = list(bursts_that_fit(rows[0]["capacity_tokens"], 4, 400))
    assert [(row["requests"], row["new_tokens"], row["tokens"]) for row in rows] == [
        (point.requests, point.new_tokens, point.tokens) for point in expected
    ]
    longest = max(rows, key=lambda row: row["tokens"])
    assert longest["wall_s"] >= longest["tokens"] * 1e-4
