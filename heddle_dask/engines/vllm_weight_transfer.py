"""A backend of vLLM's weight transfer: broadcasts are received behind generation, and loaded in the pause.

Only vLLM's workers import this module (``--worker-extension-cls``); it registers the backend before they make it.

vLLM's own backend ``nccl`` receives while the engine is paused, trusts what comes, and runs on GPUs only. Here
``/init_weight_transfer_engine`` begins to receive one version in a thread, ``received_weights`` says whether it is
there and whole, and ``/start_weight_update``, ``/update_weights`` and ``/finish_weight_update`` load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from heddle_dask.engines.vllm_worker_extension import WorkerExtension, pack_every_layer
from heddle_dask.engines.weight_broadcast import Meeting, Reception

BACKEND = "heddle"


@dataclass
class ReceiveInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Which version to receive, where, and the rank of this engine's first worker."""

    manifest: str
    meeting: dict[str, Any]
    rank: int


@dataclass
class LoadInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to load."""

    version: str


class HeddleWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The backend in one worker."""

    init_info_cls = ReceiveInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update = False

    _reception: Reception | None = None

    def init_transfer_engine(self, init_info: ReceiveInfo) -> None:
        """Begin to receive a version; returns at once."""
        rank = init_info.rank + self.parallel_config.rank
        meeting = Meeting.from_mapping(init_info.meeting)
        self._reception = Reception(init_info.manifest, meeting, rank, self.device, self._reception)

    def status(self) -> Mapping[str, Any]:
        return {} if self._reception is None else self._reception.status()

    def start_weight_update(self) -> None:
        """Let layers take weights as checkpoints have them."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load what was received; vLLM's base class has this name for it."""
        reception = self._reception
        if reception is None or reception.label != update_info.version:
            raise ValueError(f"weights {update_info.version} are not received")
        self.model.load_weights(iter(reception.take().items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_every_layer(self.model)

    def shutdown(self) -> None:
        """Let go of what was received; a broadcast that is under way ends by itself."""
        self._reception = None


class ReceivingWorkerExtension(WorkerExtension):
    """`WorkerExtension`, and what `HeddleWeightTransfer` has."""

    weight_transfer_engine: Any
    device: Any

    def received_weights(self) -> dict[str, Any]:
        """The device of this worker, and `Reception.status`."""
        return {"device": str(self.device.type), **self.weight_transfer_engine.status()}


WeightTransferEngineFactory.register_engine(BACKEND, HeddleWeightTransfer)
