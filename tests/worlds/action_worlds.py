"""Small simulated rollouts whose calls run on several hosts, checked at every event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worlds.integrity import check_integrity

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import Amounts, ResourceDemand
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, equal_engines, equal_hosts
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedAction, PlannedStep, PlannedTrajectory


def command(seconds: float, **more: Any) -> PlannedAction:
    """A command that uses one CPU."""
    return PlannedAction("command", DurationProfile(seconds, 1.0), in_sandbox=True, **more)


def suite(seconds: float, most: int = 8, serial_share: float = 0.0, **more: Any) -> PlannedAction:
    """A reward that can use up to `most` CPUs."""
    demand = ResourceDemand.of(cpus=Amounts(1, most))
    profile = DurationProfile(seconds, serial_share)
    return PlannedAction("tests", profile, demand, kind="reward", in_sandbox=True, **more)


def shortest_s(action: PlannedAction) -> float:
    """Seconds with as many units as it can be granted."""
    elastic = action.demand.elastic
    return action.profile.seconds(action.demand[elastic].most if elastic else 1)


def planned(name: str, *actions: PlannedAction, rewards: Sequence[PlannedAction] = ()) -> PlannedTrajectory:
    """A trajectory with a step before each action, and a last one."""
    steps = [PlannedStep(10, 5, one.label, shortest_s(one), one) for one in actions]
    return PlannedTrajectory(name, name, 0, "test", 20, (*steps, PlannedStep(10, 0, None, 0.0)), rewards=tuple(rewards))


class ActionRun:
    """A rollout to its end; `lines` is its journal."""

    def __init__(
        self,
        plans: Sequence[PlannedTrajectory],
        *,
        hosts: int = 2,
        cpus: int = 4,
        actions: str = "fcfs-minimum",
        faults: SimulatedFaults | None = None,
        delay_s: float = 0.0,
        retries: RetryPolicy | None = None,
        check: bool = True,
        **more: Any,
    ) -> None:
        self.check = check
        self.lines: list[tuple[ev.Event, list[cmd.Command]]] = []
        cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=50_000)
        self.fleet = SimulatedFleet(
            equal_engines(2, cost, slots=64, max_context_tokens=4096),
            delays=ControlDelays(action_s=delay_s),
            faults=faults or SimulatedFaults(),
            hosts=more.pop("host_list", equal_hosts(hosts, cpus)),
            **more,
        )
        self.overrides = (f"actions={actions}",)
        self.retries = retries
        strategies = build_strategies("sticky-least-loaded", overrides=self.overrides)
        tell_costs(strategies, self.fleet.beliefs)
        self.world = SimulatedWorld(strategies, self.fleet, plans, retries=retries, watch=self._watch)
        self.world.run()
        self.calls = list(self.world.calls.all.values())

    def _watch(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        self.lines.append((event, list(commands)))
        if self.check:
            check_integrity(self.world.controller.state)

    def events(self, kind: type) -> list[Any]:
        """The events of a kind."""
        return [event for event, _ in self.lines if isinstance(event, kind)]

    def commands(self, kind: type) -> list[Any]:
        """The commands of a kind."""
        return [one for _, commands in self.lines for one in commands if isinstance(one, kind)]

    @property
    def statuses(self) -> list[str]:
        """How each trajectory ended."""
        return [program.status for program in self.world.programs.values()]
