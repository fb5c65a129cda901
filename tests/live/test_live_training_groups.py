"""Groups of a training on a real cluster: what is too old, redundant or late, and environments that fail.

A trainer is not there: the tests do its steps, and publish weights that engines install.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from worlds.live_agents import echo_tool, hang, load_without_end
from worlds.live_world import control_lines, emulated, engine_process, kill, run, until, without_nannies
from worlds.weight_builders import perturbed

from heddle_dask.core import events as ev
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.journal_codec import decode
from heddle_dask.core.run_description import RetryPolicy, StalenessBound
from heddle_dask.environments.base import Context, EnvironmentFailed, Task, environment_step
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.training.rollout_feed import StreamFeed
from heddle_dask.live.training.sample_intake import SampleIntake
from heddle_dask.live.training.weight_control import WeightControl
from heddle_dask.live.wire.training_messages import EngineWeightState
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.groups import FinishedGroup, GroupPlan, TrainingBatch
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.stored_samples import StoredSamples
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

pytestmark = pytest.mark.cluster

LINEAGE = "a"
ENDLESS_TOKENS = 3500  # at the pace of these engines longer than a test may take
SECONDS_PER_TOKEN = 0.05


def version(number: int) -> PolicyVersion:
    return PolicyVersion(LINEAGE, number)


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalRolloutCluster]:
    with without_nannies():
        made = LocalRolloutCluster(2, tool_cpus=4, dashboard=False)
    with made:
        yield made


class Held:
    """The environment of the tests: each attempt samples two tokens, then does what the test says of it.

    Attributes
    ----------
    begun
        Attempts that have sampled their first tokens, by task.
    holds_resources
        Whether the first attempt at t0 never leaves a tool, and the second one an engine.
    """

    def __init__(self, folder: Path, holds_resources: bool = True) -> None:
        self.begun: Counter[str] = Counter()
        self.holds_resources = holds_resources
        self.released: dict[str, asyncio.Event] = {}
        self.in_tool = folder / "process of the tool"
        self.source = EnvironmentSource(
            FunctionEnvironment(self.solve, name="held", tasks=self.tasks), 1, round_tasks=40
        )

    @staticmethod
    def tasks(count: int, seed: int) -> list[Task]:
        return [Task(f"t{number}", f"task {number}") for number in range(count)]

    def hold(self, *names: str) -> None:
        """These attempts (``t3/1``) go on when they are released."""
        self.released |= {name: asyncio.Event() for name in names}

    def release(self, *names: str) -> None:
        for name in names:
            self.released[name].set()

    async def solve(self, task: Task, ctx: Context) -> float:
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=2, ignore_eos=True)
        number = self.begun[task.task_id]
        self.begun[task.task_id] += 1
        if task.task_id == "t0" and self.holds_resources:
            await self.hold_on(number, ctx)
        if (event := self.released.get(f"{task.task_id}/{number}")) is not None:
            await event.wait()
        return float(number % 2)

    async def hold_on(self, number: int, ctx: Context) -> None:
        """The first attempt at t0 holds a tool, the second one an engine."""
        if number == 0:
            await ctx.call(hang, str(self.in_tool))
        elif number == 1:
            await ctx.generate(max_tokens=ENDLESS_TOKENS, ignore_eos=True)

    async def holds_on(self, rollout: Rollout) -> int:
        """Wait until a tool and a step of t0 are under way; returns the process of the tool."""
        await until(lambda: self.in_tool.exists() and rollout.progress().get("generating", 0) == 1)
        return int(self.in_tool.read_text())


class Fragile:
    """An environment that fails in one attempt of ten; a reset takes a hundred times as long as a step."""

    step_s, reset_s, late_s = 0.005, 0.5, 0.05

    def __init__(self, tail: str) -> None:
        self.tail = tail
        self.attempts: Counter[tuple[str, int]] = Counter()
        self.failed_at: dict[tuple[str, int], float] = {}
        self.waited_s: list[float] = []

    @staticmethod
    def tasks(count: int, seed: int) -> list[Task]:
        return [Task(f"t{number}", f"task {number}") for number in range(5)]

    def failure(self, task_id: str, seed: int, attempt: int) -> str:
        """What goes wrong in an attempt; t1 has never worked."""
        draw = random.Random(f"{self.tail} {task_id} {seed}")
        if task_id == "t1":
            return "broken reset"
        fails = attempt == 0 and draw.random() < 0.1
        return draw.choice(("broken reset", "late reset", "broken step")) if fails else ""

    async def solve(self, task: Task, ctx: Context) -> float:
        key = (task.task_id, ctx.seed)
        if key in self.failed_at:
            self.waited_s.append(time.monotonic() - self.failed_at.pop(key))
        failure = self.failure(*key, self.attempts[key])
        self.attempts[key] += 1
        assert ctx.context_tokens == 0, "it is a fresh one"
        try:
            await self.play(task, ctx, failure)
        except EnvironmentFailed:
            self.failed_at[key] = time.monotonic()
            raise
        return float(ctx.seed % 2)

    async def play(self, task: Task, ctx: Context, failure: str) -> None:
        draw = random.Random(ctx.seed)
        with environment_step("reset"):
            if failure == "late reset":
                async with asyncio.timeout(self.late_s):
                    await asyncio.Event().wait()
            if failure == "broken reset":
                await ctx.call(int, "gone")
            await ctx.call(echo_tool, "reset", self.reset_s)
        ctx.append("user", task.prompt)
        for _ in range(2):
            await ctx.generate(max_tokens=2, ignore_eos=True)
            took = draw.gauss(1, 0.2) if self.tail == "normal" else draw.paretovariate(1.2)
            with environment_step("step"):
                if failure:
                    await ctx.call(int, "gone")
                await ctx.call(echo_tool, "step", self.step_s * min(max(0, took), 100))


class Trainer:
    """What the loop of a training does, one thing after another."""

    def __init__(self, folder: Path, model: str, rollout: Rollout, samples: StoredSamples) -> None:
        self.model, self.rollout, self.samples = model, rollout, samples
        self.store = WeightStore(str(folder / "weights"))
        self.feed = StreamFeed(rollout)
        self.intake = SampleIntake(samples, LINEAGE, self.feed.replace_groups)
        self.dropped: list[str] = []
        self.notes: list[str] = []

    async def open(self, source: EnvironmentSource, plan: GroupPlan, trained: int = 0) -> None:
        def drop(group_id: str) -> None:
            self.dropped.append(group_id)
            self.intake.dropped(group_id)

        session = await self.feed.open(
            source,
            plan,
            self.intake.accepts,
            self.intake.counted,
            lambda group_id: self.intake.begun(group_id, trained),
            drop,
        )
        self.control = WeightControl(self.rollout.client, session, self.notes.append)
        self.control.begins(version(trained), self.intake.untrained_trajectories)

    async def unless_failed(self, awaited: Awaitable[Any]) -> Any:
        """The result, or the error that has ended the rollout."""
        task, failed = asyncio.ensure_future(awaited), asyncio.ensure_future(self.feed.follow())
        await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            task.cancel()
            await failed
        failed.cancel()
        return await task

    async def train(self, step: int) -> TrainingBatch:
        """Form a batch, do the optimiser step, publish."""
        batch = load_batch(await self.unless_failed(self.intake.batch(step)))
        assert all(step - 1 - group.first_version <= 1 for group in batch.groups)
        self.intake.trained(version(step))
        self.control.stepped(version(step))
        self.publish(step)
        return batch

    def publish(self, number: int) -> None:
        tensors = perturbed(self.model, number)
        uri = self.store.write(version(number), tensors, model_facts(self.model))
        self.control.published(version(number), uri, 0)

    async def switch(self, number: int) -> None:
        await self.unless_failed(self.control.switch(version(number)))


@asynccontextmanager
async def rollout_on(made: LocalRolloutCluster, model: str, env: Any, **options: Any) -> AsyncIterator[Rollout]:
    assert made.credentials is not None
    security = made.credentials.security  # the cluster belongs to another event loop
    engines = emulated(model, seconds_per_token=SECONDS_PER_TOKEN, slots=8)
    async with (
        Client(made.scheduler_address, security=security, asynchronous=True) as client,
        Rollout(client, env=env, model=model, engines=engines, **options) as rollout,
    ):
        yield rollout


@asynccontextmanager
async def training(
    made: LocalRolloutCluster,
    model: str,
    folder: Path,
    held: Held,
    plan: GroupPlan,
    trained: int | None = None,
) -> AsyncIterator[Trainer]:
    """A training with a bound of 1; `trained` steps of an earlier process are there already."""
    assert plan.staleness is not None
    out = folder / "run.zarr"
    rule = BatchRule.of(plan.staleness, plan.members, waits_for_oldest=False)
    if trained is None:
        samples = StoredSamples.create(folder, rule, LINEAGE)
    else:
        samples = StoredSamples.reopen(folder, rule, out)
        samples.resume(version(trained))
    written = Output(out, "create" if trained is None else "resume")
    async with rollout_on(made, model, held.source.environments[0], out=written) as rollout:
        trainer = Trainer(folder, model, rollout, samples)
        await trainer.open(held.source, plan, trained or 0)
        try:
            yield trainer
        finally:
            await trainer.feed.close()
            samples.close()


def group_of(records: RunReader, group_id: str) -> list[TrajectoryRecord]:
    return sorted((r for r in records if r.group_id == group_id), key=lambda r: r.trajectory_id)


def sampled(records: list[TrajectoryRecord]) -> int:
    return sum(step.generated_tokens for record in records for step in record.steps)


def answered_tokens(out: Path, prefix: str) -> list[int]:
    """What the engines sampled in each step of the trajectories with this prefix, by the controller's journal."""
    events = [decode(line[0]) for line in control_lines(out)]
    answered = [event for event in events if isinstance(event, ev.StepFinished)]
    return [event.new_tokens for event in answered if event.step_id.trajectory_id.startswith(prefix)]


def names(batch: TrainingBatch) -> list[str]:
    return [group.group_id for group in batch.groups]


# More than a slow machine needs.
REPEATS = 50


def test_what_is_too_old_is_cancelled_and_its_task_comes_again(
    shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    """Weights are updated under a tool and a step that never end; then the training is resumed."""
    plan = GroupPlan(members=3, max_repeats=REPEATS, staleness=StalenessBound(1, "cancel", 3))
    held = Held(tmp_path)
    used: list[str] = []
    wasted: list[int] = []

    async def body() -> None:
        async with training(shared_cluster, model_dir, tmp_path, held, plan) as trainer:
            trainer.feed.open_batches(99)
            process = await held.holds_on(trainer.rollout)
            used.extend(names(await trainer.train(1)))
            await trainer.switch(1)
            assert psutil.pid_exists(process) and not trainer.dropped, "n - b is 1"
            used.extend(names(await trainer.train(2)))
            # Nothing of it ends by itself.
            await until(lambda: trainer.dropped == ["g000000"])
            # Two of each step that had ended, and what the endless one had sampled: its engine says so later.
            await until(lambda: trainer.feed.wasted_tokens["stale"] > 6)
            wasted.append(trainer.feed.wasted_tokens["stale"])
            await until(lambda: not psutil.pid_exists(process))
            step = 2
            # On a slow machine the second attempt becomes too old as well, and another one follows it.
            while not any(trainer.samples.buffer.knows(f"g000000.{repeat}") for repeat in range(1, REPEATS + 1)):
                await trainer.switch(step)
                step += 1
                used.extend(names(await trainer.train(step)))
            await trainer.switch(step)
            # Two groups come to wait, and nothing else may be under way: (alpha + 1) B.
            await trainer.unless_failed(until(lambda: trainer.intake.counted == step + 2))

        async with training(shared_cluster, model_dir, tmp_path, held, plan, trained=step) as trainer:
            trainer.publish(step)
            await trainer.switch(step)
            trainer.feed.open_batches(99)
            status = await trainer.control.status()
            assert (status.accepted, status.running, status.credits) == (6, 0, 0)
            used.extend(names(await trainer.train(step + 1)))
            await trainer.unless_failed(until(lambda: trainer.intake.counted == step + 3))
            status = await trainer.control.status()
            assert (status.accepted + status.running, status.credits) == (9, 0)
            assert trainer.notes == []

    run(body())
    assert "g000000" not in used
    assert len(used) == len(set(used))
    reader = RunReader(tmp_path / "run.zarr")
    stale = group_of(reader, "g000000")
    assert sorted((r.status, r.cause) for r in stale) == [("aborted", "stale")] * 2 + [("completed", "")]
    assert sampled(stale) == 6
    assert wasted == [sum(answered_tokens(tmp_path / "run.zarr", "g000000/"))]
    assert [r.reward for r in stale if r.cause] == [None, None]


def test_members_and_groups_that_come_late_join_a_later_batch(
    shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    bound = StalenessBound(1, "cancel", 4, redundant_trajectories=5)
    plan = GroupPlan(2, 1, 2, extra_groups=1, late_members="keep", staleness=bound)
    held = Held(tmp_path, holds_resources=False)
    held.hold("t0/0", "t0/1", "t0/2", "t1/2", "t3/0")
    batches: list[TrainingBatch] = []

    async def body() -> None:
        async with training(shared_cluster, model_dir, tmp_path, held, plan) as trainer:
            trainer.feed.open_batches(1)
            # Of the first three groups two are enough, and of their members two.
            await until(lambda: (held.begun["t0"], held.begun["t1"]) == (3, 3))
            batches.append(await trainer.train(1))
            trainer.feed.open_batches(2)
            await trainer.switch(1)
            held.release("t1/2", "t0/0", "t0/1", "t0/2")
            waits = ("g000000", "g000000+late", "g000001+late")
            knows = trainer.samples.buffer.knows
            await trainer.unless_failed(until(lambda: all(map(knows, waits))))
            batches.append(await trainer.train(2))
            assert not trainer.dropped and not trainer.feed.wasted_tokens

    run(body())
    first, second = ({group.group_id: group for group in batch.groups} for batch in batches)
    assert {"g000001", "g000002"} <= set(first) <= {"g000001", "g000002", "g000002+late"}
    assert {"g000000", "g000000+late", "g000001+late"} <= set(second)
    late = second["g000001+late"]
    assert [member.reward for member in late.members] == [0.0]
    assert sorted(late.earlier_rewards) == [0.0, 1.0], "advantages are relative to the whole group"
    used = [member.trajectory_id for batch in batches for group in batch.groups for member in group.members]
    assert len(used) == len(set(used))
    assert [r.trajectory_id for r in RunReader(tmp_path / "run.zarr") if r.cause] == []


def test_groups_beyond_a_batch_are_cancelled_when_it_is_full(
    shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    bound = StalenessBound(1, "cancel", 2, redundant_trajectories=2)
    plan = GroupPlan(2, extra_groups=1, staleness=bound)
    held = Held(tmp_path)
    held.hold("t1/0")
    batches: list[TrainingBatch] = []
    wasted: list[int] = []

    async def body() -> None:
        async with training(shared_cluster, model_dir, tmp_path, held, plan) as trainer:
            trainer.feed.open_batches(1)
            process = await held.holds_on(trainer.rollout)
            held.release("t1/0")
            batches.append(await trainer.train(1))
            await until(lambda: trainer.dropped == ["g000000"])
            await until(lambda: not psutil.pid_exists(process))
            await until(lambda: trainer.rollout.progress()["generating"] == 0)
            # Two of each step that had ended, and what the endless one had sampled.
            await until(lambda: trainer.feed.wasted_tokens["redundant"] > 4)
            wasted.append(trainer.feed.wasted_tokens["redundant"])
            status = await trainer.control.status()
            assert (status.accepted, status.running) == (2, 0)
            # Their places are free.
            trainer.feed.open_batches(2)
            await trainer.switch(1)
            batches.append(await trainer.train(2))

    run(body())
    assert names(batches[0]) == ["g000001"]
    assert len(batches[1].groups) == 1
    redundant = group_of(RunReader(tmp_path / "run.zarr"), "g000000")
    assert [(r.status, r.cause, r.reward) for r in redundant] == [("aborted", "redundant", None)] * 2
    assert sampled(redundant) == 4
    assert wasted == [sum(answered_tokens(tmp_path / "run.zarr", "g000000/"))]


def test_training_goes_on_when_an_engine_is_killed_while_it_installs(
    shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    plan = GroupPlan(members=2, staleness=StalenessBound(1, "cancel", 2))
    held = Held(tmp_path, holds_resources=False)
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with training(shared_cluster, model_dir, tmp_path, held, plan) as trainer:
            trainer.feed.open_batches(99)
            await trainer.train(1)
            await trainer.switch(1)
            await trainer.rollout.client.run(load_without_end, "rollout-0")
            await trainer.train(2)
            switching = asyncio.ensure_future(trainer.switch(2))

            async def until_engines(holds: Callable[[Sequence[EngineWeightState]], bool]) -> None:
                while not holds((await trainer.control.status()).engines):
                    await asyncio.sleep(0.01)

            def installs(engine: EngineWeightState) -> bool:
                return engine.engine_id.startswith("rollout-0") and engine.state == "installing"

            await until_engines(lambda engines: any(map(installs, engines)))
            kill(engine_process("rollout-0").pid)
            await switching
            for step in (3, 4):
                await trainer.train(step)
                await trainer.switch(step)
            # It comes back under another id, with the newest weights.
            await until_engines(lambda engines: [e.installed for e in engines] == [version(4)] * 2)

    run(body())
    installed: dict[str, list[int]] = {}
    for line in control_lines(out):
        event = decode(line[0])
        if isinstance(event, ev.WeightsInstalled) and not event.cause:
            installed.setdefault(event.engine_id, []).append(event.version.number)
    assert all(numbers == sorted(set(numbers)) for numbers in installed.values())
    assert len(installed) == 3
    for record in RunReader(out):
        versions = [number for number in record.branches[0].policy_version.tolist() if number >= 0]
        assert versions == sorted(versions)


@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_failing_environments_are_replaced_and_never_earn_a_reward(
    tail: str, shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    fragile = Fragile(tail)
    environment = FunctionEnvironment(fragile.solve, name="fragile", tasks=fragile.tasks)
    retries = RetryPolicy(environment_backoff_s=1, max_environment_attempts=3, max_task_failures=4)
    lines: list[str] = []
    out = tmp_path / "run.zarr"

    async def body() -> tuple[list[FinishedGroup], dict[str, int], dict[str, int]]:
        options: dict[str, Any] = {"budget": Budget(retries=retries), "progress": lines.append}
        async with rollout_on(shared_cluster, model_dir, environment, out=out, **options) as rollout:
            stream = rollout.stream_groups(EnvironmentSource(environment, 1), GroupPlan(3, groups_per_batch=4))
            groups = []
            for number in (1, 2):  # a round of the tasks for each batch, without the broken one
                stream.open_batches(number)
                groups += [await anext(stream) for _ in range(4)]
                assert stream.dropped_groups == {"environment": 1}
            await stream.aclose()
            return groups, stream.wasted_tokens, stream.dropped_groups

    groups, wasted, dropped = run(body())
    records = [record for group in groups for record in group.records]
    assert sorted(group.task_id for group in groups) == sorted(["t0", "t2", "t3", "t4"] * 2)
    assert [r.status for r in records] == ["completed"] * 24
    assert [r.reward for r in records] == [float(r.seed % 2) for r in records]
    injected = {r.trajectory_id: fragile.failure(r.task_id, r.seed, 0) for r in records}
    failures = Counter(injected.values())
    assert 24 > failures[""] > 12
    for record in records:
        failed = bool(injected[record.trajectory_id])
        assert record.metadata.get("environment_failures", 0) == failed
        assert fragile.attempts[record.task_id, record.seed] == 1 + failed
        assert [step.generated_tokens for step in record.steps] == [2, 2]
    assert wasted == {"environment": 2 * failures["broken step"]}
    assert min(fragile.waited_s) >= 1.0

    broken = [key for key in fragile.attempts if key[0] == "t1"]
    assert len(broken) == 3, "it does not come in the second round"
    assert sum(fragile.attempts[key] for key in broken) >= retries.max_task_failures
    assert dropped == {"environment": 1}
    (line,) = (line for line in lines if "quarantined" in line)
    assert "t1 is quarantined: its environment failed 4 times: reset: ActionFailed" in line
    stored = [r for r in RunReader(out) if r.task_id == "t1"]
    assert {(r.cause, r.reward) for r in stored} == {("environment", None)}
