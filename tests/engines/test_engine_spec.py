"""Engine specs travel by pickle and JSON, and say what is wrong with them."""

from __future__ import annotations

import json
import pickle

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.engines.vllm_command import VllmOptions

SPEC = EngineSpec(
    "emulated",
    "none",
    8,
    4096,
    kv_transfer=True,
    options=EmulatedOptions(cost={"profile": "tiny-cpu"}, faults={"slow_factor": 2}, emulation={"end_token_id": 3}),
)
REAL = EngineSpec("vllm", "none", 8, 4096, options=VllmOptions(extra_args=("--x", "1"), cpu_threads=2))


def test_specs_survive_pickle_and_json():
    for spec in (SPEC, REAL):
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert EngineSpec.from_mapping(json.loads(json.dumps(spec.to_mapping()))) == spec


def test_options_not_given_are_those_of_the_kind():
    assert EngineSpec("vllm", "none", 8, 4096).options == VllmOptions()
    assert EngineSpec.from_mapping({"kind": "emulated", "model": "m", "slots": 1, "max_model_len": 9}).options == (
        EmulatedOptions()
    )


def test_options_of_another_kind_are_refused():
    with pytest.raises(BadInput, match="options are EmulatedOptions: vllm takes VllmOptions"):
        EngineSpec("vllm", "none", 8, 4096, options=EmulatedOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sglang"}, "engine kind 'sglang' is unknown: use vllm or emulated"),
        ({"model": ""}, "model is empty"),
        ({"slots": 0}, "slots is 0: use a whole number of at least 1"),
        ({"slots": 2.5}, "slots is 2.5"),
        ({"tp_degree": True}, "tp_degree is True"),
        ({"options": {"time_scale": 0}}, "time_scale is 0"),
        ({"kind": "vllm", "options": {"kv_cache_gib": float("nan")}}, "kv_cache_gib is nan"),
        ({"kind": "vllm", "options": {"cpu_threads": 0}}, "cpu_threads is 0: use a whole number"),
        (
            {"options": {"extra_args": ["--x"]}},
            "unknown key 'extra_args': use cost, faults, time_scale, emulation, script",
        ),
        ({"kv_transfer": 1}, "kv_transfer is 1: use true or false"),
        ({"tcp": "yes"}, "tcp is 'yes': use true or false"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_impossible_specs_are_named(changes, message):
    with pytest.raises(BadInput, match=message):
        EngineSpec.from_mapping({**SPEC.to_mapping(), **changes})


def test_what_must_be_given_is_named():
    with pytest.raises(BadInput, match="lacks model"):
        EngineSpec.from_mapping({"kind": "vllm"})


def test_the_kv_cache_of_a_token_is_as_large_as_the_model_or_the_emulation_says(model_dir: str) -> None:
    def kv_bytes_per_token(spec: EngineSpec) -> float:
        return engine_kind(spec.kind).kv_bytes_per_token(spec)

    # Keys and values, 4 layers, 2 heads of 32 numbers, 4 bytes each.
    assert kv_bytes_per_token(EngineSpec("vllm", model_dir, 8, 4096)) == 2 * 4 * 2 * 32 * 4
    assert kv_bytes_per_token(EngineSpec("vllm", "a/name-on-a-hub", 8, 4096)) == 0.0
    told = EmulatedOptions(emulation={"kv_bytes_per_token": 1000})
    assert kv_bytes_per_token(EngineSpec("emulated", model_dir, 8, 4096, options=told)) == 1000.0
