"""Sums over the trained tokens of a step, from which its metrics are made."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.losses import LossInputs, clipped, divergence

_SUMS = (
    "tokens",
    "loss",
    "entropy",
    "weight",
    "capped",
    "masked",
    "difference",
    "fresh",
    "fresh_difference",
    "clipped",
    "kl",
)
_MAXIMA = ("weight", "difference", "fresh_difference")


class StepMetrics:
    """Sums and maxima of this rank; `totals` adds those of the others.

    Parameters
    ----------
    version
        Number of the version before the batch: tokens that it sampled show how engine and trainer differ.
    """

    def __init__(self, spec: TrainerSpec, version: int) -> None:
        self._spec = spec
        self._version = version
        self._sums = {name: torch.zeros((), dtype=torch.float64) for name in _SUMS}
        self._maxima = {name: torch.zeros((), dtype=torch.float64) for name in _MAXIMA}

    @torch.no_grad()
    def add(
        self,
        inputs: LossInputs,
        losses: torch.Tensor,
        weights: torch.Tensor,
        entropy: torch.Tensor,
        versions: torch.Tensor,
        kept: torch.Tensor | None = None,  # which tokens are trained; None: all
    ) -> None:
        importance = inputs.importance_weights()
        difference = (inputs.prox - inputs.behaviour).abs()
        fresh = versions == self._version
        self._add("tokens", torch.ones_like(losses))
        self._add("loss", losses * weights)
        self._add("entropy", entropy)
        self._add("weight", importance)
        self._add("capped", importance > self._spec.importance_cap)
        if kept is not None:
            self._add("masked", ~kept)
        self._add("difference", difference)
        self._add("fresh", fresh)
        self._add("fresh_difference", difference * fresh)
        self._add("clipped", clipped(inputs, self._spec))
        if inputs.reference is not None:
            self._add("kl", divergence(inputs.logprobs, inputs.reference))
        self._raise("weight", importance)
        self._raise("difference", difference)
        self._raise("fresh_difference", difference * fresh)

    def totals(self, device: torch.device, steps: int) -> dict[str, float]:
        """The metrics of all ranks.

        Parameters
        ----------
        steps
            Optimiser steps that were counted: a token counts once in each pass.
        """
        sums = torch.stack([self._sums[name].to(device) for name in _SUMS])
        maxima = torch.stack([self._maxima[name].to(device) for name in _MAXIMA])
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        highest = dict(zip(_MAXIMA, maxima.tolist(), strict=True))
        tokens, fresh = total["tokens"], total["fresh"]
        found = {
            "loss": total["loss"] / steps,
            "entropy": total["entropy"] / tokens,
            "importance_weight_mean": total["weight"] / tokens,
            "importance_weight_max": highest["weight"],
            "importance_weight_capped": total["capped"] / tokens,
            **({"masked_share": total["masked"] / tokens} if self._spec.ratio_limit else {}),
            "logprob_difference_mean": total["difference"] / tokens,
            "logprob_difference_max": highest["difference"],
            "tokens": tokens / self._spec.passes,
        }
        if fresh:
            found["mismatch_mean"] = total["fresh_difference"] / fresh
            found["mismatch_max"] = highest["fresh_difference"]
            found["fresh_tokens"] = fresh / self._spec.passes
        if steps > 1:
            found["clip_fraction"] = total["clipped"] / tokens
        if self._spec.kl_coefficient:
            found["kl"] = total["kl"] / tokens
        return found

    def _add(self, name: str, values: torch.Tensor) -> None:
        # Where the values are: nothing waits for a GPU before `totals`.
        self._sums[name] = self._sums[name].to(values.device) + values.sum(dtype=torch.float64)

    def _raise(self, name: str, values: torch.Tensor) -> None:
        if values.numel():
            highest = values.max().double()
            self._maxima[name] = torch.maximum(self._maxima[name].to(values.device), highest)


def learning_rate(spec: TrainerSpec, number: int) -> float:
    """The rate of the batch after which the weights are version `number`, from 1."""
    warm = min(1.0, number / (spec.warmup_steps + 1)) if spec.warmup_steps else 1.0
    if spec.schedule == "constant" or number <= spec.warmup_steps:
        return spec.learning_rate * warm
    share = (number - 1 - spec.warmup_steps) / max(1, spec.schedule_steps - spec.warmup_steps)
    share = min(1.0, max(0.0, share))
    left = 1 - share if spec.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return spec.learning_rate * left
