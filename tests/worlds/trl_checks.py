"""Checks of what TRL gets, with the model that it trains."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def logprob_difference(model: Any, output: dict[str, list[Any]]) -> float:
    """The largest difference between the logprobs of the rollout and those of the model in training."""
    largest = 0.0
    columns = (output[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    for prompt, completion, logprobs, mask in zip(*columns, strict=True):
        ids = torch.tensor([*prompt, *completion])
        all_logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
        own = all_logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]
        difference = (own - torch.tensor(logprobs)).abs() * torch.tensor(mask)
        largest = max(largest, float(difference.max()))
    return largest
