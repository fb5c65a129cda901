"""One arm of an evaluation: what its store has, what it lacks, and the rollout that makes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from heddle_dask.cli.cluster_choice import workers_joined
from heddle_dask.cli.eval.order import OrderedArm
from heddle_dask.cli.field_options import Asked
from heddle_dask.cli.group_cluster import plan_of_file
from heddle_dask.cli.rollout.interrupts import Interrupts
from heddle_dask.cli.rollout.parsed_options import environment_of
from heddle_dask.cli.rollout.run import RolloutRun
from heddle_dask.cli.rollout.run_logs import RunLogs
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Environment, Task
from heddle_dask.evaluation.attempt_outcomes import AttemptOutcome, outcome_of, outcomes_of_run
from heddle_dask.evaluation.attempt_plan import AttemptBatch, missing_batches, samples_by_task
from heddle_dask.live.driver.files.resume import batch_of
from heddle_dask.live.driver.files.run_writer import WriteMode
from heddle_dask.live.driver.inputs.rollout_inputs import tasks_of
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.runs.progress import ProgressDisplay
from heddle_dask.records.schema import counted


def stored_outcomes(path: Path) -> list[AttemptOutcome]:
    """The outcomes of all finished trajectories of a run; none where there is no run."""
    if not path.exists():
        return []
    run = StoredRun(path)
    late = run.recovered_records()
    return [
        *outcomes_of_run(run.reader),
        *(outcome_of(each, each.domain, each.reward_cause, each.reward_detail) for each in late),
    ]


@dataclass(frozen=True, slots=True)
class ArmWork:
    """What is left to do for one arm.

    Attributes
    ----------
    done
        Batches that have ended.
    batches
        Those that are made now: where `mode` is ``"resume"``, the first one has begun before.
    left
        Attempts still to make.
    """

    ordered: OrderedArm
    environment: Environment
    tasks: Sequence[Task]
    mode: WriteMode
    done: tuple[AttemptBatch, ...]
    batches: tuple[AttemptBatch, ...]
    left: int

    @classmethod
    def of(cls, ordered: OrderedArm, listed: Sequence[AttemptBatch], samples: int, seed: int) -> ArmWork:
        """Compare what was asked for with what the store has.

        Parameters
        ----------
        listed
            The batches that were written down for this arm; the last one may not have begun.

        Raises
        ------
        BadInput
            The store has batches of another program, or its last batch has tasks that are not there any more.
        """
        asked = ordered.asked
        is_local = asked["scheduler"] is None and plan_of_file(asked["cluster"]) is None
        environment = environment_of(asked, by_value=not is_local)
        tasks = tasks_of(ordered.count or 1, environment, seed)
        path: Path = asked["out"]
        begun = _batches_in(path)
        if begun > len(listed):
            raise BadInput(f"{path} has {begun} batches, and heddle eval made {len(listed)}: it belongs to no arm")
        done = tuple(listed[:begun])
        has = samples_by_task(stored_outcomes(path))
        unfinished = _unfinished(path, done)
        missing = missing_batches([task.task_id for task in tasks], has + unfinished, samples, seed, begun)
        batches = tuple(missing)
        mode: WriteMode = "append" if path.exists() else "create"
        if unfinished:
            _check_tasks(path, done[-1], tasks)
            done, batches, mode = done[:-1], (done[-1], *missing), "resume"
        left = unfinished.total() + sum(map(len, missing))
        return cls(ordered, environment, tasks, mode, done, batches, left)

    @property
    def first(self) -> AttemptBatch:
        """The batch that is made first; where nothing is left, one that was made."""
        return (self.batches or self.done)[0]

    @property
    def asked(self) -> Asked:
        """The options of its rollout."""
        first = self.first
        return self.ordered.asked.but(mode=self.mode, tasks=len(self.tasks), samples=first.samples, seed=first.seed)


class ArmRun(RolloutRun):
    """The rollout of one arm, on a cluster that it shares with the others."""

    def __init__(
        self,
        work: ArmWork,
        progress: ProgressDisplay,
        begins: Callable[[ArmWork, int], None],  # told of each batch before it begins: so many are begun then
        interrupts: Interrupts,
        cluster_logs: Path,
    ) -> None:
        self.work = work
        self._begins = begins
        super().__init__(work.asked, progress)
        self.left = work.left
        self.logs = RunLogs(cluster_logs, "append")
        self._interrupts = interrupts

    def _environment_and_tasks(self) -> tuple[Environment, Sequence[Task]]:
        of_first = set(self.work.first.task_ids)
        return self.work.environment, [task for task in self.work.tasks if task.task_id in of_first]

    def _take_over(self, *, resumes: bool) -> None:
        super()._take_over(resumes=resumes)
        limits = (StoredRun(self.out).metadata.get("batch_facts") or [{}])[-1].get("limits")
        if limits is not None and limits != self.budget.replayed:
            raise BadInput(f"{self.out} was made with limits {limits}, not {self.budget.replayed}: use the same")

    def cluster(self) -> AbstractAsyncContextManager[Client]:
        """A client of a cluster as this rollout needs it."""
        return self._client()

    async def roll_out(self, client: Client) -> None:
        """Make its batches, one after the other on the same engines."""
        self._task = asyncio.current_task()
        try:
            await self._roll_out(client)
        except asyncio.CancelledError:
            if not self._interrupts.exit_code:
                raise
        finally:
            self._task = None

    def interrupt(self) -> bool:
        """Stop it, to be gone on with; False where it does not run."""
        if self._task is None:
            return False
        if self._rollout is None or not self._rollout.interrupt(to_resume=True):
            self._task.cancel()
        return True

    def counts(self) -> Mapping[str, Any]:
        """Counts of what runs; empty before that."""
        return {} if self._rollout is None else self._rollout.progress()

    async def _roll_out(self, client: Client) -> None:
        rollout = self._make(client)
        if self.is_local:
            await workers_joined(client, self.shape)
        by_id = {task.task_id: task for task in self.work.tasks}
        async with rollout:
            self._rollout = rollout
            for number, batch in enumerate(self.work.batches):
                if self._interrupts.exit_code:
                    break
                self._begins(self.work, number + 1)
                rollout.samples, rollout.seed = batch.samples, batch.seed
                try:
                    await self._batch(rollout, [by_id[task] for task in batch.task_ids])
                finally:
                    self.tally.lost += rollout.progress()["unfinished"]

    async def _batch(self, rollout: Rollout, tasks: Sequence[Task]) -> None:
        async for record in rollout.stream(tasks):
            self._count(record)


def _batches_in(path: Path) -> int:
    return counted(StoredRun(path).metadata, "batches", 0) if path.exists() else 0


def _unfinished(path: Path, begun: Sequence[AttemptBatch]) -> Counter[str]:
    """Attempts by task that the last batch has begun and not ended."""
    if not begun:
        return Counter()
    ended = Counter(
        outcome.task_id for outcome in stored_outcomes(path) if batch_of(outcome.trajectory_id) == len(begun) - 1
    )
    last = begun[-1]
    return +Counter({task: last.samples - ended[task] for task in last.task_ids})


def _check_tasks(path: Path, batch: AttemptBatch, tasks: Sequence[Task]) -> None:
    gone = sorted(set(batch.task_ids) - {task.task_id for task in tasks})
    if gone:
        raise BadInput(
            f"{path} has unfinished attempts at tasks that are not asked for, such as {gone[0]!r}: give the same tasks"
        )
