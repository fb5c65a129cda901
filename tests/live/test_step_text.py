"""Text of running steps, at both ends of its way."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.engines.contract import SamplingParams
from heddle_dask.gateway.orders import Choice, OrderRefused, StepAnswer, StepOrder
from heddle_dask.live.wire.gateway_frames import ANSWER, TEXT, read_frame, write_frame
from heddle_dask.live.wire.gateway_messages import AnswerBody, OrderBody, body_from, new_key, packed_body
from heddle_dask.live.wire.messages import StepCall
from heddle_dask.live.worker.gateway_link import MOST_IN_FLIGHT, MOST_ORDER_BYTES, GatewayLink
from heddle_dask.live.worker.step_text import RunningText


@pytest.fixture(scope="module")
def tokenizer(model_dir: str) -> Tokenizer:
    return Tokenizer.from_file(f"{model_dir}/tokenizer.json")


def running_text(tokenizer: Tokenizer, before: list[int], *, end: int, stop: tuple[str, ...]) -> RunningText:
    sampling = SamplingParams(99, 1.0, 1.0, stop_token_ids=(end,), stop=stop)
    return RunningText(tokenizer, StepCall("s", StepId(TrajectoryId("t"), 0, 0), 0, 0, b"", sampling), before)


@given(
    text=st.text(min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    preempted=st.integers(0, 40),
    stop=st.sampled_from([(), ("ab",), ("\n\n", "e")]),
)
def test_what_is_sent_is_a_prefix_of_the_reply(
    tokenizer: Tokenizer, text: str, cuts: list[int], preempted: int, stop: tuple[str, ...]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    end = tokenizer.get_vocab_size()
    ends = [whole.find(each) for each in stop if each in whole]
    allowed = whole[: min(ends)] if ends else whole
    before, after = ids[:preempted], [*ids[preempted:], end, 65]
    bounds = sorted({0, *(min(cut, len(after)) for cut in cuts), len(after)})
    running, sent = running_text(tokenizer, before, end=end, stop=stop), ""
    for start, until in itertools.pairwise(bounds):
        at, piece = running.take(after[start:until])
        assert at == len(sent)
        sent += piece
        assert allowed.startswith(sent), "a part of a character, a stop string and the end of the turn are held back"
    if not stop and not whole.endswith("\ufffd"):
        assert sent == whole


class Ends:
    """A gateway's link, and the tool worker's end of it."""

    def __init__(self, streams: list[Any]) -> None:
        (reader, writer), (self.reader, self.writer) = streams
        self.link = GatewayLink(reader, writer)
        self.runs = asyncio.ensure_future(self.link.run())

    @classmethod
    async def made(cls) -> Ends:
        import socket

        return cls([await asyncio.open_connection(sock=each) for each in socket.socketpair()])

    async def order(self) -> tuple[int, OrderBody]:
        frame = await read_frame(self.reader)
        assert frame is not None
        _, number, _, _, body = frame
        return number, body_from(OrderBody, body)

    def answers(self, number: int, text: str) -> None:
        answer = StepAnswer((Choice(ChatMessage("assistant", text), "stop", text),), 1, 1)
        write_frame(self.writer, ANSWER, number, packed_body(AnswerBody(answer)))


ORDER = StepOrder((ChatMessage("user", "hello"),), streams=True)


def test_a_reply_that_begins_again_is_passed_on_once() -> None:
    async def body() -> None:
        ends, seen = await Ends.made(), []
        exchange = ends.link.exchange(new_key("s"))
        asking = asyncio.ensure_future(exchange.answer(ORDER, lambda choice, text: seen.append(text)))
        number, _ = await ends.order()
        for start, text in ((0, "one "), (0, "one two"), (9, "lost"), (4, "two th"), (10, "ree")):
            write_frame(ends.writer, TEXT, number, 0, start, text)
        ends.answers(number, "one two three")
        assert (await asking).choices[0].raw == "one two three"
        assert seen == ["one ", "two", " th", "ree"]
        # One that begins again with other words ends with an error: its client has read what is no part of it.
        asking = asyncio.ensure_future(exchange.answer(ORDER, lambda choice, text: seen.append(text)))
        number, sent = await ends.order()
        assert sent.known_messages == 1 and not sent.order.messages
        for start, text in ((0, "one "), (0, "uno due"), (4, "tre")):
            write_frame(ends.writer, TEXT, number, 0, start, text)
        ends.answers(number, "uno due tre")
        with pytest.raises(OrderRefused, match="began again"):
            await asking
        assert seen[4:] == ["one "]
        ends.writer.close()
        await ends.runs

    asyncio.run(body())


def test_a_key_has_so_many_requests_at_a_time_and_none_outlives_the_worker() -> None:
    async def body() -> None:
        ends = await Ends.made()
        exchange = ends.link.exchange(new_key("s"))
        asking = [asyncio.ensure_future(exchange.answer(ORDER)) for _ in range(MOST_IN_FLIGHT)]
        await asyncio.sleep(0)
        with pytest.raises(OrderRefused, match="64 requests of this key are open") as refused:
            await exchange.answer(ORDER)
        assert refused.value.kind == "overloaded"
        long = StepOrder((ChatMessage("user", "x" * (MOST_ORDER_BYTES + 1)),))
        with pytest.raises(OrderRefused, match="more than 16 MiB") as refused:
            await ends.link.exchange(new_key("s")).answer(long)
        assert refused.value.kind == "too_large"
        other = asyncio.ensure_future(ends.link.exchange(new_key("s")).answer(ORDER))
        numbers = [(await ends.order())[0] for _ in range(MOST_IN_FLIGHT + 1)]
        ends.answers(numbers[0], "yes")
        assert (await asking[0]).choices[0].raw == "yes"
        asking[1].cancel()
        frame = await read_frame(ends.reader)
        assert frame is not None and frame[:2] == ["cancel", numbers[1]]
        # A driver that knows no earlier order asks for the whole.
        again = asyncio.ensure_future(exchange.answer(ORDER))
        number, sent = await ends.order()
        assert sent.known_number
        write_frame(ends.writer, ANSWER, number, packed_body(AnswerBody(wants_all=True)))
        number, sent = await ends.order()
        assert sent.order == ORDER
        ends.writer.close()
        for each in (*asking[2:], other, again):
            with pytest.raises(OrderRefused, match="has gone"):
                await each

    asyncio.run(body())
