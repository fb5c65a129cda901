"""Text of running steps, on its way from the worker of their engine to the worker of the gateway that asked for it.

It goes by neither driver nor scheduler, and nothing waits for it: what does not come this way comes with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Worker

from heddle_dask.live.wire.gateway_messages import StepText, TakeText, TextTarget
from heddle_dask.live.wire.messages import StepCall
from heddle_dask.live.wire.transport import ask_worker

if TYPE_CHECKING:  # few steps have a client that wants their text
    from tokenizers import Tokenizer

# Text for one worker waits so long for more: a message has a fixed price.
_GAP_S = 0.02
_LOG = logging.getLogger(__name__)


class RunningText:
    """The text of one running step: takes tokens, gives what of their text is certain.

    Parameters
    ----------
    before
        Tokens of the reply that earlier parts of the step have sampled.
    """

    def __init__(self, tokenizer: Tokenizer, call: StepCall, before: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._decoding = DecodeStream(skip_special_tokens=False)
        self._ends = frozenset(call.sampling.stop_token_ids)
        self._stops = tuple(call.sampling.stop)
        self._held = max(map(len, self._stops), default=1) - 1
        self._text = "" if call.text_to is None else call.text_to.opening
        self._given = 0
        self._ended = False
        self._decode(before)  # given with the next tokens, again perhaps: not all of it may have come

    def take(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Where the new text begins, in characters of the reply, and the text; it may be empty.

        What may be the beginning of a stop string is held back, and so is the token that ends the turn.
        """
        self._decode(token_ids)
        end = len(self._text) - self._held
        for stop in self._stops:
            at = self._text.find(stop)
            if at >= 0:
                self._ended, end = True, min(end, at)
        start, self._given = self._given, max(self._given, end)
        return start, self._text[start : self._given]

    def _decode(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token in self._ends:
                self._ended = True
            if self._ended:
                break
            self._text += self._decoding.step(self._tokenizer, token) or ""


class TextSender:
    """Sends the text of steps on, for all steps of one worker; belongs to its event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._waiting: dict[str, list[StepText]] = {}  # by address
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def taker(self, model: str, call: StepCall, context: Sequence[int]) -> Callable[[Sequence[int]], None] | None:
        """Takes the tokens of a step as they come; None where there is no tokenizer, or nobody wants the text."""
        target = call.text_to
        if target is None:
            return None
        if model not in self._tokenizers:
            self._tokenizers[model] = await asyncio.to_thread(_tokenizer_of, model)
        tokenizer = self._tokenizers[model]
        if tokenizer is None:
            return None
        before = context[len(context) - target.sampled_tokens :] if target.sampled_tokens else ()
        text = RunningText(tokenizer, call, before)
        return lambda token_ids: self._send(target, *text.take(token_ids))

    def _send(self, target: TextTarget, start: int, text: str) -> None:
        """Send a piece of text soon, with those of other steps."""
        if not text:
            return
        piece = StepText(target.gateway, target.number, target.choice, start, text)
        self._waiting.setdefault(target.address, []).append(piece)
        if target.address not in self._tasks:
            self._tasks[target.address] = asyncio.ensure_future(self._send_all(target.address))

    async def _send_all(self, address: str) -> None:
        try:
            while texts := self._waiting.pop(address, []):
                with contextlib.suppress(OSError):  # the worker has gone, and its gateway with it
                    await ask_worker(self._worker, address, TakeText(tuple(texts)))
                await asyncio.sleep(_GAP_S)
        except Exception:
            _LOG.exception("text of running steps was not sent")
        finally:
            del self._tasks[address]

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()


def _tokenizer_of(model: str) -> Tokenizer | None:
    from tokenizers import Tokenizer

    path = Path(model) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception as error:  # the library has no class of its own for it
        _LOG.warning("text of running steps is not sent: %s: %s", path, error)
        return None
