"""The worker of a trainer: a Dask worker that owns the trainer's process and passes orders on to it.

The plugin takes effect on workers that carry the resource ``TRAINER``. An order that a trainer did not answer, because
it died, is stopped or made no progress, is given again to a new process, which begins with the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.health import HealthLimits
from heddle_dask.engines.model_services.served_process import ProcessEnded, ServedProcess
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceRefused
from heddle_dask.live.wire.messages import ENGINE_LOGS_VARIABLE, TRAINER_RESOURCE, TRAINER_THREADS_VARIABLE
from heddle_dask.live.worker.own_gpus import OwnGpus
from heddle_dask.live.worker.rejoin import comes_back
from heddle_dask.live.worker.trainer_progress import WATCHED, OrderWatch

PLUGIN_NAME = "heddle-trainer-host"
TRAINER_MODULE = "pipelines.grpo"
START_TIMEOUT_S = 600.0
SAVE_S = 60.0
"""A trainer whose worker leaves has this long to write a checkpoint; without one, stored batches are trained again."""
# It may hold its interpreter for long while it computes.
_LIMITS = HealthLimits(misses=16)
TRAINER_TOPIC = "heddle-trainer"
"""The topic of Dask's events under which it is told that a trainer has died or is silent."""
# A batch on which process after process dies is a matter for the user.
ATTEMPTS = 3
_EXIT_BAD_INPUT = 2
_INSTALLATION = Path(__file__).parents[3]

Spec = Mapping[str, Any]
"""A `TrainerSpec` as a mapping."""


async def ask_trainer(spec: Spec, method: str, path: str, body: Any = None) -> Any:
    """The Dask task of one order to the trainer of this worker; see `TrainerHost.ask`."""
    return await _host_here().ask(spec, method, path, body)


async def end_trainer() -> None:
    """The Dask task that ends the process of the trainer."""
    await _host_here().stop()


def _host_here() -> TrainerHost:
    worker = get_worker()
    found = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(found, TrainerHost) or found.worker is None:
        raise BadInput(f"worker {worker.address} hosts no trainer: start it with --resources {TRAINER_RESOURCE}=1")
    return found


class TrainerHost(WorkerPlugin):
    """Hosts one trainer at a time on every worker tagged ``TRAINER``."""

    name = PLUGIN_NAME
    # A second client must not end the trainer of the first.
    idempotent = True

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._process: ServedProcess | None = None
        self._spec: Spec = {}
        self._watch: OrderWatch | None = None

    def setup(self, worker: Worker) -> None:
        """No process is started before the first order."""
        if TRAINER_RESOURCE not in worker.state.total_resources:
            return
        self.worker = worker
        comes_back(worker)
        self._logs = Path(os.environ.get(ENGINE_LOGS_VARIABLE) or worker.local_directory)
        self._starting = asyncio.Lock()
        self._gpus = OwnGpus(worker, "trainer")

    async def teardown(self, worker: Worker) -> None:
        if self.worker is not None:
            await self._save()
            await self.stop()

    async def _save(self) -> None:
        """The worker leaves, as before the end of its job: let the trainer write a checkpoint, if there is time."""
        process = self._process
        if process is not None and process.runs:
            with suppress(ServiceFailed, ServiceRefused):
                await process.unless_ended(process.client.ask("POST", "/save", {"model": False}, timeout_s=SAVE_S))

    async def ask(self, spec: Spec, method: str, path: str, body: Any = None) -> Any:
        """The trainer's answer; its process is started where none runs, or where that of another trainer does.

        Raises
        ------
        BadInput
            It refuses the order, or its description.
        ServiceFailed
            `ATTEMPTS` processes died of the order.
        """
        for attempt in range(ATTEMPTS):
            process = await self._running(spec)
            try:
                return await process.unless_ended(self._watched(process, method, path, body))
            except ServiceRefused as error:
                raise BadInput(str(error)) from error
            except ServiceFailed as error:
                # One that was given up may answer again by now.
                failed_only = not isinstance(error, ProcessEnded) and await process.client.healthy()
                if attempt + 1 == ATTEMPTS or failed_only:
                    raise
                self._tell(f"{error}; another process is given the order {path[1:]}")
                # What is left of it may take a while to end, and answers nobody.
                await self._end(process)
        raise AssertionError("each attempt returns or raises")

    async def _watched(self, process: ServedProcess, method: str, path: str, body: Any) -> Any:
        """The answer of a process that gets on with its order; `ProcessEnded` of one that does not."""

        async def parts() -> int | None:
            with suppress(ServiceFailed, ServiceRefused):
                return int((await process.client.ask("GET", "/state", timeout_s=_LIMITS.check_s))["parts"])
            return None

        assert self._watch is not None
        kind, began_s = path[1:], time.monotonic()
        answer = asyncio.ensure_future(process.client.ask(method, path, body))
        stuck = asyncio.ensure_future(self._watch.until_stuck(kind, parts))
        try:
            await asyncio.wait((answer, stuck), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ProcessEnded(f"trainer grpo is lost: {stuck.result()}")
            if kind != WATCHED:
                self._watch.took(kind, time.monotonic() - began_s)
            return answer.result()
        finally:
            answer.cancel()
            stuck.cancel()

    async def stop(self) -> None:
        """End the process, if one runs, and give its GPUs back; the next order starts another one."""
        await self._end_running()
        self._gpus.give_back()

    async def _end_running(self) -> None:
        if self._process is not None:
            await self._end(self._process)

    async def _end(self, process: ServedProcess) -> None:
        if self._process is process:
            self._process = None
        await process.stop()

    async def _running(self, spec: Spec) -> ServedProcess:
        async with self._starting:
            if self._process is not None and self._process.runs and self._spec == spec:
                return self._process
            await self._end_running()
            environment = await self._environment(spec)
            if self._watch is None or self._spec != spec:
                self._watch = OrderWatch(float(spec["silence_s"]), self._tell)
            self._spec = dict(spec)
            self._process = process = ServedProcess("grpo", self._logs, noun="trainer", limits=_LIMITS, tell=self._tell)
            try:
                await process.start(self._command(spec, process), environment, START_TIMEOUT_S)
            except ServiceFailed:
                refused = process.last_line if process.returncode == _EXIT_BAD_INPUT else ""
                await self.stop()
                if refused:
                    raise BadInput(refused.removeprefix("error: ")) from None
                raise
            except BaseException:
                await self.stop()
                raise
            return process

    def _tell(self, line: str) -> None:
        assert self.worker is not None
        self.worker.log_event(TRAINER_TOPIC, line)

    def _command(self, spec: Spec, process: ServedProcess) -> list[str]:
        assert self.worker is not None
        config = Path(self.worker.local_directory) / "trainer.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(dict(spec)), encoding="utf-8")
        # Not from the working directory: a user's package may also be called `pipelines`.
        command = [sys.executable, "-P", "-m", TRAINER_MODULE, "--config", str(config)]
        return [*command, "--socket", process.address.socket]

    async def _environment(self, spec: Spec) -> dict[str, str]:
        shares = spec.get("shares_gpus") or spec.get("device") == "cpu"
        gpus = () if shares else await self._gpus.take(int(spec.get("ranks", 1)))
        paths = [str(_INSTALLATION), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": os.environ.get(TRAINER_THREADS_VARIABLE, "1"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
