"""Seconds of training steps and weight updates. Every constant has its source beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from heddle_dask.cost.hardware import Gpu, ModelShape

FLOPS_PER_PARAMETER = 10.0
"""Of one token: 6 forward and backward, 2 for the logprobs before the step, 2 for a reference model (GRPO with KL)."""

MODEL_FLOPS_SHARE = 0.095
"""Fitted: with it, training takes the 85 s that RollArt measured on its good iterations (23.1 % of 366 s, section 2.2).
Pre-training reaches 0.4 to 0.5; ragged sequences of up to 32k tokens and the phases between do not."""

PUSH_BYTES_S = 0.45e9
"""RollArt, Table 4: 15.26, 27.51 and 61.02 GB in 32.4, 67.8 and 127.3 s, so 0.47, 0.41 and 0.48 GB/s."""

PULL_BYTES_S = 2.05e9
"""RollArt, Table 4, accumulated pull: 6.2, 16.3 and 29.7 s, so 2.5, 1.7 and 2.1 GB/s."""

BROADCAST_BYTES_S = 2.06e9
"""RollArt, section 2.2: TCP over 200 Gb/s Ethernet between the clusters: 6.9, 14.4, 29.6 s, so 2.2, 1.9, 2.1 GB/s."""

INSTALL_BYTES_S = 25e9
"""Host memory to one GPU: half of PCIe 5.0 x16, as copies of many tensors reach; GPUs of an engine in parallel."""

INSTALL_SETUP_S = 0.1
"""Pausing and resuming an engine: one iteration, and messages."""

RESHARD_BYTES_S = 20e9
"""Between trainer and engines on the same GPUs (CUDA IPC, NCCL inside a node): assumption, in favour of Sync."""

STEP_SETUP_S = 3.0
"""Of a training step: loading the batch, optimiser, collectives. Assumption."""

Transfer = Literal["store", "store-blocking", "broadcast", "colocated"]


@dataclass(frozen=True, slots=True)
class TrainingTimes:
    """How long a trainer on `gpus` GPUs takes, and its weights until they are installed.

    Attributes
    ----------
    tp_degree
        GPUs of an engine, which load their parts of the weights at the same time.
    transfer
        ``"store"``: pushed into a store and fetched behind the rollout (RollArt, section 6.3). ``"store-blocking"``:
        the same while nothing generates. ``"broadcast"``: from the trainer to all engines while nothing generates, as
        veRL does.
        ``"colocated"``: on the same GPUs.
    """

    model: ModelShape
    gpu: Gpu
    gpus: int
    tp_degree: int = 1
    transfer: Transfer = "store"
    flops_share: float = MODEL_FLOPS_SHARE
    setup_s: float = STEP_SETUP_S

    def train_s(self, tokens: int) -> float:
        """Seconds of one training step on `tokens` prompt and sampled tokens."""
        flops = FLOPS_PER_PARAMETER * (self.model.active_parameters or self.model.parameters) * tokens
        return self.setup_s + flops / (self.gpus * self.gpu.flops_per_s * self.flops_share)

    @property
    def publish_s(self) -> float:
        """Seconds from the end of a training step until its weights are in the store."""
        return self.model.weight_bytes / PUSH_BYTES_S if self.transfer == "store" else 0.0

    @property
    def fetch_s(self) -> float:
        """Seconds from the store to the memory of every engine's machine."""
        return self.model.weight_bytes / PULL_BYTES_S if self.transfer == "store" else 0.0

    @property
    def install_s(self) -> float:
        """Seconds for which an engine pauses: it loads weights that it has at hand, or waits for them too."""
        if self.transfer == "broadcast":
            return INSTALL_SETUP_S + self.model.weight_bytes / BROADCAST_BYTES_S
        if self.transfer == "colocated":
            return INSTALL_SETUP_S + self.model.weight_bytes / RESHARD_BYTES_S
        load_s = INSTALL_SETUP_S + self.model.weight_bytes / self.tp_degree / INSTALL_BYTES_S
        if self.transfer == "store-blocking":
            return load_s + self.model.weight_bytes / PUSH_BYTES_S + self.model.weight_bytes / PULL_BYTES_S
        return load_s

    def on(self, gpus: int) -> TrainingTimes:
        """The same trainer on another number of GPUs."""
        return replace(self, gpus=gpus)
