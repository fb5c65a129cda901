"""A rollout on a live cluster whose engines follow the weights of a trainer of others.

The engines must be started with the model that the trainer has at step 0. Between two calls of the rollout function
nothing is generated, so the installation costs what it takes, and no step spans two versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.training.weight_control import WeightControl
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, TrajectoryGroup
from heddle_dask.weights.model_directory import model_facts, model_tensors
from heddle_dask.weights.store import WeightStore
from pipelines.any_trainer.raw_tensors import raw_tensor


class FollowingEngines:
    """Implements `training.trainer_processes.TrainerSampler` over one `Rollout`.

    Parameters
    ----------
    rollout
        Of a client that is not asynchronous, entered with ``with``; it is this trainer's alone.
    tasks
        Those whose ids the dataset names.
    store
        URI of the weight store.
    lineage
        Name of this training; another one for each.
    note
        Takes a line when an engine refuses weights.

    Raises
    ------
    BadInput
        The client is asynchronous, or the store cannot be written.
    """

    def __init__(
        self,
        rollout: Rollout,
        tasks: Sequence[Task],
        store: str,
        lineage: str = "trainer",
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        if rollout.client.asynchronous:
            raise BadInput("the trainer waits for the rollout: give it a client that is not asynchronous")
        self._rollout = rollout
        self._tasks = {task.task_id: task for task in tasks}
        self._store = WeightStore(store)
        self._store.check_writable()
        self._lineage = lineage
        self._note = note
        self._control: WeightControl | None = None
        self._names = {tensor.name for tensor in model_tensors(rollout.model)}

    @property
    def temperature(self) -> float:
        return self._rollout.sampling.temperature

    def roll_out(self, task_ids: Sequence[str], samples: int) -> Iterator[TrajectoryRecord]:
        """`samples` attempts at each task; ends when all have ended."""
        unknown = sorted(set(task_ids) - set(self._tasks))
        if unknown:
            raise BadInput(f"the dataset names the task {unknown[0]!r}, which is not one of the rollout's")
        self._rollout.samples = samples
        yield from self._rollout.stream([self._tasks[task_id] for task_id in task_ids])

    def groups(self, samples: int, tasks_at_once: int) -> Iterator[TrajectoryGroup]:
        """Groups to learn from, for `trl_async.TrlRolloutWorker`: of every task, again and again.

        So many tasks are rolled out together, and the next ones when all of them have ended: what is sampled ahead of
        the trainer.
        """
        task_ids = list(self._tasks)
        for first in itertools.cycle(range(0, len(task_ids), tasks_at_once)):
            found: dict[str, list[TrajectoryRecord]] = {}
            for record in self.roll_out(task_ids[first : first + tasks_at_once], samples):
                members = found.setdefault(record.task_id, [])
                members.append(record)
                if len(members) < samples:
                    continue
                finished = FinishedGroup(record.group_id, record.task_id, record.environment, tuple(members))
                group = trajectory_group(finished, self._lineage)
                if group is not None and group.has_variance:
                    yield group

    def publish(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Write the weights into the store, and return when every engine samples with them."""
        version = PolicyVersion(self._lineage, step)
        missing = sorted(self._names - set(weights))
        if missing:
            raise BadInput(f"the trainer's model has no tensor {missing[0]}, which the engines' model has")
        # Tied weights are in the state twice; files have them once.
        tensors = (raw_tensor(name, weights[name]) for name in sorted(self._names))
        uri = self._store.write(version, tensors, model_facts(Path(self._rollout.model)))
        self.go_over(version, uri)

    def go_over(self, version: PolicyVersion, uri: str) -> None:
        """Return when every engine samples with weights of the store; steps that run meanwhile go on."""
        if self._rollout.session_id is None:
            self._rollout.open([*self._tasks.values()])
        self._rollout.client.sync(self._switch, version, uri)
        self._store.prune(self._lineage, 1, {version})

    async def _switch(self, version: PolicyVersion, uri: str) -> None:
        if self._control is None:
            session = self._rollout.session_id
            assert session is not None
            self._control = WeightControl(self._rollout.client, session, self._note)
            self._control.stepped(PolicyVersion(self._lineage, 0))
        manifest = self._store.manifest(version)
        self._control.stepped(version)
        self._control.published(version, uri, 0 if manifest is None else manifest.nbytes)
        await self._control.switch(version)
