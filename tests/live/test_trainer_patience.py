"""A trainer that hangs is told, and ends the training with the cause; its first order of a kind is only told."""

from __future__ import annotations

import asyncio

import pytest

from heddle_dask.live.training import trainer_patience
from heddle_dask.live.training.trainer_patience import TrainerPatience, TrainerSilent


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_order_that_takes_far_longer_than_those_before_ends_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_patience, "LEAST_S", 0.05)
    monkeypatch.setattr(trainer_patience, "TIMES", 0.0)
    lines: list[str] = []
    doing = [""]
    patience = TrainerPatience(lines.append, lambda: doing[0])

    async def when_told() -> str:
        while not lines:
            await asyncio.sleep(0)
        return "uri"

    async def body() -> None:
        assert await patience.of("publish", when_told()) == "uri"
        assert lines == ["the trainer does not answer to publish for 0 s; the first of its kind"]
        hangs = asyncio.ensure_future(never())
        with pytest.raises(TrainerSilent, match="the trainer has not answered to publish for 0 s"):
            await patience.of("publish", hangs)
        await asyncio.wait([hangs])
        assert hangs.cancelled()
        assert lines[1].startswith("the trainer does not answer to publish for 0 s; the longest before took")
        doing[0] = "save"
        with pytest.raises(TrainerSilent, match="the trainer has not answered to save for 0 s"):
            await patience.of("publish", never())

    asyncio.run(body())
