"""Attempts: a task, and the identity of the trajectory that attempts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec, joined_domain
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.mix import part_of, parts_of
from heddle_dask.environments.splits import prompt_key
from heddle_dask.live.driver.programs.branch import Branch, BranchTree, Recorded
from heddle_dask.live.wire.driver_messages import SubmittedTrajectory
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix

# An estimate: the length of a rendered prompt is known when its first step is requested.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trajectory to run: a task, its identity, and its journalled results where the run is resumed."""

    task: Task
    # As the scheduler knows it. When its environment fails, the scheduler is told of another trajectory.
    spec: TrajectorySpec
    seed: int
    environment: Environment
    name: str  # id of the trajectory in journal and store, whatever happens to its environment
    recorded: Recorded | None = None
    failures: int = 0  # how often its environment has failed, or its agent was interrupted
    prefix: TrajectoryPrefix | None = None  # what it replays first, in each environment

    def in_fresh_environment(self) -> Attempt:
        """The same trajectory after one more failure of its environment: nothing of what it did counts."""
        failures = self.failures + 1
        trajectory_id = TrajectoryId(f"{self.name}~{failures}")
        spec = replace(self.spec, trajectory_id=trajectory_id, resumed_tokens=self._prefix_tokens)
        return replace(self, spec=spec, failures=failures)

    def continued(self, recorded: Recorded) -> Attempt:
        """With its journalled results, in the environment that was the last one then, or in a fresh one."""
        attempt = replace(self, recorded=recorded)
        for _ in range(recorded.fresh_environments):
            attempt = attempt.in_fresh_environment()
        mine = recorded.branch(attempt.path)
        resumed_tokens = self._prefix_tokens + mine.generated_tokens
        return replace(attempt, spec=replace(attempt.spec, resumed_tokens=resumed_tokens))

    def behind(self, prefix: TrajectoryPrefix | None) -> Attempt:
        """The same attempt, which goes on behind a prefix."""
        if prefix is None:
            return self
        return replace(self, prefix=prefix, spec=replace(self.spec, resumed_tokens=prefix.sampled_tokens))

    @property
    def _prefix_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.sampled_tokens

    @property
    def begun_again(self) -> int:
        """How often it has begun again because its agent was interrupted."""
        return 0 if self.recorded is None else self.recorded.begun_again

    @property
    def path(self) -> str:
        """Under which the journal has its results: in each fresh environment another one."""
        return f"~{self.failures}" if self.failures else ""

    def branch(self) -> Branch:
        """The place of its first context."""
        recorded = self.recorded or Recorded()
        tree = BranchTree(TrajectoryId(self.name), recorded.branches, known_as=self.spec.trajectory_id)
        return Branch(tree, self.path)

    @property
    def replayed(self) -> Recorded:
        """What the journal holds of it, in this environment."""
        return (self.recorded or Recorded()).branch(self.path)

    def submitted(self) -> SubmittedTrajectory:
        """What the scheduler is told: with the work that is left, where its task knows the whole."""
        task, done = self.task, self.replayed
        return SubmittedTrajectory(
            self.spec,
            known_tokens=max(task.known_tokens - done.generated_tokens - self._prefix_tokens, 0),
            known_tools_s=max(task.known_tools_s - done.tools_s, 0),
            known_observed_tokens=max(task.known_observed_tokens - done.observed_tokens, 0),
        )


def trajectory_seed(run_seed: int, task_id: str, sample_index: int) -> int:
    """The seed of one trajectory; the same in every process."""
    digest = blake2b(f"{run_seed}/{task_id}/{sample_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def attempts_of(environment: Environment, tasks: Sequence[Task], samples: int, seed: int, batch: str) -> list[Attempt]:
    """`samples` attempts per task; `batch` prefixes the ids of later batches of one session."""
    attempts = []
    for task in tasks:
        part = part_of(environment, task)
        names = [f"{batch}{task.task_id}/{sample}" for sample in range(samples)]
        for sample, spec in enumerate(_specs(names, f"{batch}{task.group or task.task_id}", part, task)):
            seed_of = trajectory_seed(seed, task.task_id, sample)
            attempts.append(Attempt(task, spec, seed_of, part, spec.trajectory_id))
    return attempts


def group_attempts(environment: Environment, task: Task, group: str, members: int, seed: int) -> list[Attempt]:
    """The attempts of one group of a stream; a task that comes again is in another group, with other seeds."""
    specs = _specs([f"{group}/{each}" for each in range(members)], group, environment, task)
    return [
        Attempt(
            task,
            spec,
            trajectory_seed(seed, f"{group}/{task.task_id}", spec.sample_index),
            environment,
            spec.trajectory_id,
        )
        for spec in specs
    ]


def domain_of(environment: Environment, task: Task) -> str:
    """The domain of a task's trajectories: the name of its environment, in a mix of its part, and the kind of task."""
    return joined_domain(part_of(environment, task).name, task.domain)


def domains_of(environment: Environment, tasks: Iterable[Task]) -> set[str]:
    """The domains of these tasks, and the names of all parts of a mix."""
    return {part.name for part in parts_of(environment)} | {domain_of(environment, task) for task in tasks}


def _specs(names: Sequence[str], group: str, environment: Environment, task: Task) -> list[TrajectorySpec]:
    """One specification per name, which differ in name and position only."""
    estimated_tokens = len(task.prompt) // CHARACTERS_PER_TOKEN
    key = prompt_key(environment.name, task)
    return [
        TrajectorySpec(
            trajectory_id=TrajectoryId(name),
            group_id=GroupId(group),
            sample_index=sample,
            domain=domain_of(environment, task),
            prompt_tokens=task.prompt_tokens or estimated_tokens,
            message_tokens=task.message_tokens or estimated_tokens,
            max_steps=task.max_steps,
            prompt_key=key,
        )
        for sample, name in enumerate(names)
    ]
