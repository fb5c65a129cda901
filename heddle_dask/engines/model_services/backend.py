"""The contract of a back end: one copy of a model service, on one chunk of GPUs of one host.

A copy is loaded from its copy in host memory (or from its files), answers requests while it is resident, and is
evicted; nothing is written back. Its process is started once, and outlives evictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from heddle_dask.core.errors import HeddleError

Input = str | Sequence[int]
"""A text, which the service's own tokenizer turns into tokens, or token ids."""


class ServiceFailed(HeddleError):
    """A copy could not be loaded, or did not answer. The message is one line."""


class ServiceRefused(HeddleError):
    """The service will never accept this request; the message says why."""


class ModelBackEnd(Protocol):
    """One copy of a service. Orders of one copy never overlap; requests do, while it is resident."""

    @property
    def process_id(self) -> int:
        """Pid of its process; 0 when none runs."""

    async def load(self, *, cold: bool, keep: bool) -> None:
        """Make the copy resident; starts its process where none runs.

        Parameters
        ----------
        cold
            There is no copy in host memory: load from the files.
        keep
            Keep a copy in host memory, from which the next load restores it.

        Raises
        ------
        ServiceFailed
            Nothing of it is resident then.
        """

    async def evict(self) -> None:
        """Free the memory of its device; waits for requests that run.

        Raises
        ------
        ServiceFailed
            Its process has died: the memory is free all the same.
        """

    async def drop_copy(self) -> None:
        """Free the copy in host memory; a resident copy stays."""

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        """One number for each input: the output of a classifier with one label, before any activation.

        Raises
        ------
        ServiceFailed, ServiceRefused
        """

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """The logprob of each token from position `start` (at least 1) on, given all tokens before it.

        Raises
        ------
        ServiceFailed, ServiceRefused
        """

    async def resident_bytes(self) -> int:
        """Bytes of weights on the device now, where the back end knows them; 0 when it is not resident.

        Raises
        ------
        ServiceFailed
        """

    async def ended(self) -> str:
        """Wait for the end of its process; returns the cause in one line."""

    async def stop(self) -> None:
        """End its process and free all that it has."""
