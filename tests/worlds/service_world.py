"""A random world of GPU hosts and model services: it carries out every command, and checks what must hold on GPUs.

Who draws hands in `pick`. The controller's own accounts are checked by the stage after every event.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from worlds.core_builders import Stage

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, HostDescription
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

Pick = Callable[[Sequence[Any]], Any]

SERVICES = (
    ModelService("judge", (1, 2), load_s=(2.0, 1.0), host_bytes=5, batch=3, cold_load_s=(9.0, 6.0)),
    ModelService("teacher", (4,), load_s=(3.0,), host_bytes=7, batch=2),
    ModelService("reward", (1,), host_bytes=3),
)


@dataclass
class GpuHost:
    """What is on a host, as its commands and reports say."""

    gpus: int
    models: int
    budget: int
    resident: dict[tuple[str, int, int], bool] = field(default_factory=dict)  # key: whether it is being loaded
    leaving: dict[tuple[str, int, int], None] = field(default_factory=dict)
    kept: dict[tuple[str, int], int] = field(default_factory=dict)
    draining: bool = False

    def held(self, gpu: int) -> list[str]:
        """Services with memory of that GPU."""
        keys = [*self.resident, *self.leaving]
        return [name for name, first, gpus in keys if first <= gpu < first + gpus]


@dataclass
class ServiceWorld:
    """Hosts, requests, and a stage that is told of them."""

    stage: Stage
    pick: Pick
    hosts: dict[str, GpuHost] = field(default_factory=dict)
    open: dict[str, ActionRequest] = field(default_factory=dict)  # asked for, not over
    running: dict[str, cmd.RunAction] = field(default_factory=dict)
    programs: list[str] = field(default_factory=list)
    orphaned: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    numbers: int = 0
    woken: bool = True  # no question for a time is open

    def tell(self, kind: type, *fields: Any) -> None:
        for command in self.stage.feed(kind, *fields):
            self.seen[type(command).__name__] += 1
            self.obey(command)
        self.check()

    def obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.LoadService(host_id, service, first, gpus, cold, keep):
                host, key = self.hosts[host_id], (service, first, gpus)
                assert key not in host.resident and key not in host.leaving
                host.resident[key] = True
                for gpu in range(first, first + gpus):
                    assert gpu < host.gpus and len(host.held(gpu)) <= host.models, "no memory"
                assert cold == ((service, gpus) not in host.kept)
                if cold and keep:
                    host.kept[service, gpus] = next(s.host_bytes for s in SERVICES if s.name == service)
                assert not host.budget or sum(host.kept.values()) <= host.budget
                self.seen["cold" if cold else "restored"] += 1
            case cmd.EvictService(host_id, service, first, gpus):
                host, key = self.hosts[host_id], (service, first, gpus)
                assert host.resident.pop(key) is False, "it is being loaded"
                assert not self.users(host_id, key), "it is in use"
                host.leaving[key] = None
            case cmd.DropServiceCopy(host_id, service, gpus):
                del self.hosts[host_id].kept[service, gpus]
            case cmd.RunAction():
                self._run(command)
            case cmd.GiveUpAction(action_id):
                del self.open[action_id]
                self.seen["given up"] += 1
            case cmd.AbortAction(action_id):
                assert action_id in self.running and action_id in self.orphaned
            case cmd.ReleaseHost(host_id):
                assert not any(run.host_id == host_id for run in self.running.values())
            case cmd.WakeUp():
                self.woken = False

    def _run(self, command: cmd.RunAction) -> None:
        request, host = self.open[command.action_id], self.hosts[command.host_id]
        assert command.action_id not in self.running
        key = (request.service, command.first_gpu, command.gpus)
        chunk = range(command.first_gpu, command.first_gpu + command.gpus)
        if request.service:
            assert host.resident[key] is False, "not resident"
            others = len(self.users(command.host_id, key))
            batch = next(s.batch for s in SERVICES if s.name == request.service)
            assert others < batch
            self.seen["joined a batch"] += others > 0
        else:
            assert not any(host.held(gpu) for gpu in chunk), "memory is in use"
        for name, run in self.running.items():
            mine = set(range(run.first_gpu, run.first_gpu + run.gpus)) & set(chunk)
            same = request.service and self.key(name) == key
            assert run.host_id != command.host_id or not mine or same, "two batches on one GPU"
        self.seen["ran beside a load"] += any(host.resident.values())
        self.running[command.action_id] = command

    def key(self, name: str) -> tuple[str, int, int]:
        run = self.running[name]
        return self.open[name].service, run.first_gpu, run.gpus

    def users(self, host_id: str, key: tuple[str, int, int]) -> list[str]:
        return [n for n, run in self.running.items() if run.host_id == host_id and self.key(n) == key]

    def check(self) -> None:
        state = self.stage.state
        assert set(state.actions) == set(self.open)
        for name, host in self.hosts.items():
            used = {g for r in self.running.values() if r.host_id == name for g in self._gpus(r)}
            free = state.hosts[HostId(name)].free[GPUS]
            assert free <= host.gpus - len(used)
            assert state.hosts[HostId(name)].gpus.kept == host.kept
        on_the_way = not self.woken or any(True in h.resident.values() or h.leaving for h in self.hosts.values())
        head = next(iter(state.waiting_actions), None)
        if head is not None and not on_the_way and not self.running:
            ready = [host.gpus for host in self.hosts.values() if not host.draining]
            need = state.actions[head].spec.demand.least[GPUS]
            assert need > max(ready, default=0), "nothing happens any more, and a request waits"

    def _gpus(self, run: cmd.RunAction) -> range:
        return range(run.first_gpu, run.first_gpu + run.gpus)

    def fresh(self, prefix: str) -> str:
        self.numbers += 1
        return f"{prefix}{self.numbers}"

    # -- moves -------------------------------------------------------------------------------------------

    def possible(self, move: str) -> list[Any]:
        loading = [(h, k) for h, host in self.hosts.items() for k, on in host.resident.items() if on]
        resident = [(h, k) for h, host in self.hosts.items() for k, on in host.resident.items() if not on]
        leaving = [(h, k) for h, host in self.hosts.items() for k in host.leaving]
        subjects: dict[str, list[Any]] = {
            "join": [1, 4, 6, 8] if len(self.hosts) < 3 else [],
            "drain": [name for name, host in self.hosts.items() if not host.draining],
            "lose": list(self.hosts),
            "submit": [None] if len(self.programs) < 6 else [],
            "end": self.programs,
            "ask": self.programs if len(self.open) < 30 else [],
            "loaded": loading,
            "load_fails": loading,
            "evicted": leaving,
            "service_dies": resident,
            "done": list(self.running),
            "stale": list(self.hosts),
            "wake": [] if self.woken else [None],
        }
        return subjects[move]

    def do(self, move: str, subject: Any) -> None:
        getattr(self, f"_do_{move}")(subject)

    def _do_join(self, gpus: int) -> None:
        made = GpuHost(gpus, self.pick((1, 1, 2)), self.pick((0, 9, 12)))
        name = self.fresh("G")
        self.hosts[name] = made
        amounts = {GPUS: gpus, MODELS_PER_GPU: made.models, COPY_BYTES: made.budget}
        self.tell(ev.HostJoined, HostDescription(HostId(name), Resources.of(amounts), "gpu"))

    def _do_drain(self, name: str) -> None:
        self.hosts[name].draining = True
        self.tell(ev.HostDraining, name)

    def _do_lose(self, name: str) -> None:
        del self.hosts[name]
        for action, run in list(self.running.items()):
            if run.host_id == name:
                del self.running[action]
                if action in self.orphaned:
                    del self.open[action]
        self.tell(ev.HostLost, name)

    def _do_submit(self, _: None) -> None:
        name = self.fresh("t")
        self.programs.append(name)
        self.stage.submit(name)

    def _do_end(self, name: str) -> None:
        self.programs.remove(name)
        for action, request in list(self.open.items()):
            if request.trajectory_id == name and action in self.running:
                self.orphaned.add(action)
            elif request.trajectory_id == name:
                del self.open[action]
        self.tell(ev.TrajectoryEnded, name, "completed")

    def _do_ask(self, trajectory: str) -> None:
        service = self.pick(("judge", "judge", "teacher", "reward", ""))
        sizes = self.pick((1, 2)) if not service else 0
        demand = ResourceDemand.of(gpus=sizes)
        if service == "judge" and self.pick((True, False)):
            demand = ResourceDemand.of(gpus=Amounts(1, 2, (1, 2)))
        name = self.fresh("x")
        request = ActionRequest(ActionId(name), TrajectoryId(trajectory), "reward", service, demand, "gpu", service)
        self.open[name] = request
        self.tell(ev.ActionRequested, request)

    def _do_loaded(self, where: tuple[str, tuple[str, int, int]]) -> None:
        name, key = where
        self.hosts[name].resident[key] = False
        self.tell(ev.ServiceLoaded, name, *key, True, 0.5)

    def _do_load_fails(self, where: tuple[str, tuple[str, int, int]]) -> None:
        name, key = where
        del self.hosts[name].resident[key]
        self.tell(ev.ServiceLoaded, name, *key, False, 0.5, "no memory")

    def _do_evicted(self, where: tuple[str, tuple[str, int, int]]) -> None:
        name, key = where
        del self.hosts[name].leaving[key]
        self.tell(ev.ServiceEvicted, name, *key)

    def _do_service_dies(self, where: tuple[str, tuple[str, int, int]]) -> None:
        name, key = where
        users = self.users(name, key)
        del self.hosts[name].resident[key]
        self.tell(ev.ServiceLost, name, *key, "killed")
        for action in users:
            self._over(action, name, False, ev.SERVICE_LOST)

    def _do_done(self, action: str) -> None:
        self._over(action, self.running[action].host_id, self.pick((True, True, False)), "")

    def _over(self, action: str, host_id: str, ok: bool, cause: str) -> None:
        del self.running[action], self.open[action]
        self.tell(ev.ActionFinished, action, host_id, 0.5, ok, True, cause)

    def _do_stale(self, name: str) -> None:
        """Reports of copies that are not in that state."""
        for key in self.hosts[name].resident:
            self.stage.late(ev.ServiceEvicted, name, *key)
        for key in self.hosts[name].leaving:
            self.stage.late(ev.ServiceLoaded, name, *key, True, 0.5)
            self.stage.late(ev.ServiceLost, name, *key, "killed")
        self.stage.late(ev.ServiceLoaded, "gone", "judge", 0, 1)

    def _do_wake(self, _: None) -> None:
        self.woken = True
        self.tell(ev.TimeReached)

    def finish(self) -> None:
        """Make everything healthy and let every request end."""
        self._do_join(8)
        for _ in range(5000):
            for move in ("wake", "loaded", "evicted", "done"):
                if subjects := self.possible(move):
                    self.do(move, subjects[0])
                    break
            else:
                break
        assert not self.open, "requests that never end"
        assert not self.stage.state.service_queues
        assert all(h.free[GPUS] == h.spec.resources[GPUS] for h in self.stage.state.hosts.values())


WEIGHTS = {
    "join": 3,
    "drain": 0.4,
    "lose": 0.8,
    "submit": 3,
    "end": 1,
    "ask": 16,
    "loaded": 10,
    "load_fails": 0.7,
    "evicted": 8,
    "service_dies": 0.8,
    "done": 12,
    "stale": 1,
    "wake": 20,
}


def play_services(pick: Pick, moves: Sequence[str], losses: int, strategy: Sequence[str] = ()) -> ServiceWorld:
    """A world of these moves, in which what is not possible is left out; it ends healthy."""
    stage = Stage("least-load", overrides=strategy, retries=RetryPolicy(losses, max_pool_wait_s=0))
    world = ServiceWorld(stage, pick)
    world.tell(ev.PoolsDeclared, (), SERVICES)
    for move in moves:
        if subjects := world.possible(move):
            world.do(move, pick(subjects))
    world.finish()
    return world


def random_services(seed: int, moves: int, strategy: Sequence[str] = ()) -> ServiceWorld:
    """A world drawn by a seed."""
    rng = random.Random(seed)
    drawn = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=moves)
    return play_services(rng.choice, drawn, seed % 3, strategy)
