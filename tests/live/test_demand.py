"""The work that the scheduler sees, and what each worker holds, for the cluster object that starts and ends workers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from worlds.core_builders import Stage, action_of, engine_of, host_of

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.resources import ResourceDemand
from heddle_dask.live.scheduler.demand import AnnouncedQueue, demand_of, token_work
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.wire.cluster_messages import QueuedCapacity, WorkerLoad
from heddle_dask.live.wire.driver_messages import ReadyEngine


def worker(name: str, tag: str, processing: int = 0) -> Any:
    running = {number: None for number in range(processing)}
    return SimpleNamespace(name=name, address=f"tcp://{name}", resources={tag: 1}, processing=running, has_what={})


def scheduler_of(*workers: Any) -> Any:
    return SimpleNamespace(workers={each.address: each for each in workers})


def registry_of(*engines: str) -> EngineRegistry:
    registry = EngineRegistry()
    for name in engines:
        registry.add_engine(f"tcp://{name}", ReadyEngine(engine_of(name), "emulated", "m"))
    return registry


def test_nothing_is_wanted_without_a_session_and_idle_workers_are_idle() -> None:
    demand = demand_of(scheduler_of(worker("gpu-0", "ENGINE")), registry_of("gpu-0"), None)
    assert (demand.session_open, demand.trajectories) == (False, 0)
    assert demand.workers == (WorkerLoad("gpu-0", True),)
    assert demand.workers[0].idle


def test_work_waits_in_tokens_and_cpu_seconds_and_loads_are_those_of_the_workers() -> None:
    stage = Stage()
    stage.join("gpu-0", "gpu-1", slots=4)
    stage.add_host("cpu-0", cpus=1)
    stage.submit("a", "b", "c", "d")
    for name, tokens in (("a", 300.0), ("b", 100.0)):
        stage.finish(stage.generating(name))
        stage.act(f"tool of {name}", name)
        stage.predict(name, tokens)
    scored = replace(action_of("score", "a", pool="gpu"), demand=ResourceDemand.of(gpus=1))
    stage.feed(ev.ActionRequested, scored)  # tool workers cannot run it
    registry = registry_of("gpu-0", "gpu-1")
    registry.add_host("tcp://cpu-0", host_of("cpu-0", cpus=1))
    workers = [worker("gpu-0", "ENGINE"), worker("gpu-1", "ENGINE"), worker("cpu-0", "TOOL", processing=1)]
    demand = demand_of(scheduler_of(*workers, worker("gpu-2", "ENGINE")), registry, stage.state)
    assert (demand.session_open, demand.trajectories, demand.engines, demand.slots) == (True, 4, 2, 8)
    # Of the others nothing is known: they count as the mean.
    assert demand.open_tokens == 300 + 100 + 2 * 200
    assert (demand.busy_tool_cpus, demand.tool_cpus, demand.waiting_tool_cpus) == (1, 1, 1)
    loads = {load.name: load for load in demand.workers}
    homes = [stage.trajectory(name).home for name in ("a", "b")]
    for engine in ("gpu-0", "gpu-1"):
        assert loads[engine].residents == homes.count(EngineId(engine))
    assert sum(load.residents for load in loads.values()) == 2
    assert loads["gpu-2"].idle and not loads["gpu-2"].serves
    assert (loads["cpu-0"].busy, loads["cpu-0"].serves) == (1, True)
    assert HostId("cpu-0") in registry.hosts


def test_trajectories_that_wait_for_an_engine_are_the_waiting_part() -> None:
    stage = Stage()
    stage.submit("a", "b")
    stage.request("a")
    open_tokens, waiting_tokens = token_work(stage.state)
    assert open_tokens == 2000 and waiting_tokens == 1000
    stage.join("gpu-0")
    assert token_work(stage.state) == (2000, 1000)  # placed, and it has not begun


def test_an_announcement_of_a_cluster_object_that_is_gone_ends() -> None:
    now = [0.0]
    queue = AnnouncedQueue(lambda: now[0])
    assert queue.now == QueuedCapacity()
    queue.announce(QueuedCapacity(engines=2), 60.0)
    now[0] = 59.0
    assert queue.now.engines == 2
    now[0] = 60.0
    assert queue.now == QueuedCapacity()
