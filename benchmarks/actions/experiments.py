"""The experiments of ``python -m benchmarks actions`` by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.actions.api import simulated_rows
from benchmarks.actions.cpu import CPU_EXPERIMENTS, CpuBench
from benchmarks.actions.cpu_play import CpuPlay
from benchmarks.actions.gpu import GPU_EXPERIMENTS, MeasureGpus
from benchmarks.actions.rows import ActionRow, row_from
from benchmarks.experiment_tables import chosen_experiments

RunExperiment = Callable[[CpuPlay, Sequence[int], str], list[ActionRow]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes
    ----------
    about
        What it measures, in a line.
    rows
        Runs it for these seeds; a live one with the model in this directory, of which only the tokenizer is used.
    simulated
        Whether it runs in virtual time; otherwise it measures this machine.
    """

    about: str
    rows: RunExperiment
    simulated: bool = True


def _cpu(measure: Callable[[CpuBench], list[ActionRow]]) -> Experiment:
    about = (measure.__doc__ or "").splitlines()[0]
    return Experiment(about, lambda play, seeds, _: measure(CpuBench(play, seeds)))


def _gpu(measure: MeasureGpus) -> Experiment:
    about = (measure.__doc__ or "").splitlines()[0]
    return Experiment(about, lambda play, seeds, _: [row_from(row) for row in measure(seeds)])


def _live(play: CpuPlay, seeds: Sequence[int], model: str) -> list[ActionRow]:
    # Imported here: Dask and the live package take seconds.
    from benchmarks.actions.live import live_rows

    return live_rows(model, seeds, play.say)


def _api_live(play: CpuPlay, seeds: Sequence[int], model: str) -> list[ActionRow]:
    from benchmarks.actions.api_live import live_api_rows

    return live_api_rows(model)


def _api(play: CpuPlay, seeds: Sequence[int], model: str) -> list[ActionRow]:
    return simulated_rows(seeds=seeds)


def _overhead(play: CpuPlay, seeds: Sequence[int], model: str) -> list[ActionRow]:
    from benchmarks.actions.overhead import measure_action_overhead

    measured = asyncio.run(measure_action_overhead(model, seed=seeds[0], on_progress=play.say))
    return [
        ActionRow(
            "overhead",
            one.arm,
            one.at_once,
            act_mean_s=one.run_s * (1 + one.overhead_share),
            cores=one.cpus,
            overhead_share=one.overhead_share,
            note=f"worker {one.worker_ms_p50:.2f} ms p50, {one.worker_ms_p99:.2f} ms p99; "
            f"call {one.call_ms_p50:.2f} ms p50, {one.call_ms_p99:.2f} ms p99; {one.actions_per_s:,.0f} actions/s",
        )
        for one in measured
    ]


EXPERIMENTS: Mapping[str, Experiment] = {
    **{name: _cpu(measure) for name, measure in CPU_EXPERIMENTS.items()},
    **{name: _gpu(measure) for name, measure in GPU_EXPERIMENTS.items()},
    "api": Experiment(
        "Direct calls with retries against the pool at the API's quota, in virtual time.", _api
    ),
    "live": Experiment(
        "Elastic actions against static sandboxes, with real test suites.", _live, simulated=False
    ),
    "api-live": Experiment("The pool at the quota of a real HTTP server.", _api_live, simulated=False),
    "overhead": Experiment(
        "What an action of the CPU pool costs; more CPUs than the machine has: control path only.",
        _overhead,
        simulated=False,
    ),
}


def chosen(text: str) -> list[str]:
    """The experiments that a text names, in the order of `EXPERIMENTS`.

    Raises
    ------
    BadInput
        It names none, or an unknown one.
    """
    simulated = [name for name, one in EXPERIMENTS.items() if one.simulated]
    live = [name for name, one in EXPERIMENTS.items() if not one.simulated]
    groups = {"simulated": simulated, "live": live, "all": list(EXPERIMENTS)}
    return chosen_experiments(text, list(EXPERIMENTS), groups)
