"""The loss of each trained token, and how tokens are weighed in the mean.

Decoupled PPO (AReaL, arXiv 2505.24298, section 5.2) with a capped importance weight: the policy that sampled a token
and the policy at the start of the batch, around which the ratio is clipped, are different ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.training.advantages import user_function
from heddle_dask.training.trainer_spec import TrainerSpec


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What is known of the trained tokens of a micro-batch; each tensor is float32 with one entry for each token.

    Attributes
    ----------
    logprobs
        Of the policy that is trained; the only one with a gradient.
    prox
        Of the policy before the first optimiser step on this batch.
    behaviour
        Of the engine that sampled the token.
    reference
        Of the reference model; None where none is asked for.
    advantages
        Of the token's trajectory, or of its turn.
    """

    logprobs: torch.Tensor
    prox: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor

    def importance_weights(self) -> torch.Tensor:
        """pi_prox / pi_behaviour, without a gradient."""
        return torch.exp(self.prox - self.behaviour).detach()

    def ratio(self) -> torch.Tensor:
        """pi_theta / pi_prox."""
        return torch.exp(self.logprobs - self.prox)


LossFunction = Callable[[LossInputs, TrainerSpec], torch.Tensor]
"""One loss for each token. Weighing and summing is done by the trainer."""


def decoupled_clipped_loss(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor:
    """-w min(r A, clip(r) A), with w = min(pi_prox / pi_behaviour, C), and the divergence where one is asked for."""
    weight = inputs.importance_weights().clamp(max=spec.importance_cap)
    ratio = inputs.ratio()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    loss = -weight * torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    if spec.kl_coefficient and inputs.reference is not None:
        loss = loss + spec.kl_coefficient * divergence(inputs.logprobs, inputs.reference)
    return loss


def in_ratio(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor | None:
    """Which tokens are trained, by their importance weights; None: all."""
    if not spec.ratio_limit:
        return None
    limit = math.log(spec.ratio_limit)
    return (inputs.prox - inputs.behaviour).detach().abs() <= limit


def divergence(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy, reference) at each sampled token, never negative (k3: Schulman, "Approximating KL")."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1


def clipped(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor:
    """Whether the clip takes the gradient of a token away."""
    ratio, advantages = inputs.ratio().detach(), inputs.advantages
    return ((advantages > 0) & (ratio > 1 + spec.clip_high)) | ((advantages < 0) & (ratio < 1 - spec.clip_low))


def token_weights(tokens: Sequence[int], spec: TrainerSpec) -> list[float]:
    """The weight of each token of each trajectory in the sum, given the trained tokens of all of them.

    Parameters
    ----------
    tokens
        Trained tokens of each trajectory of the optimiser step, on all ranks and in all micro-batches.
    """
    trained = sum(1 for count in tokens if count)
    if spec.normalisation == "batch":
        return [1 / sum(tokens)] * len(tokens)
    if spec.normalisation == "sequence":
        return [1 / (trained * count) if count else 0.0 for count in tokens]
    return [1 / (trained * spec.constant_tokens)] * len(tokens)


def loss_function(name: str) -> LossFunction:
    """The user's loss by ``package.module:function``; ours for an empty name."""
    if not name:
        return decoupled_clipped_loss
    function = user_function("trainer loss", name, "use package.module:function")

    def checked(inputs: LossInputs, spec: TrainerSpec) -> torch.Tensor:
        losses = function(inputs, spec)
        if not isinstance(losses, torch.Tensor) or losses.shape != inputs.logprobs.shape:
            raise BadInput(f"trainer loss {name!r}: give one number for each of {len(inputs.logprobs)} tokens")
        return losses

    return checked
