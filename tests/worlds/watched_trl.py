"""Runs a program that trains with TRL, and notes what each of its processes got: `python FILE PROGRAM`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worlds.published_weights import published_are
from worlds.trl_checks import logprob_difference

from heddle_dask.training.trl_rollouts import TrlRollouts

ask = TrlRollouts.__call__


def watched(self: TrlRollouts, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
    """As asked, noted in a file for this process and step."""
    output = ask(self, prompts, trainer)
    rank, step = trainer.accelerator.process_index, trainer.state.global_step
    noted = {**output, "difference": logprob_difference(trainer.model, output)}
    Path(f"rank-{rank}-step-{step}.json").write_text(json.dumps(noted))
    if rank == 0 and step == 1:
        Path("weights-equal").write_text(str(int(published_are(trainer.model.state_dict(), Path("runs/trl/weights")))))
    return output


if __name__ == "__main__":
    TrlRollouts.__call__ = watched  # type: ignore[method-assign]
    runpy.run_path(sys.argv[1], run_name="__main__")
