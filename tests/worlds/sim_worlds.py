"""Simulated runs whose commands are printed as one digest; run as a script by `test_sim_determinism`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.actions.software_workload import SoftwareWorkload, action_trajectories
from benchmarks.opponents.pod_settings import PodSettings
from benchmarks.opponents.pods import SimulatedPods
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.journal_codec import encode
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, equal_engines, equal_hosts
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import fit_into_context
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 4096


def digest_of(preset: str, *overrides: str) -> tuple[str, int, int]:
    """Digest of all events, commands and results; how many events there were, and commands."""
    plans = [
        fit_into_context(plan, token_scale=0.1, tool_scale=1.0, max_context_tokens=CONTEXT)
        for plan in synthesize("coding", prompts=10, samples=8, seed=3)
    ]
    cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=20_000)
    fleet = SimulatedFleet(
        equal_engines(4, cost, slots=8, max_context_tokens=CONTEXT),
        delays=ControlDelays.measured(6e-3, 4e-3),
        faults=SimulatedFaults(engines_lost={2: 8.0}, tool_failure_share=0.1),
        tool_cpus=12,
    )
    strategies = build_strategies(preset, overrides=overrides)
    tell_costs(strategies, fleet.beliefs)
    known = {plan.trajectory_id: float(plan.generated_tokens) for plan in plans}
    predictor = None if strategies.predictor is None else build_predictor(strategies.predictor, KnownWork(known))
    digest = hashlib.sha256()
    counts = [0, 0]

    def watch(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        digest.update(json.dumps([encode(event), [encode(command) for command in commands]]).encode())
        counts[0] += 1
        counts[1] += len(commands)

    world = SimulatedWorld(strategies, fleet, plans, predictor=predictor, seed=5, watch=watch)
    world.run()
    for program in world.programs.values():
        result = (program.status, program.started_s, program.finished_s, program.queue_s, program.engine_id)
        digest.update(repr((*result, program.prefilled_tokens, program.preemptions)).encode())
    for engine in world.engines.values():
        digest.update(repr((engine.busy_s, engine.prefilled_tokens, engine.kv_preemptions)).encode())
    return digest.hexdigest(), *counts


def actions_digest(*, pods: bool) -> tuple[str, int, int]:
    """Digest of a run whose calls run on hosts that are lost and drained, or in pods; as `digest_of`."""
    plans = action_trajectories(SoftwareWorkload(), trajectories=48, samples=16, seed=4, max_context_tokens=40_960)
    fleet = replace(
        Cluster(gpus=16, tp=4).fleet("qwen3-32b", max_context_tokens=40_960),
        hosts=equal_hosts(3, 32, memory_bytes=10**12),
        faults=SimulatedFaults(
            tool_failure_share=0.05, hosts_lost={0: 20.0}, hosts_drain={1: 40.0}, hosts_join={2: 5.0}
        ),
        sandbox_start_s=1.0,
        unmanaged=partial(SimulatedPods, PodSettings((32, 32), starts_per_s=10.0, execs_per_s=50.0)) if pods else None,
    )
    actions = "fcfs-minimum" if pods else "elastic"
    strategies = build_strategies("heddle", overrides=("predictor=oracle", f"actions={actions}"))
    tell_costs(strategies, fleet.beliefs)
    assert strategies.predictor is not None
    known = KnownWork({plan.trajectory_id: float(plan.generated_tokens) for plan in plans})
    predictor = build_predictor(strategies.predictor, known)
    digest = hashlib.sha256()
    counts = [0, 0]

    def watch(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        digest.update(json.dumps([encode(event), [encode(command) for command in commands]]).encode())
        counts[0] += 1
        counts[1] += len(commands)

    world = SimulatedWorld(strategies, fleet, plans, predictor=predictor, seed=5, watch=watch)
    world.run()
    for call in world.calls.all.values():
        digest.update(repr((call.action_id, call.begun_s, call.back_s, call.units, call.cause)).encode())
    return digest.hexdigest(), *counts


if __name__ == "__main__":
    for name in ("heddle", "heddle-paper", "slime"):
        print(name, *digest_of(name))
    print("oracle", *digest_of("heddle", "predictor=oracle"))
    print("actions", *actions_digest(pods=False))
    print("pods", *actions_digest(pods=True))
