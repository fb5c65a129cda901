"""The hardware formula against the public measurements that it was fitted to, and its trends."""

from __future__ import annotations

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.cost.hardware import Gpu, ModelShape, all_reduce_s, kv_capacity_tokens

# (profile, TP degree, batch, context tokens per sequence, measured median ms per token)
PUBLIC_POINTS = [
    ("qwen3-8b-h100", 1, 8, 4850, 9.70),
    ("qwen3-8b-h100", 1, 16, 4850, 11.91),
    ("qwen3-8b-h100", 1, 32, 4850, 16.87),
    ("qwen3-8b-h100", 1, 63, 4850, 26.64),
    ("qwen3-8b-h100", 1, 256, 900, 31.36),
    ("qwen3-14b-h100", 1, 8, 4850, 14.42),
    ("qwen3-14b-h100", 1, 16, 4850, 17.34),
    ("qwen3-14b-h100", 1, 32, 4850, 21.55),
    ("qwen3-14b-h100", 1, 59, 4850, 28.07),
    ("qwen3-14b-h100", 1, 128, 900, 26.16),
    ("qwen3-32b-h100", 2, 8, 4850, 16.72),
    ("qwen3-32b-h100", 2, 16, 4850, 19.32),
    ("qwen3-32b-h100", 2, 32, 4850, 25.27),
    ("qwen3-32b-h100", 2, 64, 4850, 32.28),
    ("qwen3-32b-h100", 2, 256, 900, 44.45),
    ("qwen3-32b-h100", 1, 32, 900, 28.81),
]


def _error(point: tuple[str, int, int, int, float]) -> float:
    profile, degree, batch, context, measured_ms = point
    cost = load_profile(profile, degree)
    # Contexts are estimates from output lengths; what is resident cannot exceed what fits.
    resident = min(batch * context, cost.capacity_tokens)
    predicted_ms = 1e3 * cost.decode_token_s(batch, resident)
    return abs(predicted_ms / measured_ms - 1)


def test_profiles_agree_with_public_measurements():
    errors = [_error(point) for point in PUBLIC_POINTS]
    assert max(errors) < 0.12
    assert sum(errors) / len(errors) < 0.045


@pytest.mark.parametrize("profile", ["qwen3-8b-h100", "qwen3-14b-h100", "qwen3-32b-h100"])
def test_more_gpus_decode_faster_and_hold_more(profile):
    costs = [load_profile(profile, degree) for degree in (1, 2, 4, 8)]
    times = [cost.decode_token_s(8, 8 * 5000) for cost in costs]
    room = [cost.capacity_tokens for cost in costs]
    assert times == sorted(times, reverse=True)
    assert room == sorted(room)


def test_small_all_reduce_grows_with_the_degree():
    assert [all_reduce_s(degree) for degree in (1, 2, 4, 8)] == [0.0, 7e-6, 9e-6, 12e-6]


def test_a_model_that_does_not_fit_is_named():
    model = ModelShape(70e9, 140e9, 80, 8192, 327_680)
    gpu = Gpu(989e12, 3.35e12, 80e9, 250e9)
    with pytest.raises(BadInput, match="does not fit on 1 GPUs"):
        kv_capacity_tokens(model, gpu, 1)
    assert kv_capacity_tokens(model, gpu, 4) > 100_000


def test_shapes_refuse_unknown_and_missing_keys():
    with pytest.raises(BadInput, match="unknown key 'color'"):
        Gpu.from_mapping(
            {
                "flops_per_s": 1,
                "memory_bytes_per_s": 1,
                "memory_bytes": 1,
                "link_bytes_per_s": 1,
                "color": 1,
            }
        )
    with pytest.raises(BadInput, match="lacks 'flops_per_s'"):
        Gpu.from_mapping({})
    with pytest.raises(BadInput, match="layers is 0"):
        ModelShape(1, 1, 0, 1, 1)
