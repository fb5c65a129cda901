"""The branches of one trajectory: the context that its program was given, and those that it forked from it.

The scheduler hears of each branch; its results are journalled under its path. All of a run share `Services`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.live.driver.connection.gateway_orders import GatewayOrders
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.sandbox_roots import SandboxRoots
from heddle_dask.live.wire.result_codec import step_from_body


class ReplayDiverged(Exception):
    """On resuming, the program asked for something else than the journal holds."""


@dataclass(frozen=True, slots=True)
class Services:
    """What all contexts of a run share."""

    session: str
    submitter: Submitter
    template: ChatTemplate
    budget: Budget
    # Prompt and generated tokens of a trajectory together: that of the budget, or what every engine takes.
    max_context_tokens: int
    sampling: Sampling
    clock: Callable[[], float]  # seconds since the run began
    journal: Callable[[str, dict[str, Any]], None]  # takes a result, by its kind, when it arrives
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    pools: Pools = field(default_factory=Pools)
    engine_reads_calls: bool = False  # whether engines read calls of tools by a parser of their own
    roots: SandboxRoots = field(default_factory=SandboxRoots)
    tools: Sequence[Any] = ()  # that every program is given
    note_once: Callable[[str], None] = lambda line: None  # takes a line for the user
    gateways: GatewayOrders | None = None  # None: there is no cluster


@dataclass(slots=True)
class Recorded:
    """Journalled results of a trajectory that is run again: steps in order, actions by their number."""

    steps: deque[Mapping[str, Any]] = field(default_factory=deque)
    actions: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    # Of actions that are made again because their values cannot be replayed.
    idempotency_keys: dict[int, str] = field(default_factory=dict)
    # The same of its forked branches and of its reward, by path.
    branches: dict[str, Recorded] = field(default_factory=dict)
    reward: Mapping[str, Any] | None = None  # its reward, where it was computed after the program
    # `environment_failures`, `lost_tokens`: how often its environment has failed, and what the attempts before had
    # sampled.
    environment_failures: int = 0
    lost_tokens: int = 0
    failed: set[int] = field(default_factory=set)  # numbers of the environments after one that has failed
    # Paths of the attempts whose agents asked for steps themselves: none of these is replayed.
    agents_at: dict[str, None] = field(default_factory=dict)

    @property
    def fresh_environments(self) -> int:
        """Environments that do not count: those that have failed, and those of agents that were interrupted."""
        number = self.environment_failures
        while _path(number) in self.agents_at:
            number += 1
        return number

    @property
    def begun_again(self) -> int:
        """How often an agent was interrupted, and its attempt begins again."""
        return len(self._interrupted)

    @property
    def interrupted_tokens(self) -> int:
        """Tokens that the attempts of interrupted agents had sampled, in all branches."""
        tokens = 0
        for path in map(_path, self._interrupted):
            mine = {path: self.branch(path)} | {at: b for at, b in self.branches.items() if at.startswith(f"{path}#")}
            tokens += sum(branch.generated_tokens for branch in mine.values())
        return tokens

    def forget_reward(self) -> None:
        """The attempt begins again: what its reward has computed is that of another transcript."""
        if self.reward is not None and "group" not in self.reward:
            self.reward = None
        for path in [path for path in self.branches if path.startswith("!")]:
            del self.branches[path]

    @property
    def _interrupted(self) -> list[int]:
        return [number for number in range(self.fresh_environments) if number + 1 not in self.failed]

    def branch(self, path: str) -> Recorded:
        """The results of the forked branch of that path; of the first one, whose path is empty, these."""
        return self.branches.setdefault(path, Recorded()) if path else self

    def cancel(self, step_index: int) -> None:
        """The program cancelled that step: its sampled parts do not count, but the cancelled request is replayed."""
        while self.steps and self.steps[-1]["step_index"] == step_index and _is_answer(self.steps[-1]):
            self.steps.pop()
        self.steps.append({"step_index": step_index, "cancelled": True})

    def next_is_cancelled(self, step_index: int) -> bool:
        return bool(self.steps) and self.steps[0] == {"step_index": step_index, "cancelled": True}

    @property
    def generated_tokens(self) -> int:
        return sum(_sampled(body) for body in self._whole)

    @property
    def observed_tokens(self) -> int:
        """Tokens that were added to its context between its steps."""
        ends = [body["context_tokens"] + _sampled(body) for body in self._whole]
        begins = [body["context_tokens"] for body in self._whole]
        return sum(begin - end for end, begin in zip(ends, begins[1:], strict=False))

    @property
    def calls_made_again(self) -> int:
        """Number of calls, in all branches, whose values cannot be replayed."""
        return len(self.idempotency_keys) + sum(b.calls_made_again for b in self.branches.values())

    @property
    def _whole(self) -> list[Mapping[str, Any]]:
        return [body for body in self.steps if _is_answer(body)]

    @property
    def tools_s(self) -> float:
        """Seconds that its actions ran."""
        return float(sum(body["run_s"] for body in self.actions.values()))


def _path(number: int) -> str:
    """The path of the first context in the fresh environment of that number."""
    return f"~{number}" if number else ""


def _is_answer(body: Mapping[str, Any]) -> bool:
    return "cancelled" not in body and "lost" not in body


def _sampled(body: Mapping[str, Any]) -> int:
    return len(step_from_body(body).generated.token_ids)


@dataclass(slots=True)
class BranchTree:
    """What the contexts of one trajectory share."""

    trajectory_id: TrajectoryId  # of the trajectory, under which its results are journalled
    recorded: Mapping[str, Recorded]  # journalled results of forked branches, by path
    metadata: dict[str, Any] = field(default_factory=dict)  # facts that the program has set
    # Whether the run is ending: a step that is cancelled now is not the program's doing.
    interrupted: bool = False
    ended: bool = False  # whether the program has ended
    # The id by which the scheduler knows its first context; None: the same.
    known_as: TrajectoryId | None = None
    _waiting: dict[asyncio.Task[Any], None] = field(default_factory=dict)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a task of the program waits for: it is cancelled if the program ends meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = None
        try:
            yield
        finally:
            self._waiting.pop(task, None)

    def end(self) -> None:
        """The program has ended: tasks that it has left running wait for nothing any more."""
        self.ended = True
        for task in list(self._waiting):
            task.cancel()


@dataclass(frozen=True, slots=True)
class Branch:
    """The place of a context in the tree."""

    tree: BranchTree
    # ``""`` for the first context, ``"~2"`` for that after two failures of its environment; ``"#2#1"`` is the first
    # fork of its second fork.
    path: str = ""
    steps: int = 0  # number of steps before the branch began

    def forked(self, number: int, steps: int) -> Branch:
        """The place of the fork of that number, from 1, after `steps` steps."""
        return Branch(self.tree, f"{self.path}#{number}", steps)

    @property
    def is_first(self) -> bool:
        """Whether its context is the one that the program was given."""
        return "#" not in self.path and not self.path.startswith("!")

    @property
    def recorded(self) -> Recorded:
        """What the journal holds of this fork."""
        return self.tree.recorded.get(self.path) or Recorded()


def fork_seed(seed: int, number: int) -> int:
    """The seed of a fork: branches must not sample the same tokens."""
    digest = blake2b(f"{seed}#{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class BranchPort:
    """What the steps and the actions of one branch use of the run."""

    def __init__(
        self, services: Services, spec: TrajectorySpec, recorded: Recorded | None, branch: Branch | None
    ) -> None:
        self.services = services
        self.spec = spec
        self.recorded = recorded or Recorded()  # journalled results that are left to replay
        self.branch = branch or Branch(BranchTree(spec.trajectory_id, self.recorded.branches))
        self.name = f"{self.branch.tree.trajectory_id}{self.branch.path}"  # begins the ids of its actions
        # Whether the scheduler knows the branch: the first context is announced before its program begins, a fork with
        # its first request.
        self.announced = self.branch.is_first

    def announce(self) -> None:
        """The scheduler must know a branch before its first step or action."""
        if not self.announced:
            self.announced = True
            tree = self.branch.tree
            self.services.submitter.fork(self.spec, tree.known_as or tree.trajectory_id)

    def journal(self, kind: str, body: dict[str, Any]) -> None:
        """Write down a result of this branch."""
        at: dict[str, Any] = {"trajectory_id": self.branch.tree.trajectory_id}
        if self.branch.path:
            at["branch"] = self.branch.path
        self.services.journal(kind, {**at, **body})

    def check_goes_on(self, what: str) -> None:
        """Refuse what a program asks for after its end.

        Raises
        ------
        RuntimeError
            The program has ended.
        """
        if self.branch.tree.ended:
            raise RuntimeError(f"{what} after the program has ended: await everything before it returns")
