"""``--hardware`` of ``heddle rollout``, and the affinity that a cluster file says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from heddle_dask.cli.cluster_choice import LocalShape, affinity_of_file, parsed_hardware
from heddle_dask.cli.rollout.order import RolloutOrder
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import joined_domain
from heddle_dask.environments.base import Environment, Task
from heddle_dask.strategies.presets import Strategy


def local_shape(order: RolloutOrder) -> LocalShape:
    """The cluster on this machine that the options ask for; with classes, one engine for each of their numbers.

    Raises
    ------
    BadInput
        The classes are of another form, of another number of engines than given, or the engines are not started here.
    """
    fleet, where = order.fleet, order.where
    hardware = parsed_hardware(fleet.hardware)
    engines = fleet.engines
    if hardware is not None:
        if where.scheduler is not None:
            raise BadInput(
                "--hardware is of engines on this machine: with --scheduler workers say it themselves"
            )
        total = sum(hardware.values())
        if "engines" not in order.by_default and total != engines:
            raise BadInput(
                f"--hardware {fleet.hardware} is of {total} engines, --engines says {engines}: drop one"
            )
        engines = total
    return LocalShape(engines, fleet.slots, where.tool_workers, where.tool_cpus, hardware=hardware)


def with_affinity(strategy: Strategy, cluster: Path | None) -> Strategy:
    """The strategy with the affinity of a cluster file, unless the command line gives another one.

    Raises
    ------
    BadInput
        The file says none of the right form.
    """
    said = affinity_of_file(cluster)
    if not said or any(text.startswith("affinity=") for text in strategy.overrides):
        return strategy
    return Strategy(strategy.preset, (*strategy.overrides, *said), strategy.weight)


def domains_of(environment: Environment, tasks: Iterable[Task]) -> set[str]:
    """The domains of these tasks, as their trajectories carry them."""
    return {joined_domain(environment.name, task.domain) for task in tasks}
