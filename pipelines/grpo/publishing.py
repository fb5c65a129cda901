"""A copy of weights becomes a version in the weight store, or one that is broadcast, while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.adapters import merged
from heddle_dask.weights.manifest import AdapterFacts
from heddle_dask.weights.model_directory import model_facts, weight_files, weights_digest
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import RawTensor, read_tensors
from pipelines.grpo.model_files import Weights, raw_tensors
from pipelines.grpo.model_loading import stored_dtype
from pipelines.grpo.policy import Policy


class Publisher:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._model = Path(policy.spec.model)

    @property
    def dtype(self) -> torch.dtype | None:
        """In which weights are published: that of the model's files; None: as they are trained, for an adapter."""
        return None if self._policy.spec.lora_rank else stored_dtype(self._model)

    def publish(self, weights: Weights, version: PolicyVersion, store: str) -> str:
        """Write weights into the store; returns the URI of the manifest.

        A version that is there stays: engines may have it. For a broadcast only the manifest is written.
        """
        place = WeightStore(store)
        if place.is_broadcast:
            return place.write_manifest(version, self.whole(weights), model_facts(self._model))
        if place.manifest(version) is not None:
            return place.manifest_uri(version)
        return place.write(version, self._raw(weights), model_facts(self._model), adapter=self._adapter)

    def whole(self, weights: Weights) -> Iterable[RawTensor]:
        """All tensors of the model, as a broadcast sends them; an adapter is merged with the model's files."""
        if self._adapter is None:
            return self._raw(weights)
        return merged(self._stored(), {tensor.name: tensor for tensor in self._raw(weights)}, self._adapter)

    def _raw(self, weights: Weights) -> list[RawTensor]:
        return raw_tensors(self._policy, weights)

    def _stored(self) -> Iterator[RawTensor]:
        return (tensor for file in weight_files(self._model) for tensor in read_tensors(file))

    @cached_property
    def _adapter(self) -> AdapterFacts | None:
        spec = self._policy.spec
        if not spec.lora_rank:
            return None
        return AdapterFacts(spec.lora_rank, spec.lora_alpha / spec.lora_rank, weights_digest(self._model))
