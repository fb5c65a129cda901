"""The token record: the tokens of one branch of a trajectory.

A record is append-only. Sampled tokens are kept as sampled (ids, logprobs, policy version); all other tokens are
appended with their author. No method changes an existing token, and nothing is tokenised again: if an agent rewrites
its history, that is a *fork*, a new record with a common prefix. Sampled tokens are in the loss mask of the first
record only. So the context of any earlier step is a prefix of
its branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Logprobs: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]

NOT_SAMPLED_VERSION = -1
_FIRST_CAPACITY = 256


class Attribution(IntEnum):
    """Author of a token. The loss mask selects `POLICY`; the numbers are those in the store.

    `SHARED` tokens begin a forked branch: they repeat, masked, what the branch has in common with the one that it left.
    `PREFIX` tokens were sampled in another attempt, whose beginning this one replays (`records.trajectory_prefix`).
    """

    PROMPT = 0
    POLICY = 1
    TOOL = 2
    TEMPLATE = 3
    SHARED = 4
    PREFIX = 5


class Segment(NamedTuple):
    """A range of consecutive tokens of one author: `start` inclusive, `stop` exclusive."""

    attribution: Attribution
    start: int
    stop: int
    token_ids: npt.NDArray[np.int32]


class TokenRecord:
    """Tokens of one branch, in order, with author, logprob and policy version of each.

    The array properties are read-only views of the tokens at the time of the call; later appends neither change nor
    extend them. Appends take amortised constant time per token.
    """

    __slots__ = ("_attribution", "_ids", "_length", "_logprobs", "_versions")

    def __init__(self) -> None:
        self._length = 0
        # Without room: a rollout makes the records of all its trajectories before most of them begin.
        self._ids = np.empty(0, np.int32)
        self._attribution = np.empty(0, np.uint8)
        self._logprobs = np.empty(0, np.float32)
        self._versions = np.empty(0, np.int32)

    @classmethod
    def from_arrays(
        cls,
        token_ids: npt.ArrayLike,
        attribution: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        policy_version: npt.ArrayLike,
    ) -> TokenRecord:
        """Rebuild a record from its four columns, as the store holds them (copied).

        Raises
        ------
        ValueError
            If the columns differ in length or an attribution has no name.
        """
        ids = np.array(token_ids, np.int32, ndmin=1)
        authors = np.array(attribution, np.uint8, ndmin=1)
        probabilities = np.array(logprobs, np.float32, ndmin=1)
        versions = np.array(policy_version, np.int32, ndmin=1)
        lengths = {len(ids), len(authors), len(probabilities), len(versions)}
        if len(lengths) != 1:
            raise ValueError(f"columns of one token record differ in length: {sorted(lengths)}")
        if len(authors) and int(authors.max()) > max(Attribution):
            raise ValueError(f"unknown attribution {int(authors.max())} in a token record")
        record = cls.__new__(cls)
        record._length = len(ids)
        record._ids, record._attribution = ids, authors
        record._logprobs, record._versions = probabilities, versions
        return record

    def append(self, token_ids: TokenIds, attribution: Attribution) -> None:
        """Append tokens that were not sampled: prompt, tool output or template text.

        Raises
        ------
        ValueError
            For `Attribution.POLICY`; use `append_sampled` for sampled tokens.
        TypeError, OverflowError
            If the ids are no integers or do not fit 32 bits.
        """
        if attribution == Attribution.POLICY:
            raise ValueError("sampled tokens need logprobs and a policy version: append_sampled()")
        start, stop = self._extend(_as_ids(token_ids))
        self._attribution[start:stop] = Attribution(attribution)
        self._logprobs[start:stop] = np.nan
        self._versions[start:stop] = NOT_SAMPLED_VERSION

    def append_sampled(self, token_ids: TokenIds, logprobs: Logprobs, policy_version: int) -> None:
        """Append tokens exactly as the engine sampled them; a nan logprob means "not reported".

        Raises
        ------
        ValueError
            If ids and logprobs differ in length or the policy version is negative.
        TypeError, OverflowError
            If the ids are no integers or do not fit 32 bits.
        """
        ids = _as_ids(token_ids)
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled token ids but {len(logprobs)} logprobs")
        if policy_version < 0:
            raise ValueError(f"policy version {policy_version} is negative")
        probabilities = np.asarray(logprobs, np.float32)
        start, stop = self._extend(ids)
        self._attribution[start:stop] = Attribution.POLICY
        self._logprobs[start:stop] = probabilities
        self._versions[start:stop] = policy_version

    def fork(self, length: int) -> TokenRecord:
        """A new record with the first `length` tokens of this one.

        Raises
        ------
        ValueError
            If the record is shorter than `length`.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot fork at {length}: the record has {self._length} tokens")
        return TokenRecord.from_arrays(
            self._ids[:length],
            self._attribution[:length],
            self._logprobs[:length],
            self._versions[:length],
        )

    def shared(self, length: int | None = None) -> TokenRecord:
        """A new record for a branch that begins with the first `length` tokens of this one, or all; all masked."""
        record = TokenRecord()
        record.append(self.token_ids[:length], Attribution.SHARED)
        return record

    def segments(self) -> Iterator[Segment]:
        """Maximal ranges of equal attribution, in order; together they cover the record."""
        authors = self.attribution
        if not len(authors):
            return
        cuts = (np.flatnonzero(np.diff(authors)) + 1).tolist()
        ids = self.token_ids
        for start, stop in zip([0, *cuts], [*cuts, len(authors)], strict=True):
            yield Segment(Attribution(int(authors[start])), start, stop, ids[start:stop])

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """All token ids, in order."""
        return _read_only(self._ids[: self._length])

    @property
    def attribution(self) -> npt.NDArray[np.uint8]:
        """`Attribution` of each token."""
        return _read_only(self._attribution[: self._length])

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Logprob of each token; nan if not sampled."""
        return _read_only(self._logprobs[: self._length])

    @property
    def policy_version(self) -> npt.NDArray[np.int32]:
        """Version of the policy that sampled each token; -1 if not sampled."""
        return _read_only(self._versions[: self._length])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True for sampled tokens, False for all others."""
        return np.equal(self.attribution, np.uint8(Attribution.POLICY))

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        """Equal token by token in all four columns; two nan logprobs are equal."""
        if not isinstance(other, TokenRecord):
            return NotImplemented
        return (
            np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.attribution, other.attribution)
            and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)
            and np.array_equal(self.policy_version, other.policy_version)
        )

    __hash__ = None  # type: ignore[assignment]  # a record grows

    def __repr__(self) -> str:
        return f"<TokenRecord: {self._length} tokens, {int(self.loss_mask.sum())} sampled>"

    def _extend(self, ids: npt.NDArray[np.int32]) -> tuple[int, int]:
        start, stop = self._length, self._length + len(ids)
        if stop > len(self._ids):
            self._grow(max(stop, 2 * len(self._ids), _FIRST_CAPACITY))
        self._ids[start:stop] = ids
        self._length = stop
        return start, stop

    def _grow(self, capacity: int) -> None:
        """Allocate larger buffers; existing views keep the old ones."""
        for name in ("_ids", "_attribution", "_logprobs", "_versions"):
            old = getattr(self, name)
            new = np.empty(capacity, old.dtype)
            new[: self._length] = old[: self._length]
            setattr(self, name, new)


def _as_ids(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    ids = np.asarray(token_ids)
    if not ids.size:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be a flat sequence of integers, not {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
        raise OverflowError("a token id is negative or does not fit 32 bits")
    return ids.astype(np.int32, copy=False)


def _read_only(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view.flags.writeable = False
    return view
