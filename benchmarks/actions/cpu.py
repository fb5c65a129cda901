"""ARL-Tangram's experiments on CPUs (its sections 6.2 to 6.4) in virtual time, against its baselines and tuned ones.

Baselines are tuned on other seeds than those that are reported. A ratio is the mean action completion time (ACT) of an
arm over that of the elastic arm on the same trajectories; it is the mean over seeds, with the least and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.actions.cpu_job import CpuFigures, CpuJob, CpuTask, run_cpu_job
from benchmarks.actions.rows import ActionRow
from benchmarks.actions.software_workload import SoftwareWorkload
from benchmarks.experiments import Experiment, Study
from benchmarks.opponents import FIXED, PER_TRAJECTORY, WORKER_POOLS
from benchmarks.opponents.pod_settings import PodSettings
from benchmarks.tables import ratio_fields

ELASTIC = "elastic,order=fcfs"
TAIL = "elastic,order=tail"
BATCHES = (128, 512, 1024, 1280, 1536)
NODES = (3, 5, 8)
UNITS = (1, 2, 4, 8, 16, 32)
LOADS_S = (60.0, 240.0)
LIMITS = (4.0, 8.0, 16.0, 32.0)
_TUNING_SEED = 1_000
_BATCH = 1280
_PART_BATCH = 256

Key = TypeVar("Key")


def _act_mean_s(one: CpuFigures) -> float:
    return one.act_mean_s


@dataclass(frozen=True, slots=True)
class CpuBench:
    """The experiments."""

    study: Study
    batches: Sequence[int] = BATCHES

    def batch_sizes(self) -> list[ActionRow]:
        """Batches of 128 to 1,536 on 1,280 cores, against one pod per trajectory."""
        rows: list[ActionRow] = []
        papers = {128: "3.1 to 27.7 over batches", _BATCH: "4.3", 1536: "27.7 at most"}
        for batch in self.batches:
            ours = self._job(batch)
            rows += self._compared(
                "cpu-batch",
                ours,
                {
                    "pod 0.5 to 4 CPUs": (pods_of(ours), ""),
                    "pod, limit tuned": self._tuned_pods(ours),
                    "pod 0.5 to 4 CPUs, control plane at its objectives": (_slow_pods(ours, 0.0), ""),
                    "the same, starts time out after 30 s": (_slow_pods(ours, 30.0), ""),
                },
                papers.get(batch, ""),
            )
        return rows

    def core_counts(self) -> list[ActionRow]:
        """1,280 trajectories on 768 cores and more, with tests of 60 and of 240 CPU seconds."""
        rows: list[ActionRow] = []
        for tests_s in LOADS_S:
            for nodes in NODES:
                job = replace(self._job(_BATCH), pools=(("cpu", nodes),))
                ours = with_workload(job, tests_mean_s=tests_s)
                arms = {"pod 0.5 to 4 CPUs": (pods_of(ours), ""), "pod, limit tuned": self._tuned_pods(ours)}
                paper = "1.89 to 4.33, least at 768" if nodes == NODES[0] else ""
                rows += self._compared(f"cpu-cores, tests of {tests_s:g} s", ours, arms, paper)
        return rows

    def stages(self) -> list[ActionRow]:
        """Commands in the environment and rewards, apart."""
        ours = self._job(_BATCH)
        arms = {
            "pod 0.5 to 4 CPUs": (pods_of(ours), ""),
            "pod 0.5 to 4 CPUs, control plane at its objectives": (_slow_pods(ours, 0.0), ""),
        }
        rows: list[ActionRow] = []
        for stage, paper, of in (
            ("environment", "9.0", lambda one: one.commands_act_s),
            ("reward", "2.8", lambda one: one.rewards_act_s),
        ):
            rows += self._compared(f"cpu-stages, {stage}", ours, arms, paper, of=of)
        return rows

    def unit_numbers(self) -> list[ActionRow]:
        """Rewards with elastic units against fixed ones: 4 in a light load, 16 in a heavy one, and the best number."""
        rows: list[ActionRow] = []
        for tests_s in LOADS_S:
            for batch, units, paper in ((48, 4, "2.0"), (_PART_BATCH, 16, "3.0")):
                ours = with_workload(_part(batch), tests_mean_s=tests_s)
                fixed = {number: replace(ours, actions=f"{FIXED},units={number}") for number in UNITS}
                best = self._best(fixed)
                arms = {
                    f"fixed {units}": (fixed[units], ""),
                    "fixed, number tuned": (fixed[best], f"{best} units"),
                }
                rows += self._compared(
                    f"cpu-units, rewards, tests of {tests_s:g} s",
                    ours,
                    arms,
                    paper,
                    paper_arm=f"fixed {units}",
                    of=lambda one: one.rewards_act_s,
                )
        return rows

    def static_pools(self) -> list[ActionRow]:
        """CPUs that each trajectory owns, and a fixed pool of workers for commands and one for tests, both tuned."""
        rows: list[ActionRow] = []
        for tests_s in LOADS_S:
            ours = with_workload(_part(_PART_BATCH), tests_mean_s=tests_s)
            owned = {cpus: replace(ours, actions=f"{PER_TRAJECTORY},cpus={cpus}") for cpus in (1, 2, 4)}
            pools = {
                (share, units): replace(ours, actions=f"{WORKER_POOLS},kinds={_kinds(ours.cores, share, units)}")
                for share in (0.25, 0.5, 0.75)
                for units in (4, 16)
            }
            cpus, (share, units) = self._best(owned), self._best(pools)
            arms = {
                "own CPUs per trajectory, number tuned": (owned[cpus], f"{cpus} CPUs"),
                "worker pools, sizes tuned": (
                    pools[share, units],
                    f"{share:.0%} for tests, {units} CPUs each",
                ),
            }
            rows += self._compared(f"cpu-static, tests of {tests_s:g} s", ours, arms)
        return rows

    def shared_pool(self) -> list[ActionRow]:
        """Two workloads on one pool against each on half of it, started together and 200 s apart."""
        rows: list[ActionRow] = []
        for later_s in (0.0, 200.0):
            base = with_workload(_part(_PART_BATCH // 2), tests_mean_s=LOADS_S[-1])
            task = base.tasks[0]
            first = replace(task, workload=replace(task.workload, name="first"))
            second = replace(task, workload=replace(task.workload, name="second"), submitted_s=later_s)
            shared = replace(base, tasks=(first, second), pools=(("cpu", 2),), host_cpus=128)
            tasks = tuple(
                replace(each, workload=replace(each.workload, pool=each.workload.name)) for each in (first, second)
            )
            isolated = replace(shared, tasks=tasks, pools=(("first", 1), ("second", 1)))
            note = f"second workload {later_s:g} s later"
            rows += self._compared("cpu-shared-pool", shared, {"isolated pools": (isolated, note)}, note=note)
        return rows

    def orders(self) -> list[ActionRow]:
        """Tail first against first come, first served, with exact and with learned predictions: ACT, and steps."""
        rows: list[ActionRow] = []
        for predictor in ("oracle", "xgboost"):
            for cpus in (96, 256):
                job = with_workload(_part(_PART_BATCH), tests_mean_s=LOADS_S[-1])
                tail = replace(
                    job,
                    host_cpus=cpus,
                    actions=TAIL,
                    preset="heddle",
                    overrides=(f"predictor={predictor}",),
                    warm=True,
                )
                arms = {"elastic, first come": (replace(tail, actions=ELASTIC), f"predictor {predictor}")}
                rows += self._compared(
                    "cpu-order", tail, arms, ours_name="elastic, tail first", note=f"predictor {predictor}"
                )
        return rows

    def constants(self) -> list[ActionRow]:
        """Each constant without a source is varied alone: the ratio to a pod of 0.5 to 4 CPUs."""
        rows: list[ActionRow] = []
        for name, values in _swept(_part(_PART_BATCH)).items():
            found = [(text, self._ratios(arm, ours), arm) for text, arm, ours in values]
            means = [statistics.fmean(ratios) for _, ratios, _ in found]
            for text, ratios, arm in found:
                row = self._row("cpu-constants", f"{name}: {text}", arm, self._figures(arm))
                note = f"{min(means):.2f} to {max(means):.2f}"
                rows.append(replace(row, **ratio_fields(ratios), note=note))
        return rows

    # -- parts -------------------------------------------------------------------------------------------------

    def _job(self, batch: int) -> CpuJob:
        return CpuJob((CpuTask(SoftwareWorkload(), batch),), 0, ELASTIC)

    def _compared(
        self,
        experiment: str,
        ours: CpuJob,
        arms: Mapping[str, tuple[CpuJob, str]],
        paper: str = "",
        *,
        of: Callable[[CpuFigures], float] | None = None,
        paper_arm: str = "pod 0.5 to 4 CPUs",
        ours_name: str = "elastic",
        note: str = "",
    ) -> list[ActionRow]:
        """A row of ours and one of each arm; `paper` is the paper's ratio of `paper_arm`."""
        value = of or _act_mean_s
        own = self._figures(ours)
        rows = [replace(self._row(experiment, ours_name, ours, own, of), note=note)]
        for name, (job, about) in arms.items():
            figures = self._figures(job)
            ratios = [value(each) / value(mine) for each, mine in zip(figures, own, strict=True)]
            steps = [each.step_s / mine.step_s for each, mine in zip(figures, own, strict=True)]
            row = self._row(experiment, name, job, figures, of)
            rows.append(
                replace(
                    row,
                    **ratio_fields(ratios),
                    step_ratio=statistics.fmean(steps),
                    paper_ratio=paper if name == paper_arm else "",
                    note="; ".join(text for text in (about, row.note) if text),
                )
            )
        return rows

    def _figures(self, job: CpuJob) -> list[CpuFigures]:
        return self._played([replace(job, seed=seed) for seed in self.study.seeds])

    def _played(self, jobs: Sequence[CpuJob]) -> list[CpuFigures]:
        return self.study.runner.figures(CpuFigures, run_cpu_job, jobs, _told)

    def _ratios(self, arm: CpuJob, ours: CpuJob) -> list[float]:
        pairs = zip(self._figures(arm), self._figures(ours), strict=True)
        return [each.act_mean_s / own.act_mean_s for each, own in pairs]

    def _row(
        self,
        experiment: str,
        arm: str,
        job: CpuJob,
        figures: Sequence[CpuFigures],
        of: Callable[[CpuFigures], float] | None = None,
    ) -> ActionRow:
        failed = sum(one.failed for one in figures)
        return ActionRow(
            experiment,
            arm,
            job.batch,
            act_mean_s=statistics.fmean((of or _act_mean_s)(one) for one in figures),
            act_p99_s=0.0 if of else statistics.fmean(one.act_p99_s for one in figures),
            step_s=statistics.fmean(one.step_s for one in figures),
            cores=job.cores,
            overhead_share=statistics.fmean(one.overhead_share for one in figures),
            seeds=len(figures),
            note=f"{failed} calls failed" if failed else "",
        )

    def _tuned_pods(self, ours: CpuJob) -> tuple[CpuJob, str]:
        """Pods with the limit of the least mean ACT for 256 trajectories on 256 cores."""
        base = _part(_PART_BATCH)
        best = self._best({limit: pods_of(base, limit_cpus=limit) for limit in LIMITS})
        return pods_of(ours, limit_cpus=best), f"limit {best:g} CPUs"

    def _best(self, jobs: Mapping[Key, CpuJob]) -> Key:
        """The job with the least mean ACT, on a seed that is not reported."""
        figures = self._played([replace(job, seed=_TUNING_SEED) for job in jobs.values()])
        acts_s = dict(zip(jobs, (one.act_mean_s for one in figures), strict=True))
        return min(acts_s, key=lambda key: acts_s[key])


def _told(job: CpuJob, figures: CpuFigures) -> str:
    pods = job.pods
    arm = job.actions if pods is None else f"pods of {pods.request_cpus:g} to {pods.limit_cpus:g} CPUs"
    return (
        f"{job.batch} trajectories, {job.cores} cores, {arm}, seed {job.seed}: ACT {figures.act_mean_s:.3f} s, "
        f"step {figures.step_s:,.0f} s"
    )


def _part(batch: int) -> CpuJob:
    """A fifth of the paper's cluster: 256 of 1,280 trajectories on one of five nodes, and a fifth of the GPUs."""
    return CpuJob((CpuTask(SoftwareWorkload(), batch),), 0, ELASTIC, pools=(("cpu", 1),), gpus=76)


def pods_of(ours: CpuJob, *, limit_cpus: float = 4.0, **more: Any) -> CpuJob:
    """The same rollout with one pod per trajectory."""
    nodes = tuple(ours.host_cpus for _, hosts in ours.pools for _ in range(hosts))
    # A fifth of the cluster has a fifth of the control plane.
    settings: dict[str, Any] = {
        "start_s": ours.sandbox_start_s,
        "starts_per_s": 30.0 if len(nodes) > 1 else 6.0,
        **more,
    }
    return replace(
        ours,
        actions="fcfs-minimum",
        pods=PodSettings(nodes, limit_cpus=limit_cpus, **settings),
        sandbox_start_s=0.0,
    )


def _slow_pods(ours: CpuJob, start_timeout_s: float) -> CpuJob:
    """Pods behind a control plane that takes as long as Kubernetes' objectives allow in 99 % of the cases."""
    return pods_of(ours, start_s=5.0, exec_s=1.0, start_timeout_s=start_timeout_s)


def _kinds(cores: int, tests_share: float, units: int) -> str:
    """Worker pools for tests with this share of the cores, and for commands with the rest."""
    tests = max(1, round(cores * tests_share / units))
    return f"tests:{tests}x{units}/command:{max(1, cores - tests * units)}x1"


def with_workload(job: CpuJob, **changes: object) -> CpuJob:
    tasks = tuple(replace(task, workload=replace(task.workload, **changes)) for task in job.tasks)  # type: ignore[arg-type]
    return replace(job, tasks=tasks)


def _swept(base: CpuJob) -> dict[str, list[tuple[str, CpuJob, CpuJob]]]:
    """By constant: each value as a text, the job with pods and ours. Rates are those of the whole cluster."""
    pods = pods_of(base)
    both: dict[str, list[tuple[str, dict[str, object]]]] = {
        "mean of a command": [(f"{s:g} s", {"command_mean_s": s}) for s in (0.25, 1.0, 4.0)],
        "CPU seconds of tests": [(f"{s:g} s", {"tests_mean_s": s}) for s in (15.0, 60.0, 240.0)],
        "serial share of tests": [(f"{share:g}", {"serial_share": share}) for share in (0.0, 0.02, 0.1)],
        "median of the steps": [(f"{steps:g}", {"steps_median": steps}) for steps in (10.0, 25.0, 40.0)],
    }
    swept = {
        name: [(text, with_workload(pods, **change), with_workload(base, **change)) for text, change in values]
        for name, values in both.items()
    }
    swept["start of a sandbox or pod"] = [
        (f"{s:g} s", pods_of(replace(base, sandbox_start_s=s)), replace(base, sandbox_start_s=s))
        for s in (0.0, 1.0, 5.0)
    ]
    swept["pods started per second"] = [
        (f"{rate:g}" if rate else "without limit", pods_of(base, starts_per_s=rate / 5), base)
        for rate in (10.0, 30.0, 0.0)
    ]
    swept["sending a command into a pod"] = [(f"{s:g} s", pods_of(base, exec_s=s), base) for s in (0.0, 0.1, 1.0)]
    swept["commands that the control plane sends per second"] = [
        (f"{rate:g}" if rate else "without limit", pods_of(base, execs_per_s=rate / 5), base)
        for rate in (0.0, 200.0, 100.0)
    ]
    swept["GPUs that generate"] = [
        (f"{gpus * 5}", replace(pods, gpus=gpus), replace(base, gpus=gpus)) for gpus in (24, 48, 76)
    ]
    return swept


def _experiment(measure: Callable[[CpuBench], list[ActionRow]]) -> Experiment:
    about = (measure.__doc__ or "").splitlines()[0]
    return Experiment(about, lambda study: measure(CpuBench(study)))


CPU_EXPERIMENTS: Mapping[str, Experiment] = {
    "cpu-batch": _experiment(CpuBench.batch_sizes),
    "cpu-cores": _experiment(CpuBench.core_counts),
    "cpu-stages": _experiment(CpuBench.stages),
    "cpu-units": _experiment(CpuBench.unit_numbers),
    "cpu-static": _experiment(CpuBench.static_pools),
    "cpu-shared-pool": _experiment(CpuBench.shared_pool),
    "cpu-order": _experiment(CpuBench.orders),
    "cpu-constants": _experiment(CpuBench.constants),
}
