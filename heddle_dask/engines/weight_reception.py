"""One rank of an engine receives weights in a thread, while the engine generates. Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from heddle_dask.core.errors import HeddleError
from heddle_dask.engines.weight_broadcast import PIECE_BYTES, BroadcastGroup, Meeting, receive_weights
from heddle_dask.weights.manifest import WeightManifest


class Reception:
    """The receiving of one version; begins at once.

    Parameters
    ----------
    manifest
        Text of the manifest.
    rank
        Of this process in the broadcast.
    device
        Of this process.
    before
        The reception before this one. It is let end: a rank that left would end the broadcast for all others.
    """

    def __init__(
        self, manifest: str, meeting: Meeting, rank: int, device: torch.device, before: Reception | None
    ) -> None:
        self._manifest = WeightManifest.from_json(manifest)
        self._meeting = meeting
        self._rank = rank
        self._device = device
        self._before = before
        self._cause = ""
        self._tensors: dict[str, torch.Tensor] | None = None
        self._thread = threading.Thread(target=self._receive, name="heddle-weights", daemon=True)
        self._thread.start()

    @property
    def label(self) -> str:
        """The version, as engines are labelled."""
        return str(self._manifest.version)

    def status(self) -> Mapping[str, Any]:
        """Of which version, whether it has ended, and why it failed (empty: it did not)."""
        return {"version": self.label, "ended": not self._thread.is_alive(), "cause": self._cause}

    def take(self) -> dict[str, torch.Tensor]:
        """The tensors by name, verified, in the host's memory; only once.

        Raises
        ------
        ValueError
            They are not there.
        """
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            raise ValueError(f"weights {self.label} are not received: {self._cause or 'taken, or under way'}")
        return tensors

    def join(self) -> None:
        """Wait until it has ended: the limits of the broadcast bound it."""
        self._thread.join()

    def _receive(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.join()
            del before  # with its tensors
        try:
            with BroadcastGroup(self._meeting, self._rank, self._device) as group:
                self._tensors = receive_weights(group, self._manifest, PIECE_BYTES)
        except (HeddleError, RuntimeError, MemoryError) as error:
            self._cause = " ".join(str(error).split())[:300] or type(error).__name__
