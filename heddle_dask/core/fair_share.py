"""Which of several runs gets the next slot, CPU or call: weighted fair queueing by dominant share.

Every run has an account per resource: the seconds for which it had each share of the cluster's amount. Its turn is the
largest of its accounts divided by its weight, so a run is judged by the resource of which it uses most (dominant
resource fairness: Ghodsi et al., NSDI 2011). The run with the smallest turn goes first. A step or an action is charged
when it starts, with the seconds that those of its run have taken so far, and the charge is corrected when it ends:
otherwise one run would be given all free slots until its first steps have ended.

A run that had nothing to wait for is not repaid: when it waits again, its turn is at least that of the waiting run that
goes first (as in start-time fair queueing: Goyal et al., SIGCOMM 1996). So idle shares are lent, and nobody owes for
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from heddle_dask.core.ids import RunId

SLOTS = "slots"
KV = "kv_tokens"
# Expected of the first starts, before anything has ended: enough for runs to take turns, too little to owe for.
_UNKNOWN_S = 1e-3
# The mean of the seconds that a run's steps take follows them with this weight per step.
_FOLLOWS = 0.1

Shares = Mapping[str, float]
"""Share of the cluster's amount of each resource, from 0 to 1."""


@dataclass(slots=True)
class _Account:
    """One run.

    Attributes
    ----------
    begins_at
        Its turn before it was charged for anything.
    spent
        Seconds times share by resource.
    held
        What it holds for a longer time, by resource, as of the latest `held` call.
    mean_s
        Expected seconds of what it starts, by kind.
    """

    weight: float
    begins_at: float
    spent: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    held_since_s: float = 0.0
    mean_s: dict[str, float] = field(default_factory=dict)

    @property
    def turn(self) -> float:
        return self.begins_at + max(self.spent.values(), default=0.0) / self.weight

    def charge(self, shares: Shares, seconds: float) -> None:
        for resource, share in shares.items():
            self.spent[resource] = self.spent.get(resource, 0.0) + share * seconds


@dataclass(slots=True)
class _Charge:
    """One step or action that was charged for and has not ended."""

    run_id: RunId
    kind: str
    shares: Shares
    charged_s: float
    began_s: float


class FairShare:
    """The accounts of the runs that share a cluster."""

    def __init__(self) -> None:
        self._accounts: dict[RunId, _Account] = {}
        self._charges: dict[str, _Charge] = {}
        self._mean_s: dict[str, float] = {}
        """Expected seconds by kind, over all runs."""

    def join(self, run_id: RunId, weight: float) -> None:
        known = self._accounts.get(run_id)
        others = [account.turn for account in self._accounts.values()]
        turn = min(others, default=0.0) if known is None else known.turn
        self._accounts[run_id] = _Account(weight, turn)

    def leave(self, run_id: RunId) -> None:
        self._accounts.pop(run_id, None)
        self._charges = {name: c for name, c in self._charges.items() if c.run_id != run_id}

    def turn(self, run_id: RunId) -> float:
        """Its place in the order: the smallest goes first."""
        return self._accounts[run_id].turn

    def in_turn(self, runs: Iterable[RunId]) -> list[RunId]:
        """These runs, the one that goes first at the beginning."""
        return sorted(runs, key=lambda run_id: (self._accounts[run_id].turn, run_id))

    def begins_to_wait(self, run_id: RunId, waiting: Iterable[RunId]) -> None:
        """A run waits for something and had nothing to wait for: it is not repaid for the time before."""
        account = self._accounts[run_id]
        turns = [self._accounts[other].turn for other in waiting if other != run_id]
        floor = min(turns) if turns else max(other.turn for other in self._accounts.values())
        account.begins_at += max(0.0, floor - account.turn)

    def cost(self, run_id: RunId, kind: str, shares: Shares) -> float:
        """By how much the turn of a run would at most grow with one more start of this kind."""
        account = self._accounts[run_id]
        return max(shares.values(), default=0.0) * self._expected_s(account, kind) / account.weight

    def _expected_s(self, account: _Account, kind: str) -> float:
        return account.mean_s.get(kind, self._mean_s.get(kind, _UNKNOWN_S))

    def start(self, name: str, run_id: RunId, kind: str, shares: Shares, at: float) -> None:
        """Charge a run for a step or an action that starts; `name` is its id."""
        account = self._accounts[run_id]
        expected_s = self._expected_s(account, kind)
        account.charge(shares, expected_s)
        self._charges[name] = _Charge(run_id, kind, shares, expected_s, at)

    def began(self, name: str, at: float) -> None:
        """What was started has really begun only now."""
        if name in self._charges:
            self._charges[name].began_s = at

    def end(self, name: str, at: float) -> None:
        """Correct the charge of what has ended; nothing if it was not charged for."""
        charge = self._charges.pop(name, None)
        if charge is None:
            return
        account, took_s = self._accounts[charge.run_id], at - charge.began_s
        account.charge(charge.shares, took_s - charge.charged_s)
        for means in (account.mean_s, self._mean_s):
            mean_s = means.get(charge.kind)
            means[charge.kind] = took_s if mean_s is None else mean_s + _FOLLOWS * (took_s - mean_s)

    def holds(self, run_id: RunId, shares: Shares, at: float) -> None:
        """What a run holds from now on for longer than one start, such as KV memory; it pays for the time before."""
        account = self._accounts[run_id]
        account.charge(account.held, at - account.held_since_s)
        account.held, account.held_since_s = dict(shares), at
