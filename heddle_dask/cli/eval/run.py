"""Runs one evaluation from the command line: the arms on one cluster, those of one model side by side."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from distributed import Client

from heddle_dask.cli.eval.arm_run import ArmRun, ArmWork, stored_outcomes
from heddle_dask.cli.eval.order import ArmsOrder
from heddle_dask.cli.eval.tables import arms_table, costs_table, difference_lines, failure_lines
from heddle_dask.cli.one_line import EXIT_FAILED, one_line
from heddle_dask.cli.rollout.interrupts import Interrupts
from heddle_dask.cli.rollout.run import Outcome, prepare_process
from heddle_dask.cli.shared_options import write_file
from heddle_dask.cli.stored_run import remove_if_empty
from heddle_dask.evaluation.attempt_plan import ArmIdentity, EvaluationFile, samples_by_task
from heddle_dask.evaluation.comparison_page import comparison_page
from heddle_dask.evaluation.estimates import (
    EvaluatedArm,
    arm_difference,
    evaluated_arm,
    interval_json,
    ks_up_to,
)
from heddle_dask.live.driver.connection.control_channel import ClusterLost
from heddle_dask.live.driver.runs.progress import Meter, ProgressDisplay
from heddle_dask.views.drawing.safe_console import SafeConsole
from heddle_dask.views.history.reward_history import RewardTally

PAGE = "index.html"
INTERVAL = "95 % over tasks, percentile bootstrap"


def run_evaluation(order: ArmsOrder, *, to_stderr: bool) -> Outcome:
    """Run it; prints progress on stderr and the table on stdout, or on stderr too."""
    run = EvaluationRun(order, ProgressDisplay(SafeConsole(stderr=True)))
    prepare_process()
    try:
        exit_code = asyncio.run(run.run())
    finally:
        run.remove_empty_stores()
    arms = evaluated_arms(run.file, order)
    page = order.out / PAGE
    result = evaluation_json(arms, order)
    write_file("--out", page, comparison_page(order.out.name, arms, order.passed_from))
    console = SafeConsole(stderr=to_stderr)
    console.print(arms_table(arms))
    console.print(costs_table(arms))
    for line in (*difference_lines(arms), *failure_lines(arms)):
        console.print(line, soft_wrap=True)
    console.print(f"compared task by task in {page}", soft_wrap=True, markup=False, highlight=False)
    again = sum(_to_make_again(arm, order.samples) for arm in arms[: len(order.arms)])
    if run.lost:
        one_line(f"{run.lost}; the same command goes on")
    elif again and not exit_code:
        one_line(f"{again} attempts were ended by the infrastructure: the same command makes them again")
    if not any(arm.overall.samples or arm.overall.unknown for arm in arms):
        exit_code = exit_code or EXIT_FAILED
    return Outcome({**result, "to_make_again": again}, exit_code)


def evaluated_arms(file: EvaluationFile, order: ArmsOrder) -> list[EvaluatedArm]:
    """The arms of the evaluation, those that were asked for first, as their stores are now."""
    identities = [arm.identity for arm in order.arms]
    identities += [arm.identity for arm in file.arms.values() if arm.identity not in identities]
    found = []
    for identity in identities:
        outcomes = stored_outcomes(order.out / "arms" / f"{identity.slug}.zarr")
        most = max(samples_by_task(outcomes).values(), default=order.samples)
        found.append(evaluated_arm(_title(identity, identities), outcomes, ks_up_to(most), order.passed_from))
    return found


def evaluation_json(arms: Sequence[EvaluatedArm], order: ArmsOrder) -> dict[str, Any]:
    """The JSON object of ``heddle eval``: each arm, and the differences of the others from the first."""
    differences = []
    for arm in arms[1:]:
        found = arm_difference(arms[0], arm)
        if found is not None:
            pair = {"from": arms[0].name, "to": arm.name, "tasks": found[1]}
            differences.append({**pair, "pass_at_1": interval_json(found[0])})
    return {
        "arms": [arm.as_json() for arm in arms],
        "differences": differences,
        "passed_from": order.passed_from,
        "interval": INTERVAL,
        "out": str(order.out),
        "html": str(order.out / PAGE),
    }


def _to_make_again(arm: EvaluatedArm, samples: int) -> int:
    """Attempts that the infrastructure has ended and no other one has replaced."""
    return sum(min(task.infrastructure, max(0, samples - task.samples - task.unknown)) for task in arm.tasks.values())


def _title(identity: ArmIdentity, identities: Iterable[ArmIdentity]) -> str:
    return identity.title([other for other in identities if other != identity])


class EvaluationRun:
    """One evaluation. The constructor checks every option that can be checked without starting a process."""

    def __init__(self, order: ArmsOrder, progress: ProgressDisplay) -> None:
        self.order = order
        self.progress = progress
        self.file = order.begun or EvaluationFile(order.seed)
        self.lost = ""
        self._interrupts = Interrupts(self._stop)
        self._task: asyncio.Task[Any] | None = None
        works = [ArmWork.of(arm, self.file.batches_of(arm.identity), order.samples, order.seed) for arm in order.arms]
        logs = order.out / "cluster"
        begun = [work for work in works if work.batches or work.done]
        # Each compares its options with those of its store, also where nothing is left to do.
        runs = [ArmRun(work, progress, self._begins, self._interrupts, logs) for work in begun]
        self.arms = [run for run in runs if run.left]

    async def run(self) -> int:
        if not self.arms:
            self.progress.message(f"every attempt of {self.order.out} has ended: nothing is left to do")
            return 0
        self._task = asyncio.current_task()
        self._interrupts.watch()
        self.file.write(self.order.out)
        try:
            async with self.arms[0].cluster() as client:
                try:
                    await self._make_all(client)
                except ClusterLost as error:
                    self.lost = str(error)
                    # The client is closed while it tries to connect again, and would log that with a traceback.
                    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        except asyncio.CancelledError:
            if not self._interrupts.exit_code:
                raise
        return self._interrupts.exit_code or (EXIT_FAILED if self.lost else 0)

    async def _make_all(self, client: Client) -> None:
        if self.order.arms[0].asked["scheduler"] is None:
            self.progress.message(f"watch it with: heddle top {shlex.quote(str(self.order.out / 'cluster'))}")
        meter = Meter(sum(arm.left for arm in self.arms), _JointCounts(self.arms), self._counts)
        async with self.progress.following(meter):
            # Engines have one model: arms of one share them, and the tail of one is filled by the others.
            for _, arms in groupby(self.arms, key=lambda arm: arm.model):
                if not self._interrupts.exit_code:
                    await _side_by_side([arm.roll_out(client) for arm in arms])
        if not self._interrupts.exit_code:
            self.progress.message("done; ending every process")

    def remove_empty_stores(self) -> None:
        """Remove new stores in which no attempt has begun, so that the same command can be given again."""
        for arm in self.arms:
            if arm.work.mode == "create":
                remove_if_empty(arm.out)

    def _begins(self, work: ArmWork, begun: int) -> None:
        """Write down a batch before it begins."""
        self.file = self.file.with_batches(work.ordered.identity, (*work.done, *work.batches[:begun]))
        self.file.write(self.order.out)

    def _counts(self) -> Mapping[str, Any]:
        """Counts of all arms together."""
        joint: Counter[str] = Counter()
        told: dict[str, Any] = {}
        for arm in self.arms:
            for name, value in arm.counts().items():
                if isinstance(value, int):
                    joint[name] += value
                else:
                    told[name] = value
        return {**told, **joint, "finished": sum(arm.tally.trajectories for arm in self.arms)}

    def _stop(self, to_resume: bool) -> None:
        """On the first signal: stop what runs; whatever the signal, the same command goes on with it."""
        self.progress.message("stopping: finished attempts are kept; the same command goes on")
        if not [arm for arm in self.arms if arm.interrupt()]:  # the cluster starts
            assert self._task is not None
            self._task.cancel()


class _JointCounts:
    """What is counted of ended trajectories over several arms."""

    def __init__(self, arms: Sequence[ArmRun]) -> None:
        self._arms = arms

    @property
    def failed(self) -> int:
        return sum(arm.tally.failed for arm in self._arms)

    @property
    def rewards(self) -> RewardTally:
        return self._arms[0].tally.rewards if len(self._arms) == 1 else RewardTally()


async def _side_by_side(runs: Sequence[Any]) -> None:
    """Await all; the first error ends the others, and is raised as it is."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
