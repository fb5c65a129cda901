"""A simulated rollout that plans its engines: the events and commands are those of a live one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import encode, replay
from heddle_dask.cost.published import model_of
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.deployment import SimulatedDeployment
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 40_960


def deployed(world: SimulatedWorld) -> list[int]:
    """TP degrees of all engines that joined."""
    return [engine.spec.tp_degree for engine in world.controller.state.engines.values()]


def played(asked: tuple[int, ...] = ()) -> tuple[SimulatedWorld, list[list[list[object]]]]:
    """A rollout on four GPUs, and its journal. The engines of the fleet, of TP degree 1, give way to the plan."""
    cluster, model = Cluster(gpus=4, gpus_per_node=4), model_of("qwen3-8b")
    deployment = SimulatedDeployment(
        cluster,
        model,
        CONTEXT,
        asked=asked,
        earlier=tuple(synthesize("math", prompts=4, samples=4, seed=7)),
    )
    lines: list[list[list[object]]] = []

    def watch(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        lines.append([encode(event), [encode(command) for command in commands]])

    plans = synthesize("math", prompts=4, samples=4, seed=1)
    fleet = cluster.fleet(model, max_context_tokens=CONTEXT)
    world = SimulatedWorld(build_strategies("sticky-least-loaded"), fleet, plans, deployment=deployment, watch=watch)
    world.run()
    return world, json.loads(json.dumps(lines))


def test_a_simulated_rollout_plans_its_engines_and_its_journal_replays() -> None:
    world, lines = played()
    plan = world.controller.state.tp_degree_plan
    assert plan is not None and plan.source == "earlier trajectories"
    assert sum(plan.tp_degrees) == 4
    assert deployed(world) == list(plan.tp_degrees)
    assert {program.status for program in world.programs.values()} == {"completed"}
    kinds = [line[0][0] for line in lines]
    assert kinds[0] == "DegreesRequested" and "DegreesPlanned" in kinds
    assert list(replay(Controller(build_strategies("sticky-least-loaded")), lines)) == []


def test_tp_degrees_that_are_asked_for_are_deployed_without_a_search() -> None:
    world, lines = played((2, 1, 1))
    assert lines[0][1] == [["DeployEngines", 1, [2, 1, 1]]]
    assert "DegreesPlanned" not in [line[0][0] for line in lines]
    assert deployed(world) == [2, 1, 1]
