"""The split of GPUs between trainer and rollout: brute force, tables and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.gpu_split import best_split, scaling_law, seconds_between

_SECONDS = st.floats(0.01, 1e4)


@given(
    gpus=st.integers(2, 40),
    train=st.tuples(_SECONDS, _SECONDS),
    roll=st.tuples(_SECONDS, _SECONDS),
    unit=st.integers(1, 4),
    overlap=st.sampled_from(["sync", "async"]),
    update_s=st.floats(0, 10),
)
def test_no_other_split_is_faster(
    gpus: int, train: tuple[float, float], roll: tuple[float, float], unit: int, overlap: str, update_s: float
) -> None:
    def trainer(n: int) -> float:
        return train[0] + train[1] / n

    def rollout(n: int) -> float:
        return roll[0] + roll[1] / n

    feasible = [t for t in range(1, gpus) if (gpus - t) // unit]
    if not feasible:
        with pytest.raises(BadInput, match="leave none for the rollout"):
            best_split(gpus, trainer, rollout, trainer_choices=range(1, gpus), rollout_unit=unit)
        return
    best, tried = best_split(
        gpus,
        trainer,
        rollout,
        trainer_choices=range(gpus + 3),
        rollout_unit=unit,
        overlap=overlap,  # type: ignore[arg-type]
        update_s=update_s,
    )
    by_hand = []
    for t in feasible:
        r = (gpus - t) // unit * unit
        times = (trainer(t), rollout(r))
        by_hand.append((sum(times) if overlap == "sync" else max(times)) + update_s)
    assert len(tried) == len(feasible)
    assert best.step_s == min(by_hand)
    assert best.trainer_gpus == feasible[by_hand.index(min(by_hand))], "of equal ones the smallest trainer"
    assert best.trainer_wait_s == pytest.approx(best.step_s - trainer(best.trainer_gpus))
    assert 0 <= best.trainer_wait_share <= 1


@given(st.dictionaries(st.integers(1, 512), _SECONDS, min_size=1, max_size=5), st.integers(1, 1024))
def test_points_are_met_and_nothing_scales_better_than_proportionally_outside(
    known: dict[int, float], gpus: int
) -> None:
    seconds = seconds_between(known)
    for count, value in known.items():
        assert seconds(count) == pytest.approx(value)
    last = max(known)
    if gpus > last:
        assert seconds(gpus) >= known[last] * last / gpus * (1 - 1e-9)


def test_trainer_seconds_are_a_table_or_a_law() -> None:
    assert scaling_law("5+960/gpus")(8) == 125.0
    assert scaling_law("960/gpus")(16) == 60.0
    assert scaling_law("8=120,16=60")(32) == pytest.approx(30.0)
    for wrong in ("fast", "5+x/gpus", "8=", "5/8", "-1/gpus", "8=0", "0=3"):
        with pytest.raises(BadInput) as raised:
            scaling_law(wrong)
        assert "\n" not in str(raised.value)
