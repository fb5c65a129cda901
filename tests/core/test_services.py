"""Lists of events in, lists of commands out: model services on chunks of GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds.core_builders import Stage

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, ActionWaits, HostDescription
from heddle_dask.core.resources import (
    COPY_BYTES,
    GPUS,
    MODELS_PER_GPU,
    Amounts,
    ModelService,
    ResourceDemand,
    Resources,
)
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.service_copies import HostGpus, ServiceCopy, choose_chunk
from heddle_dask.core.snapshot import ServiceCounts
from heddle_dask.core.transitions import CopyState

G1 = HostId("G1")


def service(
    name: str, gpus: tuple[int, ...] = (1,), batch: int = 1, load_s: float = 1.0, host_bytes: int = 0
) -> ModelService:
    return ModelService(
        name, gpus, load_s=(load_s,) * len(gpus), host_bytes=host_bytes, batch=batch, cold_load_s=(9.0,)
    )


class GpuStage(Stage):
    """A stage with one GPU host, services, and trajectories a to d."""

    def __init__(
        self, gpus: int, *services: ModelService, models: int = 1, copy_bytes: int = 0, losses: int = 1
    ) -> None:
        super().__init__(retries=RetryPolicy(losses))
        self.feed(ev.PoolsDeclared, (), services)
        if gpus:
            self.add_gpus("G1", gpus, models, copy_bytes)
        self.submit("a", "b", "c", "d")

    def feed(self, kind: type, *fields: Any, **more: Any) -> list[cmd.Command]:
        """Let one event happen; how long actions have waited is left out of the commands, and kept."""
        commands = super().feed(kind, *fields, **more)
        self.waits = {c.action_id: c.waits for c in commands if isinstance(c, cmd.RunAction)}
        return [replace(c, waits=cmd.NO_WAITS) if isinstance(c, cmd.RunAction) else c for c in commands]

    def add_gpus(self, name: str, gpus: int, models: int = 1, copy_bytes: int = 0) -> list[cmd.Command]:
        limits = {MODELS_PER_GPU: models, COPY_BYTES: copy_bytes}
        host = HostDescription(HostId(name), Resources.of({GPUS: gpus, **limits}), "gpu")
        return self.feed(ev.HostJoined, host)

    def ask(
        self, name: str, service: str = "", gpus: int | tuple[int, ...] = 0, trajectory: str = ""
    ) -> list[cmd.Command]:
        """A trajectory (the first letter of the name) asks for a score."""
        sizes = gpus if isinstance(gpus, int) else Amounts(gpus[0], gpus[-1], gpus)
        demand, whose = ResourceDemand.of(gpus=sizes), TrajectoryId(trajectory or name[0])
        request = ActionRequest(ActionId(name), whose, "reward", "score", demand, "gpu", service)
        return self.feed(ev.ActionRequested, request)

    def loaded(self, load: cmd.LoadService, cause: str = "") -> list[cmd.Command]:
        facts = (load.host_id, load.service, load.first_gpu, load.gpus)
        return self.feed(ev.ServiceLoaded, *facts, not cause, 0.5, cause)

    def evicted(self, evict: cmd.EvictService) -> list[cmd.Command]:
        return self.feed(ev.ServiceEvicted, evict.host_id, evict.service, evict.first_gpu, evict.gpus)

    def done(self, name: str, host: str = "G1") -> list[cmd.Command]:
        return self.feed(ev.ActionFinished, ActionId(name), HostId(host), 0.5)


def load(name: str, first: int = 0, gpus: int = 1, *, cold: bool = True, host: str = "G1") -> cmd.LoadService:
    return cmd.LoadService(HostId(host), name, first, gpus, cold)


def evict(name: str, first: int = 0, gpus: int = 1) -> cmd.EvictService:
    return cmd.EvictService(G1, name, first, gpus)


def run(name: str, first: int = 0, gpus: int = 1, host: str = "G1") -> cmd.RunAction:
    return cmd.RunAction(ActionId(name), HostId(host), Resources.of(gpus=gpus), first_gpu=first, gpus=gpus)


def test_a_request_starts_once_its_service_is_resident_and_the_next_one_at_once() -> None:
    stage = GpuStage(1, service("judge"))
    assert stage.ask("a1", "judge") == [load("judge")]
    assert stage.loaded(load("judge")) == [run("a1")]
    assert stage.waits == {"a1": ActionWaits(load_s=1.0)}
    assert stage.state.hosts[G1].free[GPUS] == 0
    assert stage.done("a1") == []
    assert stage.state.hosts[G1].free[GPUS] == 1, "a cached copy takes no GPU"
    assert stage.ask("b1", "judge") == [run("b1")]


def test_another_service_evicts_the_cached_one_and_restores_it_from_host_memory() -> None:
    stage = GpuStage(1, service("judge"), service("teacher"))
    stage.ask("a1", "judge")
    stage.loaded(load("judge"))
    stage.done("a1")
    assert stage.ask("b1", "teacher") == [evict("judge")]
    assert stage.evicted(evict("judge")) == [load("teacher")]
    assert stage.ask("a2", "judge") == [], "it waits for the chunk"
    assert stage.loaded(load("teacher")) == [run("b1")]
    assert stage.done("b1") == [evict("teacher")]
    assert stage.evicted(evict("teacher")) == [load("judge", cold=False)], "host memory has a copy"


def test_requests_join_a_busy_copy_up_to_its_batch_and_take_no_chunk() -> None:
    stage = GpuStage(2, service("judge", batch=2))
    assert stage.ask("a1", "judge") == [load("judge")]
    assert stage.ask("b1", "judge") == [], "it joins the copy that is loaded"
    assert stage.loaded(load("judge")) == [run("a1"), run("b1")]
    assert stage.state.hosts[G1].free[GPUS] == 1
    assert stage.ask("c1", "judge") == [load("judge", 1, cold=False)], "the first copy is full"
    assert stage.done("a1") == []
    assert stage.ask("d1", "judge") == [run("d1")]
    assert stage.loaded(load("judge", 1)) == [run("c1", 1)]


def test_a_service_that_is_wanted_by_older_requests_is_next_after_a_turn() -> None:
    # A second passes with every event; a turn lasts four loads of the next service.
    stage = GpuStage(1, service("judge", batch=2), service("teacher", load_s=1.0))
    stage.ask("a1", "judge")
    stage.loaded(load("judge"))
    assert stage.ask("b1", "teacher") == []
    assert stage.ask("c1", "judge") == [run("c1")], "its turn goes on: the load of the other is long"
    assert stage.done("c1") == []
    for number in range(40):
        if stage.ask(f"d{number}", "judge") == []:
            break
        stage.done(f"d{number}")
    else:
        raise AssertionError("the turn never ends")
    assert stage.state.at >= 4 * 9.0, "loads of a service without a copy take the declared nine seconds"
    assert stage.done("a1") == [evict("judge")]
    assert stage.evicted(evict("judge")) == [load("teacher")]


def test_the_next_service_is_loaded_while_another_runs_where_memory_has_room() -> None:
    stage = GpuStage(1, service("judge", batch=2), service("teacher"), service("third"), models=2)
    stage.ask("a1", "judge")
    stage.loaded(load("judge"))
    assert stage.ask("b1", "teacher") == [load("teacher")], "beside the one that runs"
    assert stage.loaded(load("teacher")) == []
    assert stage.ask("c1", "judge") == [], "the turn is over: the other is resident"
    assert stage.done("a1") == [run("b1")]
    assert stage.ask("d1", "third") == [], "memory has no room for a third"
    assert stage.done("b1") == [run("c1"), evict("teacher")]
    assert stage.evicted(evict("teacher")) == [load("third")], "beside the one that runs"


def test_the_chunk_that_caches_the_service_comes_before_the_smallest_one() -> None:
    stage = GpuStage(8, service("judge", (2,)))
    assert stage.ask("a1", "", 2) == [run("a1", 0, 2)]
    assert stage.ask("b1", "", 2) == [run("b1", 2, 2)]
    assert stage.ask("c1", "judge") == [load("judge", 4, 2)]
    stage.loaded(load("judge", 4, 2))
    stage.done("b1")
    stage.done("c1")
    assert stage.ask("d1", "judge") == [run("d1", 4, 2)], "not GPUs 2 and 3, which are free too"


def test_a_cached_chunk_is_left_where_the_demands_that_follow_would_not_fit() -> None:
    gpus = HostGpus(G1, Resources.of({GPUS: 8}))
    gpus.buddies.take(GpuChunk(0, 2))
    copy = ServiceCopy("judge", G1, GpuChunk(4, 2), state=CopyState.RESIDENT)
    gpus.copies[copy.key] = copy
    assert choose_chunk(gpus, "judge", 2, []) == GpuChunk(4, 2)
    assert choose_chunk(gpus, "judge", 2, [2]) == GpuChunk(4, 2)
    assert choose_chunk(gpus, "judge", 2, [4]) == GpuChunk(2, 2), "four GPUs stay together"
    assert choose_chunk(gpus, "judge", 8, []) is None


def test_a_service_of_four_gpus_needs_an_aligned_chunk() -> None:
    stage = GpuStage(8, service("big", (4,)), service("small", (1,)))
    for number, name in enumerate(("a1", "b1", "c1", "d1")):
        stage.ask(name, "small")
        stage.loaded(load("small", number, cold=number == 0))
    assert stage.ask("a2", "big") == [load("big", 4, 4)]
    stage.loaded(load("big", 4, 4))
    assert stage.ask("b2", "big") == []
    for name in ("a1", "b1", "c1"):
        assert stage.done(name) == [], "three free GPUs are no chunk of four"
    freed = stage.done("d1")
    assert freed == [evict("small", number) for number in range(4)]
    for order in freed[:-1]:
        assert stage.evicted(order) == []
    assert stage.evicted(freed[-1]) == [load("big", 0, 4, cold=False)]


def test_an_action_without_a_service_has_its_gpus_and_their_memory_for_itself() -> None:
    stage = GpuStage(2, service("judge", (2,)))
    stage.ask("a1", "judge")
    stage.loaded(load("judge", 0, 2))
    stage.done("a1")
    assert stage.ask("b1", "", 1) == [evict("judge", 0, 2)]
    assert stage.evicted(evict("judge", 0, 2)) == [run("b1", 0)]
    assert stage.ask("c1", "", 1) == [run("c1", 1)]
    assert stage.done("b1") == []
    assert stage.done("c1") == []
    assert stage.ask("a2", "judge") == [load("judge", 0, 2, cold=False)]


def test_the_budget_of_host_memory_keeps_the_copies_used_last() -> None:
    names = ("one", "two", "three")
    stage = GpuStage(1, *(service(name, host_bytes=4) for name in names), copy_bytes=9)
    orders: list[cmd.Command] = []
    for number, name in enumerate((*names, "two", "one")):
        orders += stage.ask(f"a{number}", name)
        if isinstance(orders[-1], cmd.EvictService):
            orders += stage.evicted(orders[-1])
        assert isinstance(orders[-1], cmd.LoadService)
        stage.loaded(orders[-1])
        stage.done(f"a{number}")
    loads = [(o.service, o.cold, o.keep) for o in orders if isinstance(o, cmd.LoadService)]
    assert loads == [
        ("one", True, True),
        ("two", True, True),
        ("three", True, True),
        ("two", False, True),
        ("one", True, True),
    ]
    drops = [o.service for o in orders if isinstance(o, cmd.DropServiceCopy)]
    assert drops == ["one", "three"]


def test_a_copy_larger_than_the_budget_is_not_kept() -> None:
    stage = GpuStage(1, service("judge", host_bytes=10), copy_bytes=9)
    (order,) = stage.ask("a1", "judge")
    assert order == cmd.LoadService(G1, "judge", 0, 1, cold=True, keep=False)


def test_failed_loads_are_repeated_and_then_the_service_is_given_up_with_the_cause() -> None:
    stage = GpuStage(1, service("judge", batch=1), service("teacher"), losses=1)
    stage.ask("a1", "judge")
    stage.ask("b1", "judge")
    stage.ask("c1", "teacher")
    again = stage.loaded(load("judge"), "no file weights.bin")
    assert again == [cmd.DropServiceCopy(G1, "judge", 1), load("judge")]
    after = stage.loaded(load("judge"), "no file weights.bin")
    cause = "model service 'judge' could not be loaded 2 times: no file weights.bin"
    assert after == [
        cmd.DropServiceCopy(G1, "judge", 1),
        cmd.GiveUpAction(ActionId("a1"), cause),
        cmd.GiveUpAction(ActionId("b1"), cause),
        load("teacher"),
    ]
    assert stage.loaded(load("teacher")) == [run("c1")]


def test_a_copy_that_dies_takes_no_request_and_is_loaded_again() -> None:
    stage = GpuStage(1, service("judge", batch=2))
    stage.ask("a1", "judge")
    stage.loaded(load("judge"))
    lost = stage.feed(ev.ServiceLost, G1, "judge", 0, 1, "killed")
    assert lost == [cmd.DropServiceCopy(G1, "judge", 1)]
    assert stage.ask("b1", "judge") == [], "its chunk is in use until the request on it reports"
    ended = stage.feed(ev.ActionFinished, ActionId("a1"), G1, 0.1, False, True, ev.SERVICE_LOST)
    assert ended == [load("judge")]
    stage.late(ev.ServiceLost, G1, "judge", 0, 1, "killed")


def test_an_idle_copy_that_dies_is_forgotten() -> None:
    stage = GpuStage(1, service("judge"))
    stage.ask("a1", "judge")
    stage.loaded(load("judge"))
    stage.done("a1")
    stage.feed(ev.ServiceLost, G1, "judge", 0, 1, "killed")
    stage.late(ev.ServiceEvicted, G1, "judge", 0, 1)
    assert stage.ask("b1", "judge") == [load("judge")]


def test_a_lost_host_during_a_load_counts_as_no_loss_of_the_action() -> None:
    stage = GpuStage(1, service("judge"), losses=0)
    stage.ask("a1", "judge")
    assert not any(isinstance(command, cmd.GiveUpAction) for command in stage.feed(ev.HostLost, G1))
    stage.late(ev.ServiceLoaded, G1, "judge", 0, 1)
    assert stage.add_gpus("G2", 1) == [load("judge", host="G2")]


def test_a_trajectory_that_ends_during_a_load_leaves_a_cached_copy() -> None:
    stage = GpuStage(1, service("judge"))
    stage.ask("a1", "judge")
    assert stage.end("a") == [], "its host does not know the action"
    assert stage.loaded(load("judge")) == []
    assert stage.ask("b1", "judge") == [run("b1")]


def test_a_host_that_drains_loads_for_what_it_was_given_and_is_then_released() -> None:
    stage = GpuStage(1, service("judge", batch=4))
    stage.ask("a1", "judge")
    assert stage.feed(ev.HostDraining, G1) == []
    orders = stage.ask("b1", "judge")
    assert all(isinstance(order, cmd.WakeUp) for order in orders), "nobody joins"
    assert stage.loaded(load("judge")) == [run("a1")]
    assert stage.done("a1") == [cmd.ReleaseHost(G1)]


def test_a_service_without_a_host_waits_visibly() -> None:
    stage = GpuStage(0, service("judge"))
    commands = stage.ask("a1", "judge")
    assert not any(isinstance(command, cmd.GiveUpAction | cmd.LoadService) for command in commands)
    assert stage.controller.snapshot().services == (
        ServiceCounts("judge", waiting=1, running=0, resident=0, loading=0, hosts=0),
    )
    assert stage.add_gpus("G1", 1) == [load("judge")]
    assert stage.controller.snapshot().services == (
        ServiceCounts("judge", waiting=1, running=0, resident=0, loading=1, hosts=1),
    )


@pytest.mark.parametrize(
    ("name", "gpus", "cause"),
    [
        ("nobody", 1, "model service 'nobody' is not declared (declared: judge)"),
        ("judge", 8, "model service 'judge' runs on 2, 4 GPUs, not on 8"),
        ("", 9, "it needs 16 GPUs; the largest worker of pool gpu has 4 GPUs"),
    ],
)
def test_a_request_that_can_never_run_is_given_up_with_one_line(name: str, gpus: int, cause: str) -> None:
    stage = GpuStage(4, service("judge", (2, 4)))
    assert stage.ask("a1", name, gpus) == [cmd.GiveUpAction(ActionId("a1"), cause)]


def test_a_request_without_a_number_of_gpus_may_use_every_size_of_its_service() -> None:
    stage = GpuStage(4, service("judge", (2, 4)))
    assert stage.ask("a1", "judge") == [cmd.WakeUp(stage.at)], "its GPUs are chosen with what comes at the same moment"
    assert stage.feed(ev.TimeReached) == [load("judge", 0, 2)]
    assert stage.state.actions[ActionId("a1")].spec.demand[GPUS] == Amounts(2, 4, (2, 4))
