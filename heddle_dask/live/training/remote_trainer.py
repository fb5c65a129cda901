"""A trainer on a Dask worker: every order is a future that only a worker tagged ``TRAINER`` may run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.live.scheduler.plugin import HeddleScheduler
from heddle_dask.live.wire.messages import TRAINER_RESOURCE
from heddle_dask.live.worker.trainer_host import TRAINER_TOPIC, TrainerHost, ask_trainer, end_trainer
from heddle_dask.training.trainer import TrainerState, TrainReport
from heddle_dask.training.trainer_spec import TrainerSpec

_PART = 0.25


class RemoteTrainer:
    """`training.trainer.Trainer` on the cluster of a client. Its process dies and comes back without the caller.

    Its methods are awaited on the client's event loop. Paths are those of the trainer's machine: a directory that it
    shares with the driver.

    Parameters
    ----------
    client
        Of a cluster that has a worker tagged ``TRAINER`` (``LocalRolloutCluster(trainers=1)``).
    note
        Takes a line when its process has died, or answers no more.
    """

    def __init__(self, client: Client, spec: TrainerSpec, note: Callable[[str], None] | None = None) -> None:
        self._client = client
        self._spec = spec
        self._note = note
        self._registered = False

    async def state(self) -> TrainerState:
        """Where it stands; starts its process."""
        return _state(await self._ask("GET", "/state"))

    async def process_id(self) -> int:
        """Pid of the process of its first rank."""
        return int((await self._ask("GET", "/state"))["pid"])

    async def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        """See `Trainer.train`.

        Raises
        ------
        BadInput
            The batch or the version cannot be trained.
        ServiceFailed
            Process after process of the trainer died of this batch.
        """
        answer = await self._ask("POST", "/train", {"batch": str(Path(batch).absolute()), **_named(version)})
        return TrainReport(_state(answer["state"]), answer["metrics"], answer["seconds"])

    async def publish(
        self,
        version: PolicyVersion,
        store: str,
        copied: Callable[[], None] = lambda: None,
        *,
        evaluated: bool = False,
    ) -> str | None:
        """See `Trainer.publish`.

        Raises
        ------
        BadInput
            The store cannot be written, or the trainer cannot have this version.
        """
        named = {**_named(version), "store": store}
        while (await self._ask("POST", "/publish", {**named, "evaluated": evaluated}))["copied"]:
            copied()
            manifest = (await self._ask("POST", "/published", named))["manifest"]
            if manifest is not None:
                return str(manifest)
        return None

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        """See `Trainer.keep_best`.

        Raises
        ------
        BadInput
            These weights were not published as evaluated.
        """
        await self._ask("POST", "/keep", {**_named(version), "reward": reward})

    async def save(self, version: PolicyVersion) -> TrainerState:
        """See `Trainer.save`.

        Raises
        ------
        BadInput
            The trainer cannot have this version.
        """
        return _state(await self._ask("POST", "/save", {**_named(version), "model": True}))

    async def export(self, directory: Path) -> None:
        """Write its weights as a model directory, an adapter merged with the model.

        Raises
        ------
        BadInput
            The directory exists.
        """
        await self._ask("POST", "/export", {"directory": str(Path(directory).absolute())})

    async def close(self) -> None:
        if self._registered:
            await self._on_trainer(end_trainer)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        if not self._registered:
            await self._check_worker()
            # For clusters without the preloads; only the first time changes anything.
            await self._client.register_plugin(HeddleScheduler())
            await self._client.register_plugin(TrainerHost())
            if self._note is not None:
                note = self._note
                self._client.subscribe_topic(TRAINER_TOPIC, lambda event: note(event[1]))
            self._registered = True
        return await self._on_trainer(ask_trainer, self._spec.to_mapping(), method, path, body)

    async def _check_worker(self) -> None:
        scheduler: Any = self._client.scheduler
        workers = (await scheduler.identity(n_workers=-1))["workers"]
        if not any(TRAINER_RESOURCE in worker["resources"] for worker in workers.values()):
            raise BadInput(
                f"the cluster has no worker for a trainer: start one with --resources {TRAINER_RESOURCE}=1 "
                "--preload heddle_dask.preload.trainer_worker"
            )

    async def _on_trainer(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        # A part of it: weights are published while a batch is trained. The trainer itself does one after another.
        future = self._client.submit(function, *arguments, pure=False, resources={TRAINER_RESOURCE: _PART})
        return await self._client.gather(future, asynchronous=True)


def _named(version: PolicyVersion) -> dict[str, Any]:
    return {"lineage": version.lineage, "number": version.number}


def _state(answer: dict[str, Any]) -> TrainerState:
    checkpoint = answer["checkpoint"]
    version = PolicyVersion(answer["lineage"], answer["number"])
    return TrainerState(version, None if checkpoint is None else Path(checkpoint), answer["kept_from"])
