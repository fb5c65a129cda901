"""One batch: logprobs before it, then gradients and optimiser steps, on this rank's share of the sequences."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.losses import LossFunction, LossInputs, in_ratio, token_weights
from pipelines.grpo.policy import Policy
from pipelines.grpo.progress import PROGRESS
from pipelines.grpo.sequences import TrainedSequence, micro_batches, parts_of, shares_of
from pipelines.grpo.step_metrics import StepMetrics
from pipelines.grpo.token_logprobs import TokenLogprobs, token_logprobs

Known = Mapping[int, torch.Tensor]
"""Logprobs of trained tokens, by the number of their sequence."""


class BatchStep:
    """Trains on one batch.

    Parameters
    ----------
    reference
        The model that the policy stays near to; None where no divergence is asked for.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        reference: Any,
        rank: int,
        number: int,
    ) -> None:
        self._policy = policy
        self._spec: TrainerSpec = policy.spec
        self._optimizer = optimizer
        self._loss = loss
        self._reference = reference
        self._rank = rank
        self._metrics = StepMetrics(self._spec, number)
        self._number = number

    def run(self, sequences: Sequence[TrainedSequence]) -> tuple[dict[str, float], dict[str, float]]:
        """Take all sequences of the batch; returns metrics and the seconds of the phases."""
        spec, began_s = self._spec, time.perf_counter()
        parts = parts_of(sequences, spec.parts, f"{spec.seed}-{self._number}")
        splits = [self._my_micro_batches(part) for part in parts]
        mine = [micro for split in splits for micro in split]
        steps = len(parts) * spec.passes
        # With one step the policy before it is the policy that is trained: its own pass gives both.
        prox = self._known(mine, self._policy.model) if steps > 1 else {}
        reference = self._reference_logprobs(mine) if spec.kl_coefficient else {}
        trained_s = time.perf_counter()
        norms = []
        for _ in range(spec.passes):
            for part, split in zip(parts, splits, strict=True):
                weights = _weights_of(part, spec)
                self._optimizer.zero_grad(set_to_none=True)
                for micro in split:
                    self._backward(micro, weights, prox, reference)
                    PROGRESS.made()
                norms.append(self._clip())
                PROGRESS.made()
                if math.isfinite(norms[-1]):
                    self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self._metrics.totals(self._policy.device, steps)
        known_norms = [norm for norm in norms if math.isfinite(norm)]
        metrics["grad_norm"] = sum(known_norms) / len(known_norms) if known_norms else math.nan
        # A step along a gradient that is not finite would end all weights.
        metrics["skipped_steps"] = float(steps - len(known_norms))
        ended_s = time.perf_counter()
        return metrics, {"prox": trained_s - began_s, "train": ended_s - trained_s}

    def _my_micro_batches(self, part: Sequence[TrainedSequence]) -> list[list[TrainedSequence]]:
        """Of this rank; all ranks get the same number, since they run each together. An empty one counts nothing."""
        split = [
            micro_batches(share, self._spec.micro_batch_tokens, packed=self._spec.packed)
            for share in shares_of(part, self._spec.ranks)
        ]
        most = max(map(len, split))
        own = split[self._rank]
        return own + [[] for _ in range(most - len(own))]

    def _backward(
        self, micro: Sequence[TrainedSequence], weights: Mapping[int, float], prox: Known, reference: Known
    ) -> None:
        given = self._forward(self._policy.model, micro)
        if not micro:
            # The other ranks wait for this one's part of the gradient.
            (given.logprobs.sum() * 0).backward()
            return
        device = self._policy.device
        logprobs = given.logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            prox=_joined(micro, prox) if prox else logprobs.detach(),
            behaviour=_tensor([one.logprobs for one in micro], device),
            reference=_joined(micro, reference) if reference else None,
            advantages=_tensor([one.advantages for one in micro], device),
        )
        losses, kept = self._loss(inputs, self._spec), in_ratio(inputs, self._spec)
        if kept is not None:
            losses = torch.where(kept, losses, 0.0)
        weight = _tensor([np.full(len(one.targets), weights[one.trajectory], np.float32) for one in micro], device)
        # FSDP takes the mean over ranks; the weights are those of the sum.
        ((losses * weight).sum() * self._spec.ranks).backward()
        versions = _tensor([one.versions for one in micro], device)
        self._metrics.add(inputs, losses, weight, given.entropy, versions, kept)

    def _forward(self, model: Any, micro: Sequence[TrainedSequence]) -> TokenLogprobs:
        device = self._policy.device
        found = token_logprobs(model, micro or [_NOTHING], device, packed=self._spec.packed)
        PROGRESS.made()
        return found

    @torch.no_grad()
    def _known(self, micros: Sequence[Sequence[TrainedSequence]], model: Any) -> dict[int, torch.Tensor]:
        known: dict[int, torch.Tensor] = {}
        for micro in micros:
            given = self._forward(model, micro).logprobs
            if micro:
                parts = given.split([len(one.targets) for one in micro])
                known |= {one.number: part for one, part in zip(micro, parts, strict=True)}
        return known

    def _reference_logprobs(self, micros: Sequence[Sequence[TrainedSequence]]) -> dict[int, torch.Tensor]:
        if self._reference is not None:
            return self._known(micros, self._reference)
        with self._policy.without_adapter() as model:
            return self._known(micros, model)

    def _clip(self) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(self._policy.trained, self._spec.max_grad_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


_NOTHING = TrainedSequence(
    number=-1,
    trajectory=-1,
    token_ids=np.zeros(2, np.int64),
    targets=np.ones(1, np.int64),
    advantages=np.zeros(1, np.float32),
    logprobs=np.zeros(1, np.float32),
    temperatures=np.ones(1, np.float32),
    versions=np.zeros(1, np.int32),
)


def _weights_of(part: Sequence[TrainedSequence], spec: TrainerSpec) -> dict[int, float]:
    tokens: Counter[int] = Counter()
    for one in part:
        tokens[one.trajectory] += len(one.targets)
    return dict(zip(tokens, token_weights(list(tokens.values()), spec), strict=True))


def _joined(micro: Sequence[TrainedSequence], known: Known) -> torch.Tensor:
    return torch.cat([known[one.number] for one in micro])


def _tensor(arrays: Sequence[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
