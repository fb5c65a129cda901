"""What engines get of a GPU's memory, and what they cost there, with a written answer of ``nvidia-smi``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import cost_from_mapping, engine_cost_for
from heddle_dask.engines import vllm_command as command_line
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.contract import EngineInfo
from heddle_dask.engines.gpu_memory import model_memory, smallest_card_bytes, with_own_share
from heddle_dask.engines.gpus import parsed_gpus
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.engines.vllm_command import VllmOptions, vllm_command, vllm_options
from heddle_dask.live.worker.engine_description import described_engine
from heddle_dask.profiling.engines import on_gpus_of_their_own

H100 = parsed_gpus("0, NVIDIA H100 80GB HBM3, 81559, 12\n1, NVIDIA L4, 23034, 0\n")
QWEN3_1B7 = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "qwen3-1.7b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3_1B7))
    return str(path)


def arguments(spec: EngineSpec) -> dict[str, str]:
    argv = vllm_command(spec, EngineAddress("/run/e.sock"), "gpu").argv
    names = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
    return {argv[at]: argv[at + 1] for at in range(len(argv) - 1) if argv[at] in names}


def test_two_engines_on_a_card_have_halves_with_a_stated_kv_cache(model: str) -> None:
    spec = with_own_share(EngineSpec("vllm", model, devices=("0",), engines_per_gpu=2), H100)
    weights = model_memory(model).weight_bytes
    assert 3.4e9 < weights < 3.5e9
    kv_bytes = int(arguments(spec)["--kv-cache-memory-bytes"])
    assert arguments(spec)["--gpu-memory-utilization"] == "0.45"
    assert kv_bytes == pytest.approx(0.45 * 81559 * 2**20 - weights - 2e9, abs=2**20)
    assert EngineSpec.from_mapping(spec.to_mapping()) == spec


def test_an_engine_alone_lets_vllm_measure(model: str) -> None:
    spec = EngineSpec("vllm", model)
    assert with_own_share(spec, H100) == spec
    assert not arguments(spec)
    assert "engines_per_gpu" not in spec.to_mapping(), "as runs were stored before"
    assert with_own_share(EngineSpec("vllm", "owner/name"), None) == EngineSpec("vllm", "owner/name")


def test_what_is_given_wins(model: str) -> None:
    given = EngineSpec("vllm", model, engines_per_gpu=2, options=VllmOptions(kv_cache_gib=6.0))
    assert arguments(with_own_share(given, None)) == {
        "--gpu-memory-utilization": "0.45",
        "--kv-cache-memory-bytes": str(6 * 2**30),
    }
    extra = VllmOptions(extra_args=("--kv-cache-memory-bytes", "1000"), gpu_memory_utilization=0.1)
    own = EngineSpec("vllm", model, engines_per_gpu=2, options=extra)
    assert with_own_share(own, None) == own


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (
            {"devices": ("1",), "engines_per_gpu": 4, "max_model_len": 40960},
            "4 engines of qwen3-1.7b on a GPU of 22.5 GiB with 5.1 GiB each: weights take 3.2 GiB, graphs and buffers "
            "1.9 GiB, which leaves 0 tokens of KV and not a context of 40960 tokens: use fewer engines per GPU",
        ),
        ({"options": VllmOptions(gpu_memory_utilization=0.05)}, "an engine of qwen3-1.7b on a GPU of 22.5 GiB"),
        (
            {"engines_per_gpu": 2, "options": VllmOptions(gpu_memory_utilization=0.6)},
            "each take 120% of its memory: use at most 0.5",
        ),
        ({"engines_per_gpu": 2, "options": VllmOptions(quantization="fp8")}, r"give kv_cache_gib \(--kv-cache-gib\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_figures(model: str, chosen: dict, told: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInput, match=told):
        with_own_share(EngineSpec("vllm", model, **chosen), H100)


def test_without_nvidia_smi_shared_engines_need_the_size(model: str) -> None:
    with pytest.raises(BadInput, match="nvidia-smi does not say how much memory"):
        with_own_share(EngineSpec("vllm", model, engines_per_gpu=2), None)


def test_float32_takes_twice_as_much(model: str) -> None:
    assert model_memory(model, "float32").weight_bytes == 2 * model_memory(model).weight_bytes
    assert model_memory(model, tp_degree=2).weight_bytes == model_memory(model).weight_bytes // 2


def test_the_smallest_card_counts_where_the_name_is_no_number() -> None:
    assert smallest_card_bytes(("0",), H100) == 81559 * 2**20
    assert smallest_card_bytes(("GPU-7",), H100) == 23034 * 2**20
    assert smallest_card_bytes((), ()) == 0


def test_engines_of_a_profile_have_cards_of_their_own(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle_dask.engines.vllm_command.installed_vllm_build", lambda: "gpu")
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    shared = on_gpus_of_their_own(EngineSpec("vllm", model, engines_per_gpu=2, tp_degree=2), 3, four)
    assert [spec.devices for spec in shared] == [("4", "5"), ("4", "5"), ("6", "7")]
    with pytest.raises(BadInput, match="3 engines need 6 GPUs, this process sees 4"):
        on_gpus_of_their_own(EngineSpec("vllm", model, tp_degree=2), 3, four)


def test_options_of_a_command_are_put_on_top(model: str) -> None:
    from heddle_dask.cli.engine_option import parsed_vllm_options

    asked = {"kv_cache_gib": 2.0, "engine_args": ("enforce-eager",)}
    base = VllmOptions(extra_args=("--hf-overrides", "{}"), cpu_threads=2)
    options = parsed_vllm_options("vllm", asked, base)
    assert options is not None
    assert vllm_options(options).extra_args == ("--hf-overrides", "{}", "--enforce-eager")
    assert (vllm_options(options).kv_cache_gib, vllm_options(options).cpu_threads) == (2.0, 2)
    assert parsed_vllm_options("emulated", {"engine_args": ()}) is None
    with pytest.raises(BadInput, match="--kv-cache-gib is an option of vLLM engines"):
        parsed_vllm_options("emulated", asked)


def answer_with(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """Put a program `nvidia-smi` on the PATH that answers so."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{rows}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(command_line, "installed_vllm_build", lambda: "gpu")


def test_an_engine_on_a_card_with_published_figures_tells_its_cost(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(tmp_path, monkeypatch, "0, NVIDIA H100 80GB HBM3, 81559, 12\n1, NVIDIA L4, 23034, 0")
    spec = EngineSpec("vllm", model, devices=("0",))
    alone = engine_kind("vllm").believed_cost(spec)
    formula = engine_cost_for(model, "h100")
    assert alone is not None
    assert alone == replace(formula, capacity_tokens=alone.capacity_tokens)
    assert engine_kind("vllm").believed_cost(replace(spec, engines_per_gpu=2)) == alone.scaled(2)
    told = described_engine("w/1-1", spec, EngineInfo("m", 40_960, 256, 1, 393_072)).cost
    assert cost_from_mapping(json.loads(told)) == alone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engine_kind("vllm").believed_cost(EngineSpec("vllm", "Qwen/Qwen3-8B")) == replace(
        engine_cost_for("qwen3-8b", "h100"), capacity_tokens=alone.capacity_tokens
    )


def test_where_the_formula_does_not_hold_no_cost_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(tmp_path, monkeypatch, "0, NVIDIA H100 80GB HBM3, 81559, 12\n1, NVIDIA L4, 23034, 0")
    on_card = EngineSpec("vllm", model, devices=("0",))
    for spec in (
        replace(on_card, devices=("1",)),
        replace(on_card, devices=()),  # one of two sorts
        replace(on_card, dtype="float32"),
        replace(on_card, model="someone/unknown"),
        replace(on_card, options=VllmOptions(quantization="fp8")),
        replace(on_card, devices=("MIG-1",)),
    ):
        assert engine_kind("vllm").believed_cost(spec) is None
    assert described_engine("w/1-1", EngineSpec("emulated", model, 4, 4096), EngineInfo("m", 4096, 4, 1)).cost == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert engine_kind("vllm").believed_cost(on_card) is None
