"""What an engine that starts is doing, and that engines of one description compile once on a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest

from heddle_dask.engines.compile_cache import CompileTurn, cache_variables, description_of
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.start_phase import has_compiled, start_phase

# In the words of vLLM 0.32.
LOG = [
    "(EngineCore pid=1) INFO 11-26 15:19:20 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: ...",
    "(EngineCore pid=1) INFO 11-26 15:19:31 [gpu_model_runner.py:5040] Starting to load model qwen3-1.7b...",
    "(EngineCore pid=1) INFO 11-26 15:19:33 [model_runner.py:425] Model loading took 3.2 GiB memory and 2.47 seconds",
    "(EngineCore pid=1) INFO 11-26 15:19:40 [backends.py:1105] Using cache directory: /c/v for vLLM's torch.compile",
    "(EngineCore pid=1) INFO 11-26 15:20:01 [monitor.py:53] torch.compile took 26.38 s in total",
    "(EngineCore pid=1) INFO 11-26 15:20:02 [gpu_worker.py:760] Available KV cache memory: 5.1 GiB",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 9/18",
    "(EngineCore pid=1) INFO 11-26 15:20:09 [model_runner.py:1128] Graph capturing finished in 2 secs, took 0.3 GiB",
    "(APIServer pid=0) INFO 11-26 15:20:10 [api_server.py:99] Starting vLLM server on unix:/run/e.sock",
]


def test_the_log_tells_what_a_start_is_doing() -> None:
    phases = [start_phase(LOG[: lines + 1], "starting") for lines in range(len(LOG))]
    assert phases == [
        "starting",
        "loading weights",
        "preparing the model",
        "compiling",
        "measuring memory",
        "allocating the KV cache",
        "capturing graphs",
        "warming up",
        "opening its server",
    ]
    assert [has_compiled(phase) for phase in phases] == [False] * 4 + [True] * 5
    assert start_phase(LOG[:2], before="capturing graphs") == "capturing graphs", "it never goes back"


def test_engines_that_differ_only_in_what_is_their_own_share_their_code() -> None:
    one = ("python", "--model", "m", "--seed", "1", "--uds", "/a")
    assert description_of(one, "0.32") == description_of(
        ("python", "--model", "m", "--seed", "2", "--uds", "/b"), "0.32"
    )
    assert description_of(one, "0.32") != description_of(one, "0.33")
    assert description_of(one) != description_of(("python", "--model", "n", "--seed", "1", "--uds", "/a"))
    assert cache_variables({"VLLM_CACHE_ROOT": "/caches/vllm"})["VLLM_CACHE_ROOT"] == "/caches/vllm"


def test_a_turn_passes_on_and_a_wait_has_an_end(tmp_path: Path) -> None:
    where = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm")}

    async def body() -> None:
        first, second, third = (CompileTurn("d", where) for _ in range(3))
        waits: list[bool] = []
        await first.begin(10.0)
        await second.begin(0.3, lambda: waits.append(True))
        assert waits, "it waited, and then went on without a turn"
        second.compiled()
        waiting = asyncio.ensure_future(third.begin(30.0))
        await asyncio.sleep(0)
        first.end()  # it died: the next one has its turn
        await waiting
        third.compiled()
        last = CompileTurn("d", where)
        await last.begin(0.0, lambda: waits.append(False))
        assert False not in waits, "the code is there"
        await CompileTurn("").begin(0.0)
        (tmp_path / "file").touch()
        await CompileTurn("d", {"VLLM_CACHE_ROOT": str(tmp_path / "file")}).begin(0.0)

    asyncio.run(body())


def test_the_second_engine_starts_when_the_first_has_compiled_or_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    model = tmp_path / "model"
    model.mkdir()
    options = EmulatedOptions(cost={"seconds_per_token": 0.001})
    spec = EngineSpec("worlds.compiling_engine:COMPILING", str(model), slots=2, max_model_len=64, options=options)
    told: list[list[str]] = [[] for _ in range(3)]
    processes = [
        EngineProcess(spec, tmp_path / str(n), records=tmp_path / "r", on_phase=told[n].append) for n in range(3)
    ]

    async def until(number: int, phase: str) -> None:
        while phase not in told[number]:
            await asyncio.sleep(0.02)

    async def body() -> None:
        starts = [asyncio.ensure_future(processes[0].start(120.0))]
        try:
            await until(0, "compiling")
            starts += [asyncio.ensure_future(process.start(120.0)) for process in processes[1:]]
            for number in (1, 2):
                await until(number, "waiting for another engine to compile")
            starts[0].cancel()
            while not any("compiling" in each for each in told[1:]):
                await asyncio.sleep(0.02)
            assert sum("compiling" in each for each in told[1:]) == 1, "one of the two has the turn"
            (model / "compiled").touch()
            await asyncio.gather(*starts[1:])
            assert all(each[-1] != "waiting for another engine to compile" for each in told[1:])
        finally:
            for start in starts:
                start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(process.stop() for process in processes))

    asyncio.run(asyncio.wait_for(body(), 120.0))
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
