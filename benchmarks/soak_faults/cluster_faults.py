"""The faults of a cluster's network and of its workers, on a scheduler that a user has started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
from distributed import Client, Worker

from benchmarks.soak_faults.faults import Fault
from benchmarks.soak_faults.place import FaultPlace, shell
from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.live.clusters.worker_command import PRELOADS, QUICK_LOOP, worker_arguments
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, TOOL_RESOURCE

_NEAR, _FAR = "10.211.0.1", "10.211.0.2"
_START_S = 60.0


class StandingCluster(Fault):
    """A scheduler and two workers of each kind; half of them are behind a network link.

    The link joins two network namespaces.
    """

    _scheduler: SupervisedProcess

    @contextlib.contextmanager
    def around(self, place: FaultPlace) -> Iterator[None]:
        """Start them, and end them after the run."""
        shell("ip", "netns", "add", "far")
        shell("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", "far")
        shell("ip", "addr", "add", f"{_NEAR}/30", "dev", "near")
        shell("ip", "link", "set", "near", "up")
        for words in (f"addr add {_FAR}/30 dev far", "link set far up", "link set lo up"):
            shell("ip", "-n", "far", *words.split())
        try:
            with contextlib.ExitStack() as started:
                address = self._start(place, started)
                place.options += ["--scheduler", address, "--engines", "2"]
                yield
        finally:
            shell("ip", "netns", "del", "far")

    def _start(self, place: FaultPlace, started: contextlib.ExitStack) -> str:
        file = place.folder / "scheduler.json"
        listens = ["--host", _NEAR, "--port", "0", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
        preload = ["--no-dashboard", "--preload", f"{PRELOADS}.scheduler"]
        self._scheduler = self._launched(place, started, "scheduler", ["scheduler", *listens, *preload])
        deadline = time.monotonic() + _START_S
        while not file.exists() or not file.read_text().strip():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler does not listen: {self._scheduler.log_tail(3)}")
            time.sleep(0.1)
        address: str = json.loads(file.read_text())["address"]
        for side, host in (("near", _NEAR), ("far", _FAR)):
            prefix = ["ip", "netns", "exec", "far"] if side == "far" else []
            for kind, tags in (("rollout", {ENGINE_RESOURCE: 1}), ("tool", {TOOL_RESOURCE: 2})):
                name = f"{kind}-{side}"
                words = worker_arguments(address, name, tags, place.folder / "scratch", ["--host", host])
                self._launched(place, started, name, words, prefix)
        return address

    def _launched(
        self,
        place: FaultPlace,
        started: contextlib.ExitStack,
        name: str,
        words: Sequence[str],
        prefix: Sequence[str] = (),
    ) -> SupervisedProcess:
        env = {**place.environment(self.span_s), **QUICK_LOOP}
        env["DASK_TEMPORARY_DIRECTORY"] = str(place.folder / "scratch")
        argv = [*prefix, sys.executable, "-m", "dask", *words]
        process = SupervisedProcess(argv, place.folder / "logs", name, env=env)
        process.launch()
        started.callback(lambda: asyncio.run(process.stop()))
        return process


class CutLink(StandingCluster):
    """No packet passes for half a minute."""

    told = "the network to half of the workers is cut for 30 s"
    lasts_s: ClassVar[float | None] = 30.0
    span_s = 40.0

    def strike(self, place: FaultPlace) -> None:
        """Cut it."""
        shell("ip", "-n", "far", "link", "set", "far", "down")

    def lift(self, place: FaultPlace) -> None:
        """Join it again."""
        shell("ip", "-n", "far", "link", "set", "far", "up")


class CutForGood(CutLink):
    """No packet passes until the run has ended."""

    told = "the network to half of the workers is cut for good"
    lasts_s = None


class SlowLink(StandingCluster):
    """The link passes 256 kbit a second, with up to two seconds of packets that wait."""

    told = "the network passes 256 kbit/s"

    def strike(self, place: FaultPlace) -> None:
        """Make it slow, in both directions."""
        for words in (("-n", "far", "dev", "far"), ("dev", "near")):
            where = words[:-2]
            rate = ["root", "tbf", "rate", "256kbit", "burst", "4kb", "latency", "2s"]
            shell("tc", *where, "qdisc", "add", *words[-2:], *rate)

    def lift(self, place: FaultPlace) -> None:
        """Make it quick again."""
        shell("tc", "-n", "far", "qdisc", "del", "dev", "far", "root")
        shell("tc", "qdisc", "del", "dev", "near", "root")


class LossyLink(StandingCluster):
    """A tenth of the packets is lost in each direction. (The kernel of the rows has no netem: netfilter drops them.)"""

    told = "the network loses a tenth of its packets"

    def strike(self, place: FaultPlace) -> None:
        """Drop them at random."""
        for prefix, device in ((["ip", "netns", "exec", "far"], "far"), ([], "near")):
            rule = ["-A", "INPUT", "-i", device, "-m", "statistic", "--mode", "random", "--probability", "0.1"]
            shell(*prefix, "iptables", *rule, "-j", "DROP")

    def lift(self, place: FaultPlace) -> None:
        """Drop none."""
        for prefix in (["ip", "netns", "exec", "far"], []):
            shell(*prefix, "iptables", "-F", "INPUT")


class ManyAddresses(StandingCluster):
    """Workers come and go, each at an address of its own: distributed #7977 and #2371."""

    told = "1,000 worker addresses come and go"
    after = 0.1
    span_s = 60.0
    workers: ClassVar[int] = 1000
    _together = 25

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}

    def strike(self, place: FaultPlace) -> None:
        """All of them; each tenth is a tool worker of ours."""
        address = place.options[place.options.index("--scheduler") + 1]
        asyncio.run(self._come_and_go(address, place.folder))

    def figures(self) -> dict[str, float]:
        """Memory of the scheduler before and after."""
        return self._figures

    async def _come_and_go(self, address: str, folder: Path) -> None:
        scheduler = psutil.Process(self._scheduler.program_pid)
        self._figures["scheduler_mib_before"] = round(scheduler.memory_info().rss / 2**20, 1)
        began_s = time.monotonic()
        async with Client(address, asynchronous=True):
            for first in range(0, self.workers, self._together):
                workers = [self._worker(address, number, folder) for number in range(first, first + self._together)]
                await asyncio.gather(*workers)
                await asyncio.gather(*(worker.close(nanny=False) for worker in workers))
        self._figures["addresses"] = self.workers
        self._figures["addresses_s"] = round(time.monotonic() - began_s, 1)
        self._figures["scheduler_mib_after"] = round(scheduler.memory_info().rss / 2**20, 1)

    def _worker(self, address: str, number: int, folder: Path) -> Worker:
        more: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "local_directory": str(folder / "passing")}
        if number % 10 == 0:
            more |= {"resources": {TOOL_RESOURCE: 1}, "preload": [f"{PRELOADS}.tool_worker"]}
        name = f"passing-{number}"
        return Worker(address, nthreads=1, name=name, host=_NEAR, memory_limit=0, dashboard=False, **more)


CLUSTER_FAULTS: dict[str, Callable[[], Fault]] = {
    "net-cut": CutLink,
    "net-cut-for-good": CutForGood,
    "net-slow": SlowLink,
    "net-loss": LossyLink,
    "addresses": ManyAddresses,
}
