"""Rollouts for verl's training engines: each process of verl gets its share of a batch, and weights go back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.advantages import AdvantageFunction, less_mean
from heddle_dask.training.exports.verl import verl_columns
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, TrainingBatch
from heddle_dask.training.sample_rows import sample_rows
from heddle_dask.training.trainer_processes import TrainerProcesses, TrainerSampler, handed_out
from pipelines.any_trainer.verl_batches import data_proto


class VerlRollouts:
    """One for each process; all of them call the same methods in the same order.

    Parameters
    ----------
    sampler, processes
        What `launched_processes.main_process_engines` gives.
    """

    def __init__(
        self,
        sampler: TrainerSampler | None,
        processes: TrainerProcesses,
        advantages: AdvantageFunction = less_mean,
        pad_token_id: int = 0,
    ) -> None:
        self._sampler = sampler
        self._processes = processes
        self._advantages = advantages
        self._pad_token_id = pad_token_id

    def batch(self, task_ids: Sequence[str], samples: int, step: int) -> Any:
        """Attempts at these tasks by the newest weights: the share of this process as verl's ``DataProto``.

        All processes have the same number of rows; one without a trained token fills up. None in all of them: there is
        nothing to learn from.

        Raises
        ------
        BadInput
            A trajectory cannot be trained on, or the main process has failed.
        """
        sampler = self._sampler
        share = handed_out(
            self._processes, None if sampler is None else lambda: self._shares(sampler, task_ids, samples, step)
        )
        return None if share is None else data_proto(share)

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], step: int) -> None:
        """Bring the weights of ``engine.get_per_tensor_param()`` to the engines as version `step`."""
        sampler = self._sampler
        if sampler is None:
            for _ in weights:  # gathers each tensor with the other processes
                pass
            handed_out(self._processes, None)
            return

        def shares() -> list[None]:
            sampler.publish({name: tensor.detach().cpu() for name, tensor in weights}, step)
            return [None] * self._processes.count

        handed_out(self._processes, shares)

    def _shares(self, sampler: TrainerSampler, task_ids: Sequence[str], samples: int, step: int) -> list[Any]:
        found: dict[str, list[TrajectoryRecord]] = {}
        for record in sampler.roll_out(task_ids, samples):
            found.setdefault(record.task_id, []).append(record)
        finished = [
            FinishedGroup(task_id, task_id, records[0].environment, tuple(records))
            for task_id, records in found.items()
        ]
        groups = [group for one in finished if (group := trajectory_group(one, "")) is not None and group.has_variance]
        rows = list(sample_rows(TrainingBatch(step, "", tuple(groups)), self._advantages))
        count = self._processes.count
        if not rows:
            return [None] * count
        columns = verl_columns(rows, self._pad_token_id)
        filled = [*range(len(rows)), *[0] * (-len(rows) % count)]
        filled_columns = {name: column[filled] for name, column in columns.items()}
        for name in ("response_mask", "advantages", "returns", "rm_scores"):
            filled_columns[name][len(rows) :] = 0
        return [{name: column[rank::count] for name, column in filled_columns.items()} for rank in range(count)]
