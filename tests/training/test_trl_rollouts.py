"""What TRL's rollout function returns, and what it refuses. TRL itself runs in tests/pipelines/test_trl.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.training_builders import sampled_step, trained_record

from heddle_dask.core.errors import BadInput
from heddle_dask.training.trl_rollouts import REWARD_FIELD, TrlRollouts, environment_reward, trl_prompts


class Sampled:
    """Engines that give what a function rolls out, and note what was published."""

    def __init__(self, roll_out: Any, temperature: float = 1.0) -> None:
        self.roll_out = roll_out
        self.temperature = temperature
        self.published: list[tuple[Any, int]] = []

    def publish(self, weights: Any, step: int) -> None:
        self.published.append((weights, step))


def rollouts_of(roll_out: Any, temperature: float = 1.0) -> TrlRollouts:
    return TrlRollouts(Sampled(roll_out, temperature))


def trainer(step: int = 0, **changes: Any) -> Any:
    """The part of a GRPOTrainer that the function reads."""
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(
        args=SimpleNamespace(**args | changes),
        use_vllm=False,
        state=SimpleNamespace(global_step=step),
        model="model",
        model_wrapped="pieces",
        accelerator=SimpleNamespace(get_state_dict=lambda model: f"all {model}", unwrap_model=lambda model: model),
    )


def attempt(task_id: str, index: int, reward: float | None = 1.0, **options: Any):
    return replace(
        trained_record(f"{task_id}/{index}", task_id, reward, **options), task_id=task_id, sample_index=index
    )


def test_rows_come_in_the_order_of_the_prompts():
    asked = []

    def roll_out(task_ids, samples):
        asked.append((list(task_ids), samples))
        for task_id in reversed(task_ids):
            for index in range(samples):
                yield attempt(task_id, index, float(index), versions=(0, 0), tokens=2)

    rows = rollouts_of(roll_out)(["a", "a", "b", "b"], trainer())
    assert asked == [(["a", "b"], 2)]
    assert rows[REWARD_FIELD] == [0.0, 1.0, 0.0, 1.0]
    assert rows["prompt_ids"] == [[1, 2, 3]] * 4
    assert rows["completion_ids"] == [[10, 11, 7, 8, 10, 11]] * 4
    assert rows["env_mask"] == [[1, 1, 0, 0, 1, 1]] * 4
    assert rows["logprobs"] == [[-0.25, -0.5, 0.0, 0.0, -0.25, -0.5]] * 4
    assert environment_reward(["a"], ["x"], **{REWARD_FIELD: [0.5]}, other=[1]) == [0.5]
    assert trl_prompts(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]


def test_prompts_that_are_repeated_unequally():
    rolled: list[tuple[tuple[str, ...], int]] = []

    def roll_out(task_ids, samples):
        rolled.append((tuple(task_ids), samples))
        return [attempt(task_id, index) for task_id in task_ids for index in range(samples)]

    rows = rollouts_of(roll_out)(["a", "b", "a"], trainer())
    assert sorted(rolled) == [(("a",), 2), (("b",), 1)]
    assert len(rows["prompt_ids"]) == 3


def test_weights_are_published_when_the_step_has_changed_and_before_the_rollout():
    version = 0

    def roll_out(task_ids, samples):
        return [attempt(task_id, index, versions=(version,)) for task_id in task_ids for index in range(samples)]

    engines = Sampled(roll_out)
    rollouts = TrlRollouts(engines)
    rollouts(["a", "a"], trainer(0))
    rollouts(["a", "a"], trainer(0))
    assert engines.published == []
    version = 2
    rollouts(["a", "a"], trainer(2))
    assert engines.published == [("all pieces", 2)]
    with pytest.raises(BadInput, match=r"trajectory a/0 was sampled by versions \[2\] and is trained on 3"):
        rollouts(["a", "a"], trainer(3))


class Threads:
    """Implements `TrainerProcesses` for two threads."""

    count = 2

    def __init__(self, rank: int, ways: list[Queue[Any]]) -> None:
        self._rank = rank
        self._to_main, self._from_main = ways

    def gather(self, mine: list[str]) -> list[list[str]]:
        if self._rank:
            self._to_main.put(mine)
            return []
        return [mine, self._to_main.get(timeout=60)]

    def scatter(self, shares: Any) -> Any:
        if self._rank:
            return self._from_main.get(timeout=60)
        self._from_main.put(shares[1])
        return shares[0]


def test_a_process_without_engines_gets_its_own_rows_or_the_error_of_the_main_one():
    def roll_out(task_ids, samples):
        if version:
            raise BadInput("the engines\nare gone")
        return [attempt(task_id, index, float(index)) for task_id in task_ids for index in range(samples)]

    version = 0
    ways: list[Queue[Any]] = [Queue(), Queue()]
    engines = Sampled(roll_out)
    main = TrlRollouts(engines, Threads(0, ways))
    other = TrlRollouts(None, Threads(1, ways))
    with ThreadPoolExecutor(1) as thread:
        # A group may be in several shares.
        theirs = thread.submit(other, ["a", "b", "b"], trainer())
        assert main(["a", "a", "a"], trainer())[REWARD_FIELD] == [0.0, 1.0, 2.0]
        assert theirs.result()[REWARD_FIELD] == [3.0, 0.0, 1.0]
        version = 1
        theirs = thread.submit(other, ["b"], trainer(1))
        with pytest.raises(BadInput, match=r"^the engines"):
            main(["a"], trainer(1))
        with pytest.raises(BadInput, match=r"^the main process of the trainer has failed: the engines are gone$"):
            theirs.result()
    assert engines.published == [("all pieces", 1)]


def test_a_trainer_that_goes_on_from_a_checkpoint_publishes_before_its_first_rollout():
    engines = Sampled(lambda tasks, samples: [attempt("a", n, versions=(40,)) for n in range(2)])
    TrlRollouts(engines)(["a", "a"], trainer(40))
    assert engines.published == [("all pieces", 40)]


def test_a_failed_attempt_is_not_trained_and_changes_no_advantage():
    def roll_out(task_ids, samples):
        return [attempt("a", 0, None), attempt("a", 1, 0.25), attempt("a", 2, 0.75)]

    rows = rollouts_of(roll_out)(["a"] * 3, trainer())
    assert rows[REWARD_FIELD] == [None, 0.25, 0.75]
    assert rows["env_mask"] == [[0], [1] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.7}, "temperature is 0.7, and the engines sample with 1"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 50}, "top_k is 50"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
    ],
)
def test_another_way_of_sampling_is_refused(changes, said):
    rollouts = rollouts_of(lambda tasks, samples: [])
    with pytest.raises(BadInput, match=f"TRL: {said}"):
        rollouts(["a"], trainer(**changes))


def test_what_trl_cannot_take_is_refused():
    forked = attempt("a", 0)
    branch = forked.branches[0].shared()
    branch.append_sampled([50], [-1.0], 0)
    step = sampled_step(1, len(branch) - 1, len(branch), branch=1)
    forked = replace(forked, branches=(*forked.branches, branch), steps=(*forked.steps, step))
    with pytest.raises(BadInput, match="trajectory a/0 has 2 branches"):
        rollouts_of(lambda tasks, samples: [forked])(["a"], trainer())
    with pytest.raises(BadInput, match="one attempt for each prompt of task a"):
        rollouts_of(lambda tasks, samples: [])(["a"], trainer())
    with pytest.raises(BadInput, match=r"sampled at temperature 0\.5: TRL takes 1"):
        rollouts_of(lambda tasks, samples: [attempt("a", 0, temperature=0.5)])(["a"], trainer())
    own_engines = trainer()
    own_engines.use_vllm = True
    with pytest.raises(BadInput, match="use_vllm is True: leave it False"):
        rollouts_of(lambda tasks, samples: [])(["a"], own_engines)
    with pytest.raises(BadInput, match="temperature is 0"):
        rollouts_of(lambda tasks, samples: [], temperature=0.0)
