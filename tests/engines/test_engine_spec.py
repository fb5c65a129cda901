"""Engine specs travel by pickle and JSON, and say what is wrong with them."""

from __future__ import annotations

import json
import pickle

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.kv_bytes import kv_bytes_per_token
from heddle_dask.engines.spec import EngineSpec

SPEC = EngineSpec(
    "emulated",
    "none",
    8,
    4096,
    extra_args=("--x", "1"),
    cost={"profile": "tiny-cpu"},
    faults={"slow_factor": 2},
    emulation={"end_token_id": 3},
    kv_transfer=True,
)


def test_specs_survive_pickle_and_json():
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC
    assert EngineSpec.from_mapping(json.loads(json.dumps(SPEC.to_mapping()))) == SPEC


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sglang"}, "engine kind 'sglang' is unknown: use vllm or emulated"),
        ({"model": ""}, "model is empty"),
        ({"slots": 0}, "slots is 0: use a whole number of at least 1"),
        ({"slots": 2.5}, "slots is 2.5"),
        ({"tp_degree": True}, "tp_degree is True"),
        ({"time_scale": 0}, "time_scale is 0"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib is nan"),
        ({"kv_transfer": 1}, "kv_transfer is 1: use true or false"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_impossible_specs_are_named(changes, message):
    with pytest.raises(BadInput, match=message):
        EngineSpec.from_mapping({**SPEC.to_mapping(), **changes})


def test_what_must_be_given_is_named():
    with pytest.raises(BadInput, match="lacks model, slots, max_model_len"):
        EngineSpec.from_mapping({"kind": "vllm"})


def test_the_kv_cache_of_a_token_is_as_large_as_the_model_or_the_emulation_says(model_dir: str) -> None:
    # Keys and values, 4 layers, 2 heads of 32 numbers, 4 bytes each.
    assert kv_bytes_per_token(EngineSpec("vllm", model_dir, 8, 4096)) == 2 * 4 * 2 * 32 * 4
    assert kv_bytes_per_token(EngineSpec("vllm", "a/name-on-a-hub", 8, 4096)) == 0.0
    emulation = {"kv_bytes_per_token": 1000}
    assert kv_bytes_per_token(EngineSpec("emulated", model_dir, 8, 4096, emulation=emulation)) == 1000.0
