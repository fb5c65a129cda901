"""The experiments of ``python -m benchmarks actions`` by name."""

from __future__ import annotations

import asyncio

from benchmarks.actions.api import simulated_rows
from benchmarks.actions.cpu import CPU_EXPERIMENTS
from benchmarks.actions.cpu_hosts import host_rows, weight_rows
from benchmarks.actions.gpu import GPU_EXPERIMENTS
from benchmarks.actions.rows import ActionRow
from benchmarks.experiments import Experiment, Experiments, Study, experiment


def _live(study: Study) -> list[ActionRow]:
    # Imported here: Dask and the live package take seconds.
    from benchmarks.actions.live import live_rows

    return live_rows(study)


def _order_live(study: Study) -> list[ActionRow]:
    from benchmarks.actions.order_live import order_rows

    return order_rows(study)


def _api_live(study: Study) -> list[ActionRow]:
    from benchmarks.actions.api_live import live_api_rows

    return live_api_rows(study.model)


def _overhead(study: Study) -> list[ActionRow]:
    from benchmarks.actions.overhead import measure_action_overhead

    measured = asyncio.run(measure_action_overhead(study.model, seed=study.seeds[0], on_progress=study.runner.say))
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


_SIMULATED = {
    **CPU_EXPERIMENTS,
    **GPU_EXPERIMENTS,
    "cpu-hosts": experiment(host_rows),
    "cpu-weights": experiment(weight_rows),
    "api": experiment(simulated_rows),
}
_LIVE = {
    "live": Experiment("Elastic actions against static sandboxes, with real test suites.", _live, simulated=False),
    "order-live": Experiment("Actions of a full pool by remaining work.", _order_live, simulated=False),
    "api-live": Experiment("The pool at the quota of a real HTTP server.", _api_live, simulated=False),
    "overhead": Experiment(
        "What an action of the CPU pool costs; more CPUs than the machine has: control path only.",
        _overhead,
        simulated=False,
    ),
}
EXPERIMENTS = Experiments(
    {**_SIMULATED, **_LIVE},
    {"simulated": list(_SIMULATED), "live": list(_LIVE)},
)
