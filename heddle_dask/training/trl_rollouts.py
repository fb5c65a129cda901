"""The ``rollout_func`` of TRL's GRPOTrainer (checked with trl 1.16), over a rollout of this package.

TRL calls it with the prompts of one generation, each already repeated for the members of its group, and waits. With
``use_vllm=False`` it corrects for no other policy, so everything must be sampled by the weights that it trains
(alpha = 0): whenever ``trainer.state.global_step`` has changed, the weights are published, and the rollout begins when
the engines have installed them.

TRL takes one sequence for each prompt: tokens before the first sampled one are its prompt, the others its completion,
where ``env_mask`` is 0 for those that no policy sampled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.group_records import training_trajectory
from heddle_dask.training.groups import TokenSequence, TrainingTrajectory
from heddle_dask.training.trainable_sampling import check_trainable_sampling

REWARD_FIELD = "environment_reward"

RollOut = Callable[[Sequence[str], int], Iterable[TrajectoryRecord]]
"""``roll_out(task_ids, samples)``: that many attempts at each of these tasks, in any order, failed ones included."""


class PolicyPublisher(Protocol):
    """Brings the weights of a trainer to the engines."""

    def publish(self, model: Any, step: int) -> None:
        """Publish the weights of `model` as version `step`; returns when all engines sample with them."""
        ...


class TrlRollouts:
    """Give it to ``GRPOTrainer(rollout_func=…, reward_funcs=environment_reward)``, with `trl_prompts` as the dataset.

    Parameters
    ----------
    roll_out
        Rolls tasks out; its engines were started with the weights with which the trainer begins.
    publisher
        Called when an optimiser step has changed the weights.
    temperature
        With which `roll_out` samples; TRL divides by its own, which must be the same.
    """

    def __init__(self, roll_out: RollOut, publisher: PolicyPublisher, temperature: float = 1.0) -> None:
        check_trainable_sampling("TRL", temperature=temperature)
        self._roll_out = roll_out
        self._publisher = publisher
        self._temperature = temperature
        self._step: int | None = None
        self._version = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """One sequence for each prompt, in their order.

        An attempt without a reward is trained on no token, and its reward is None: TRL leaves it out of the mean and
        the spread of its group.

        Returns
        -------
        dict
            ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask`` and `REWARD_FIELD`.

        Raises
        ------
        BadInput
            TRL samples or divides in another way than the engines, or a trajectory cannot be trained on.
        """
        if self._step is None:
            self._check(trainer)
            self._step = trainer.state.global_step
        elif trainer.state.global_step != self._step:
            self._step = self._version = trainer.state.global_step
            self._publisher.publish(trainer.accelerator.unwrap_model(trainer.model), self._step)
        attempts = self._attempts(prompts)
        rows = [{**self._row(record), REWARD_FIELD: record.reward} for record in attempts]
        return {name: [row[name] for row in rows] for name in rows[0]}

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
            records = sorted(self._roll_out(task_ids, count), key=lambda one: (one.task_id, one.sample_index))
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
