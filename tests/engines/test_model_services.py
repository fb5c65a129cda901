"""Model services without processes: descriptions, memory slots, vLLM's command lines and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from heddle_dask.core.errors import BadInput
from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.address import EngineAddress, socket_address
from heddle_dask.engines.model_services.cpu_backend import MemorySlots
from heddle_dask.engines.model_services.served_process import ServiceClient
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceRefused, ServiceSpec
from heddle_dask.engines.model_services.vllm_backend import SleepingServer, service_command

PAGE = 4096


def spec(model: str = "/models/rm", **more: Any) -> ServiceSpec:
    return ServiceSpec("rm", model, **more)


# -- descriptions ----------------------------------------------------------------------------------


def test_a_service_travels_as_json_and_says_what_the_controller_needs(model_dir: str) -> None:
    service = ServiceSpec("teacher", model_dir, "cpu", gpus={4, 1, 2}, batch=3, load_s=(0.5, 0.4, 0.3))
    assert ServiceSpec.from_mapping(service.to_mapping()) == service
    facts = service.declared()
    assert (facts.name, facts.gpus, facts.batch, facts.load_s) == ("teacher", (1, 2, 4), 3, (0.5, 0.4, 0.3))
    assert facts.host_bytes == sum(file.stat().st_size for file in Path(model_dir).glob("*.safetensors"))
    assert service.answers == {"logprobs", "judge"}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"model": ""}, "model is ''"),
        ({"backend": "tpu"}, "backend is 'tpu': use cpu or vllm"),
        ({"gpus": (3,)}, "powers of two"),
        ({"gpus": ()}, "powers of two"),
        ({"gpus": (0, 1)}, "powers of two"),
        ({"gpus": "12"}, "powers of two"),
        ({"batch": 0}, "batch is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"load_s": (1.0, 2.0)}, "load_s has 2 values for 1 sizes"),
    ],
)
def test_a_service_that_cannot_be_is_refused_in_one_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        ServiceSpec(**{"name": "rm", "model": "/models/rm", **chosen})
    assert "\n" not in str(raised.value)


def test_an_unknown_key_of_a_service_is_refused() -> None:
    with pytest.raises(BadInput, match="unknown key 'gpu': use name, model"):
        ServiceSpec.from_mapping({"name": "rm", "model": "/m", "gpu": 1})
    with pytest.raises(BadInput, match="lacks model"):
        ServiceSpec.from_mapping({"name": "rm"})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model directory .*missing does not exist"):
        spec(str(tmp_path / "missing")).check_model()
    with pytest.raises(BadInput, match=r"has no config\.json"):
        spec(str(tmp_path)).check_model()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"has no \*\.safetensors"):
        spec(str(tmp_path)).check_model()
    with pytest.raises(BadInput, match=r"config\.json cannot be read"):
        _ = spec(str(tmp_path)).answers


# -- memory slots ----------------------------------------------------------------------------------


def test_a_place_of_a_slot_is_given_once_and_its_memory_is_freed(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, devices=2, device_bytes=8 * PAGE)
    (place,) = slots.take(GpuChunk(0, 1))
    assert place.length == 8 * PAGE
    with open(place.path, "r+b") as file:
        file.write(b"x" * place.length)
    assert slots.used_bytes(0) >= 8 * PAGE
    with pytest.raises(ServiceFailed, match="memory slot 0 has no free place"):
        slots.take(GpuChunk(0, 2))
    slots.give_back((place,))
    assert slots.used_bytes(0) == 0
    both = slots.take(GpuChunk(0, 2))
    assert [Path(each.path).name for each in both] == ["device-0", "device-1"]


def test_a_slot_for_two_models_has_two_places_that_do_not_overlap(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, devices=1, device_bytes=9 * PAGE, models=2)
    (first,), (second,) = slots.take(GpuChunk(0, 1)), slots.take(GpuChunk(0, 1))
    assert first.length == second.length == 4 * PAGE
    assert second.offset - first.offset == 4 * PAGE
    slots.give_back((first,))
    assert slots.take(GpuChunk(0, 1)) == (first,)
    slots.close()
    assert list(tmp_path.iterdir()) == []


# -- vLLM ------------------------------------------------------------------------------------------


def test_vllm_serves_a_chunk_of_the_hosts_gpus_in_sleep_mode() -> None:
    service = spec(gpus=(2,), batch=8, max_tokens=2048, extra_args=("--quantization", "fp8"))
    command = service_command(
        service, GpuChunk(2, 2), EngineAddress(socket="/run/s"), "gpu", ("a", "b", "c", "d"), models=2
    )
    argv = " ".join(command.argv)
    assert command.env["CUDA_VISIBLE_DEVICES"] == "c,d"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"  # opens /sleep and /wake_up
    for part in (
        "--model /models/rm",
        "--enable-sleep-mode",
        "--tensor-parallel-size 2",
        "--gpu-memory-utilization 0.450",
        "--max-num-seqs 8",
        "--max-model-len 2048",
        "--uds /run/s",
    ):
        assert part in argv
    assert argv.endswith("--quantization fp8")


def test_a_cpu_build_of_vllm_has_no_sleep_mode() -> None:
    command = service_command(spec(), GpuChunk(0, 1), EngineAddress(socket="/run/s"), "cpu", (), models=1)
    assert "--enable-sleep-mode" not in command.argv
    assert "CUDA_VISIBLE_DEVICES" not in command.env


class RecordedVllm:
    """An HTTP server with the answers of vLLM 0.32, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path_qs, body))
        if request.path == "/classify":
            data = [{"index": i, "label": "LABEL_0", "probs": [float(i)]} for i in range(len(body["input"]))]
            return web.json_response({"data": data[::-1]})
        if request.path == "/v1/completions":
            ids = body["prompt"]
            if len(ids) > 4:
                error = {"message": "the prompt is\nlonger than the model's context", "code": 400}
                return web.json_response({"error": error}, status=400)
            rows = [None, *({str(token): {"logprob": -float(token), "rank": 1}} for token in ids[1:])]
            return web.json_response({"choices": [{"prompt_logprobs": rows}]})
        return web.json_response({})


def with_recorded_vllm(tmp_path: Path, body: Callable[[SleepingServer], Awaitable[None]]) -> list[tuple[str, Any]]:
    async def run() -> list[tuple[str, Any]]:
        recorded = RecordedVllm()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", recorded.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        address = socket_address(tmp_path, "v.sock")
        await web.UnixSite(runner, address.socket).start()
        client = ServiceClient("rm", address)
        try:
            await body(SleepingServer(client, spec()))
        finally:
            await client.close()
            await runner.cleanup()
        return recorded.asked

    return asyncio.run(run())


def test_a_server_that_keeps_its_copy_sleeps_at_level_1_and_is_woken_up_at_once(tmp_path: Path) -> None:
    async def body(server: SleepingServer) -> None:
        await server.sleep(1)
        await server.wake_up(1)

    asked = with_recorded_vllm(tmp_path, body)
    assert asked == [("/sleep?level=1&mode=wait", None), ("/wake_up", None)]


def test_after_level_2_the_weights_are_read_again_before_the_kv_cache_is_made(tmp_path: Path) -> None:
    async def body(server: SleepingServer) -> None:
        await server.sleep(2)
        await server.wake_up(2)

    assert with_recorded_vllm(tmp_path, body) == [
        ("/sleep?level=2&mode=wait", None),
        ("/wake_up?tags=weights", None),
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/wake_up?tags=kv_cache", None),
    ]


def test_scores_and_logprobs_are_asked_and_read_as_vllm_gives_them(tmp_path: Path) -> None:
    async def body(server: SleepingServer) -> None:
        assert await server.score(["a", "b", "c"]) == [0.0, 1.0, 2.0]
        assert await server.score(["a", [5, 6]]) == [0.0, 0.0]
        assert await server.logprobs([7, 8, 9], 1) == [-8.0, -9.0]
        assert await server.logprobs([7, 8, 9], 2) == [-9.0]
        with pytest.raises(ServiceRefused, match="start is 0"):
            await server.logprobs([7, 8, 9], 0)
        with pytest.raises(ServiceRefused, match="longer than the model's context") as raised:
            await server.logprobs([1, 2, 3, 4, 5], 1)
        assert "\n" not in str(raised.value)

    asked = with_recorded_vllm(tmp_path, body)
    assert asked[0] == (
        "/classify",
        {
            "model": "/models/rm",
            "input": ["a", "b", "c"],
            "use_activation": False,
            "add_special_tokens": False,
        },
    )
    # Texts and token ids never stand in one request of vLLM.
    assert [row[1]["input"] for row in asked[1:3]] == [["a"], [[5, 6]]]
    assert asked[3][1]["prompt_logprobs"] == 0 and asked[3][1]["prompt"] == [7, 8, 9]


def test_a_service_that_is_not_there_fails_and_is_not_refused(tmp_path: Path) -> None:
    async def body() -> None:
        client = ServiceClient("rm", socket_address(tmp_path, "none.sock"))
        with pytest.raises(ServiceFailed, match="service rm does not answer"):
            await client.ask("GET", "/health")
        assert not await client.healthy()
        await client.close()

    asyncio.run(body())
