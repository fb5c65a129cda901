"""Published models and GPUs, shapes from config.json, TP degrees, mixtures of experts."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost, cost_from_mapping, engine_cost_for, load_profile
from heddle_dask.cost.hardware import (
    ModelShape,
    allowed_degrees,
    check_degree,
    kv_capacity_tokens,
)
from heddle_dask.cost.model_config import read_shape
from heddle_dask.cost.published import _constants, gpu_called, gpu_names, gpu_of, model_of
from scripts.public_points import public_points, table_lines

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}

models = st.sampled_from(sorted(_constants("models"))).map(model_of)
gpus = st.sampled_from(gpu_names()).map(gpu_of)


def fitting_degrees(model, gpu):
    """The TP degrees at which an engine has room for KV."""
    fitting = []
    for degree in allowed_degrees(model):
        with suppress(BadInput):
            kv_capacity_tokens(model, gpu, degree)
            fitting.append(degree)
    return fitting


# -- published figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_weights_counted_from_the_configuration_are_those_of_the_hub(name, parameters):
    assert model_of(name).parameters == parameters
    assert model_of(name.upper()) == model_of(name)


def test_the_mixture_of_experts_has_three_billion_active_weights():
    shape = model_of("qwen3-30b-a3b")
    assert 3.2e9 < shape.active_parameters < 3.4e9
    assert 0.93 < shape.expert_bytes / shape.weight_bytes < 0.96
    assert (shape.experts, shape.experts_per_token) == (128, 8)


def test_every_name_has_a_source():
    assert set(gpu_names()) == {"a100-80g", "h100", "h200", "h800", "h20"}
    assert all(len(each["source"]) > 20 for kind in ("gpus", "models") for each in _constants(kind).values())


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L4", None),
        ("", None),
    ],
)
def test_only_cards_with_published_figures_are_known_by_what_the_driver_calls_them(called, name):
    assert gpu_called(called) == (None if name is None else gpu_of(name))


@pytest.mark.parametrize("size", ["8b", "14b", "32b"])
def test_named_models_on_h100_are_the_shipped_profiles(size):
    named, profile = engine_cost_for(f"qwen3-{size}", "h100", 2), load_profile(f"qwen3-{size}-h100", 2)
    assert named.decode_token_s(32, 160_000) == pytest.approx(profile.decode_token_s(32, 160_000), rel=1e-3)
    assert named.capacity_tokens == pytest.approx(profile.capacity_tokens, rel=1e-3)


def test_the_formula_stays_within_the_stated_error_of_the_public_points():
    errors = [abs(point.error) for point in public_points()]
    assert len(errors) == 16
    assert max(errors) < 0.09
    assert sum(errors) / len(errors) < 0.035


def test_the_page_shows_the_table_that_the_command_prints():
    page = (Path(__file__).parents[2] / "benchmarks" / "cost_check.md").read_text(encoding="utf-8")
    assert "\n".join(table_lines()) in page


# -- trends ----------------------------------------------------------------------------------------------


@given(models, gpus)
@settings(deadline=None)
def test_more_gpus_never_hold_less_context_nor_decode_slower_alone(model, gpu):
    degrees = fitting_degrees(model, gpu)
    room = [kv_capacity_tokens(model, gpu, degree) for degree in degrees]
    assert room == sorted(room)
    if not model.experts:
        times = [engine_cost_for(model, gpu, degree).decode_token_s(1, 4000) for degree in degrees]
        assert times == sorted(times, reverse=True)


@given(models, gpus, st.integers(1, 300), st.integers(0, 200), st.integers(0, 400_000), st.integers(0, 400_000))
def test_a_token_takes_longer_in_a_larger_batch_and_with_more_context(model, gpu, batch, more, context, further):
    for degree in fitting_degrees(model, gpu):
        cost = engine_cost_for(model, gpu, degree)
        base = cost.decode_token_s(batch, context)
        assert cost.decode_token_s(batch + more, context) >= base
        assert cost.decode_token_s(batch, context + further) >= base


def test_copies_of_kv_heads_take_room_and_time():
    shape = model_of("qwen3-30b-a3b")
    gpu = gpu_of("h100")
    assert [shape.kv_copies(degree) for degree in (1, 2, 4, 8)] == [1, 1, 1, 2]
    four, eight = (engine_cost_for(shape, gpu, degree) for degree in (4, 8))
    assert eight.context_token_s == pytest.approx(four.context_token_s)
    assert eight.capacity_tokens < 1.5 * four.capacity_tokens


# -- mixture of experts ----------------------------------------------------------------------------------


def test_distinct_experts_are_those_of_random_choices():
    shape, rng = model_of("qwen3-30b-a3b"), random.Random(7)
    for tokens in (1, 4, 16, 64):
        seen = [len({expert for _ in range(tokens) for expert in rng.sample(range(128), 8)}) for _ in range(400)]
        assert shape.distinct_experts(tokens) == pytest.approx(sum(seen) / len(seen), rel=0.02)


@given(st.integers(1, 500))
@settings(deadline=None)
def test_a_batch_reads_the_weights_of_the_experts_that_it_visits(batch):
    model, gpu = model_of("qwen3-30b-a3b"), gpu_of("h200")
    cost = engine_cost_for(model, gpu)
    visited = model.distinct_experts(batch) / model.experts
    read_bytes = model.weight_bytes - model.expert_bytes * (1 - visited)
    launch_s = 0.5e-3 + model.layers * 20e-6
    multiplied_s = batch * (2 * model.active_parameters / (0.7 * gpu.flops_per_s) + 25e-6)
    expected = launch_s + multiplied_s + read_bytes / (0.8 * gpu.memory_bytes_per_s)
    assert cost.decode_token_s(batch, 0) == pytest.approx(expected)


def test_a_sparse_model_is_quick_alone_and_dense_in_a_large_batch():
    sparse, dense = engine_cost_for("qwen3-30b-a3b", "h200"), engine_cost_for("qwen3-32b", "h200")
    assert sparse.decode_token_s(1, 0) < 0.25 * dense.decode_token_s(1, 0)
    assert sparse.decode_token_s(256, 0) > 0.6 * dense.decode_token_s(1, 0)


@given(st.integers(1, 64), st.integers(0, 200), st.integers(0, 3000))
@settings(deadline=None)
def test_spans_of_a_sparse_model_are_sums_of_iterations(batch, count, context):
    cost = engine_cost_for("qwen3-30b-a3b", "h100")
    total = sum(cost.iteration_s(batch, context + i * batch) for i in range(count))
    assert cost.span_s(count, batch, context) == pytest.approx(total)
    assert abs(cost.iterations_within(total * (1 + 1e-9), batch, context) - count) <= 1


def test_impossible_expert_terms_are_refused():
    with pytest.raises(BadInput, match=r"spared_s is 2\.0: use at most fixed_s"):
        EngineCost(fixed_s=1.0, spared_s=2.0, expert_share=0.1)
    with pytest.raises(BadInput, match=r"expert_share is 1\.5"):
        EngineCost(fixed_s=1.0, spared_s=0.5, expert_share=1.5)


# -- config.json -----------------------------------------------------------------------------------------


def model_in(directory: Path, config: object) -> str:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def test_a_llama_configuration(tmp_path):
    shape = read_shape(model_in(tmp_path, LLAMA))
    # Heads of 8 dimensions, as many for keys; two tables of tokens.
    assert shape.parameters == 3 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64 + 2 * 100 * 64
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.kv_bytes_per_token == 3 * 2 * 64 * 2
    assert (shape.heads, shape.kv_heads, shape.experts, shape.active_parameters) == (8, 8, 0, 0)
    assert model_of(str(tmp_path)) == shape


def test_a_configuration_of_experts_with_a_dense_layer(tmp_path):
    shape = read_shape(model_in(tmp_path, MOE))
    attention = 64 * 16 * (2 * 8 + 2 * 2) + 2 * 16 + 2 * 64
    experts = 2 * 16 * 3 * 64 * 32
    outside = 3 * attention + 3 * 64 * 160 + 2 * 64 * 16 + 64 + 100 * 64
    assert shape.parameters == outside + experts
    assert shape.active_parameters == outside + experts // 4
    assert shape.expert_bytes == 2 * experts


def test_the_shipped_model_has_as_many_weights_as_its_file(model_dir):
    with (Path(model_dir) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stored = sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    assert read_shape(model_dir).parameters == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is unknown: use llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"torch_dtype": "int3"}, "type 'int3' of the weights is unknown"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not modelled"),
        ({"use_sliding_window": True}, "sliding-window attention is not modelled"),
    ],
)
def test_configurations_that_cannot_be_modelled_are_named(tmp_path, change, message):
    with pytest.raises(BadInput, match=message) as refused:
        read_shape(model_in(tmp_path, {**LLAMA, **change}))
    assert "\n" not in str(refused.value)


def test_dense_layers_that_are_no_list_are_named(tmp_path):
    with pytest.raises(BadInput, match="mlp_only_layers is 3: give a list of layer numbers"):
        read_shape(model_in(tmp_path, {**MOE, "mlp_only_layers": 3}))


def test_directories_without_a_configuration_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        read_shape(tmp_path)
    with pytest.raises(BadInput, match="is no JSON object"):
        read_shape(model_in(tmp_path, [1]))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInput, match="is no JSON"):
        read_shape(tmp_path)


# -- degrees and what fits -------------------------------------------------------------------------------


@given(st.integers(1, 16), st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.integers(1, 24))
@settings(deadline=None)
def test_a_degree_is_allowed_just_where_every_gpu_gets_whole_heads(kv_heads, per_kv, degree):
    heads = kv_heads * per_kv
    shape = ModelShape(1e9, 2e9, 10, 1024, 1000, heads=heads, kv_heads=kv_heads)
    even = heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    assert (degree in allowed_degrees(shape, (degree,))) is even
    if even:
        check_degree(shape, degree)
    else:
        with pytest.raises(BadInput, match=f"TP degree {degree}"):
            check_degree(shape, degree)


def test_a_degree_that_does_not_divide_the_heads_names_those_that_do():
    with pytest.raises(BadInput, match="TP degree 3 does not divide the model's 40 attention heads: use 1, 2, 4, 8"):
        engine_cost_for("qwen3-14b", "h100", 3)
    with pytest.raises(BadInput, match="TP degree 0 is none"):
        engine_cost_for("qwen3-14b", "h100", 0)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"model": "qwen9", "gpu": "h100"}, "model 'qwen9' is unknown: use qwen3-14b"),
        ({"model": "qwen3-8b", "gpu": "tpu"}, "GPU 'tpu' is unknown: use a100-80g"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(mapping, message):
    with pytest.raises(BadInput, match=message):
        cost_from_mapping(mapping)


def test_names_are_a_form_of_a_cost(tmp_path):
    assert cost_from_mapping({"model": "qwen3-8b", "gpu": "h20"}, 4) == engine_cost_for("qwen3-8b", "h20", 4)
    directory = model_in(tmp_path, LLAMA)
    assert cost_from_mapping({"model": directory, "gpu": "h20"}) == engine_cost_for(read_shape(directory), "h20")


def test_shapes_whose_parts_exceed_the_whole_are_refused():
    with pytest.raises(BadInput, match="active_parameters is 2: use at most parameters"):
        ModelShape(1, 1, 1, 1, 1, active_parameters=2)
