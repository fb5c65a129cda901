"""The ``rollout_func`` of TRL's GRPOTrainer (checked with trl 1.16), over a rollout of this package.

TRL calls it with the prompts of one generation, each already repeated for the members of its group, and waits. With
``use_vllm=False`` it corrects for no other policy, so everything must be sampled by the weights that it trains
(alpha = 0): whenever ``trainer.state.global_step`` has changed, or is not 0 at first (the trainer goes on from a
checkpoint), the weights are published, and the rollout begins when the engines have installed them.

TRL takes one sequence for each prompt: tokens before the first sampled one are its prompt, the others its completion,
where ``env_mask`` is 0 for those that no policy sampled.

Where TRL trains in several processes, each calls with the prompts of its share. The main one rolls out all of them and
hands each process its rows; no other has a cluster.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.group_records import training_trajectory
from heddle_dask.training.groups import TokenSequence, TrainingTrajectory
from heddle_dask.training.trainable_sampling import check_trainable_sampling
from heddle_dask.training.trainer_processes import OneProcess, TrainerProcesses, TrainerSampler, handed_out

REWARD_FIELD = "environment_reward"
_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


class TrlRollouts:
    """Give it to ``GRPOTrainer(rollout_func=…, reward_funcs=environment_reward)``, with `trl_prompts` as the dataset.

    Parameters
    ----------
    sampler
        Its engines were started with the model with which the trainer begins at step 0. None in the processes that
        only receive.
    processes
        How the processes of the trainer reach each other.
    """

    def __init__(self, sampler: TrainerSampler | None, processes: TrainerProcesses | None = None) -> None:
        self._main = None if sampler is None else _MainProcess(sampler)
        self._processes = processes or OneProcess()
        self._step = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """One sequence for each prompt of this process, in their order.

        An attempt without a reward is trained on no token, and its reward is None: TRL leaves it out of the mean and
        the spread of its group.

        Returns
        -------
        dict
            ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask`` and `REWARD_FIELD`.

        Raises
        ------
        BadInput
            TRL samples or divides in another way than the engines, a trajectory cannot be trained on, or the main
            process has failed.
        """
        step = trainer.state.global_step
        weights: Mapping[str, Any] | None = None
        if step != self._step:
            weights = whole_weights(trainer)
        self._step = step
        asked = self._processes.gather(list(prompts))
        main = self._main
        share = handed_out(self._processes, None if main is None else lambda: main.shares(asked, weights, trainer))
        return {name: [row[name] for row in share] for name in (*_COLUMNS, REWARD_FIELD)}


class _MainProcess:
    """What the process with the engines does for all: publish, roll out, and turn attempts into rows."""

    def __init__(self, sampler: TrainerSampler) -> None:
        check_trainable_sampling("TRL", temperature=sampler.temperature)
        self._sampler = sampler
        self._temperature = sampler.temperature
        self._checked = False
        self._version = 0

    def shares(
        self, asked: list[list[str]], weights: Mapping[str, Any] | None, trainer: Any
    ) -> list[list[dict[str, Any]]]:
        """Rows for the prompts of each process; `weights`: those to sample with from now on."""
        if not self._checked:
            self._check(trainer)
            self._checked = True
        if weights is not None:
            self._version = trainer.state.global_step
            self._sampler.publish(weights, self._version)
        attempts = iter(self._attempts([prompt for prompts in asked for prompt in prompts]))
        rows = ({**self._row(record), REWARD_FIELD: record.reward} for record in attempts)
        return [[next(rows) for _ in prompts] for prompts in asked]

    def _check(self, trainer: Any) -> None:
        args = trainer.args
        if getattr(trainer, "use_vllm", False):
            raise BadInput("TRL: use_vllm is True: leave it False, for the engines are those of the rollout")
        check_trainable_sampling(
            "TRL",
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        if args.temperature != self._temperature:
            raise BadInput(
                f"TRL: temperature is {args.temperature:g}, and the engines sample with {self._temperature:g}: use one"
            )

    def _attempts(self, prompts: Sequence[str]) -> list[TrajectoryRecord]:
        by_count: dict[int, list[str]] = {}
        for task_id, count in Counter(prompts).items():
            by_count.setdefault(count, []).append(task_id)
        found: dict[str, deque[TrajectoryRecord]] = {}
        for count, task_ids in by_count.items():
            records = sorted(self._sampler.roll_out(task_ids, count), key=lambda one: (one.task_id, one.sample_index))
            for record in records:
                found.setdefault(record.task_id, deque()).append(record)
        missing = sorted(task for task, count in Counter(prompts).items() if len(found.get(task, ())) != count)
        if missing:
            raise BadInput(f"TRL: the rollout did not give one attempt for each prompt of task {missing[0]}")
        return [found[task_id].popleft() for task_id in prompts]

    def _row(self, record: TrajectoryRecord) -> dict[str, Any]:
        member = training_trajectory(record)
        if member is None:
            return _untrained_row(record)
        (sequence,) = self._single(member)
        first = int(np.argmax(sequence.trained))
        completion = sequence.trained[first:]
        return {
            "prompt_ids": sequence.token_ids[:first].tolist(),
            "completion_ids": sequence.token_ids[first:].tolist(),
            "logprobs": np.where(completion, sequence.logprobs[first:], np.float32(0.0)).tolist(),
            "env_mask": completion.astype(int).tolist(),
        }

    def _single(self, member: TrainingTrajectory) -> tuple[TokenSequence, ...]:
        where = f"trajectory {member.trajectory_id}"
        if len(member.sequences) != 1:
            raise BadInput(
                f"{where} has {len(member.sequences)} branches: TRL takes one sequence; use an agent that does not fork"
            )
        (one,) = member.sequences
        versions = np.unique(one.policy_versions[one.trained])
        if versions.tolist() != [self._version]:
            raise BadInput(
                f"{where} was sampled by versions {versions.tolist()} and is trained on {self._version}: TRL corrects "
                "for no other policy; begin no rollout before the engines have the new weights"
            )
        temperatures = np.unique(one.temperatures[one.trained])
        if temperatures.tolist() != [np.float32(self._temperature)]:
            raise BadInput(f"{where} was sampled at temperature {temperatures[0]:g}: TRL takes {self._temperature:g}")
        return member.sequences


def whole_weights(trainer: Any) -> Mapping[str, Any]:
    """The weights of a trainer of transformers, adapters merged, named as in the files of its base model.

    For all its processes at once: where the model is sharded, each has a piece; the main one gets the whole.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "merge_adapter"):
        found: Mapping[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        return found
    model.merge_adapter()
    try:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        # Of its own, for the adapters are taken out again.
        return {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): one.detach().cpu().clone()
            for name, one in state.items()
            if model.prefix not in name
        }
    finally:
        model.unmerge_adapter()


def trl_prompts(task_ids: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a TRL dataset: the prompt is the id of a task, for the environment renders the real one."""
    return [{"prompt": task_id} for task_id in task_ids]


def environment_reward(
    prompts: Sequence[Any], completions: Sequence[Any], **fields: Sequence[float | None]
) -> list[float | None]:
    """TRL's reward function: the rewards that the environment gave; None: unknown."""
    return list(fields[REWARD_FIELD])


def _untrained_row(record: TrajectoryRecord) -> dict[str, Any]:
    ids = record.branches[0].token_ids[:2].tolist() if record.branches else []
    first, second = [*ids, 0, 0][:2]
    return {"prompt_ids": [first], "completion_ids": [second], "logprobs": [0.0], "env_mask": [0]}
