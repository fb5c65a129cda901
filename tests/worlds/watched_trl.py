"""Runs a program that trains with TRL, and notes what each of its processes got: `python FILE PROGRAM`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from worlds.trl_checks import logprob_difference

from heddle_dask.training.trl_rollouts import TrlRollouts
from heddle_dask.weights.tensor_files import read_tensors

ask = TrlRollouts.__call__


def watched(self: TrlRollouts, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
    """As asked, noted in a file for this process and step."""
    output = ask(self, prompts, trainer)
    rank, step = trainer.accelerator.process_index, trainer.state.global_step
    noted = {**output, "difference": logprob_difference(trainer.model, output)}
    Path(f"rank-{rank}-step-{step}.json").write_text(json.dumps(noted))
    if rank == 0 and step == 1:
        Path("weights-equal").write_text(str(int(published_are(trainer.model.state_dict()))))
    return output


def published_are(state: dict[str, torch.Tensor]) -> bool:
    """Whether the weights in the store are these, bit for bit."""
    published = [one for path in Path("runs/trl/weights").rglob("*.safetensors") for one in read_tensors(path)]
    return bool(published) and all(bytes(one.data) == state[one.name].detach().numpy().tobytes() for one in published)


if __name__ == "__main__":
    TrlRollouts.__call__ = watched  # type: ignore[method-assign]
    runpy.run_path(sys.argv[1], run_name="__main__")
