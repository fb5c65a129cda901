"""A trainer that hangs is told, and ends the training with the cause; its first order of a kind is only told."""

from __future__ import annotations

import asyncio

import pytest

from heddle_dask.live.training import trainer_patience
from heddle_dask.live.training.trainer_patience import TrainerPatience, TrainerSilent
from heddle_dask.live.worker.trainer_progress import OrderWatch


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
        seldom = TrainerPatience(lines.append, least_s=0.6)
        assert await seldom.of("train", when_told()) == "uri"
        with pytest.raises(TrainerSilent, match="to train for 1 s"):
            await seldom.of("train", never())
        doing[0] = "save"
        with pytest.raises(TrainerSilent, match="the trainer has not answered to save for 0 s"):
            await patience.of("publish", never())

    asyncio.run(body())


def test_a_batch_on_which_no_part_is_done_any_more_is_stuck_and_one_that_goes_on_is_not() -> None:
    lines: list[str] = []
    counted = iter([*range(7), *[7] * 100_000])

    async def parts() -> int | None:
        await asyncio.sleep(0.01)
        return next(counted)

    async def body() -> None:
        watch = OrderWatch(0.2, lines.append)
        cause = await watch.until_stuck("train", parts)
        assert cause.startswith("it made no progress with train after 7 parts for ")
        assert next(counted) == 7, "not before"
        assert any(line.startswith("the trainer has made no progress with train after 7 parts") for line in lines)

    asyncio.run(body())


def test_an_order_without_parts_may_take_long_the_first_time_and_many_times_as_long_afterwards() -> None:
    lines: list[str] = []

    async def parts() -> int | None:
        return 3  # of the batch before

    async def body() -> None:
        watch = OrderWatch(0.05, lines.append)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.until_stuck("publish", parts), 0.3)
        assert lines == ["the trainer has made no progress with publish for 0 s"]
        watch.took("publish", 0.01)
        assert (await watch.until_stuck("publish", parts)).startswith("it made no progress with publish")

    asyncio.run(body())
