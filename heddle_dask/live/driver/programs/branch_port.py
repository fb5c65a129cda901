"""One branch towards the run: the scheduler hears of it, its results are journalled under its path."""

from __future__ import annotations

from typing import Any

from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.live.driver.programs.branch import Branch, BranchTree
from heddle_dask.live.driver.programs.services import Recorded, Services


class BranchPort:
    """What the steps and the actions of one branch use of the run.

    Attributes
    ----------
    recorded
        Journalled results that are left to replay.
    name
        Begins the ids of its actions.
    announced
        Whether the scheduler knows the branch: the first context is announced before its program begins, a fork with
        its first request.
    """

    def __init__(
        self, services: Services, spec: TrajectorySpec, recorded: Recorded | None, branch: Branch | None
    ) -> None:
        self.services = services
        self.spec = spec
        self.recorded = recorded or Recorded()
        self.branch = branch or Branch(BranchTree(spec.trajectory_id, self.recorded.branches))
        self.name = f"{self.branch.tree.trajectory_id}{self.branch.path}"
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
