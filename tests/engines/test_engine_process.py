"""An engine's life: started, found wanting, killed, ended; and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines import watchdog
from heddle_dask.engines.address import EngineAddress, engines_directory, private_directory
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    SamplingParams,
)
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.process import EngineProcess, EngineStartError, likely_cause
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.http_client import cluster_session

CEILING_S = 60.0


def _spec(**changes) -> EngineSpec:
    names = ("cost", "faults", "time_scale", "emulation")
    own = {name: changes.pop(name) for name in names if name in changes}
    options = EmulatedOptions(**{"cost": {"seconds_per_token": 0.001}, **own})
    return EngineSpec("emulated", "none", **{"slots": 4, "max_model_len": 100_000, "options": options, **changes})


def _step(name: str, tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3], SamplingParams(tokens, ignore_eos=True))


def _with_engine(
    directory: Path,
    spec: EngineSpec,
    scenario: Callable[[EngineProcess, EngineClient], Awaitable[None]],
) -> None:
    async def main() -> None:
        process = EngineProcess(spec, directory)
        try:
            async with EngineClient(await process.start(CEILING_S)) as client:
                await asyncio.wait_for(scenario(process, client), CEILING_S)
        finally:
            await process.stop()

    asyncio.run(main())


def _fails(spec: EngineSpec, directory: Path, timeout_s: float = CEILING_S) -> EngineStartError:
    process = EngineProcess(spec, directory, records=directory / "r")
    with pytest.raises(EngineStartError) as caught:
        asyncio.run(process.start(timeout_s))
    assert process.returncode is not None, "nothing may be left running"
    assert not list((directory / "r").iterdir())
    return caught.value


def test_start_serve_and_stop(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        assert watchdog.start_time(process.pid) and watchdog.start_time(process.engine_pid)
        assert len((await client.generate(_step("a"))).token_ids) == 5
        engine_pid = process.engine_pid
        await process.stop()
        assert process.engine_pid == 0
        assert not watchdog.start_time(engine_pid)
        assert await process.wait() == 0
        await process.stop()

    _with_engine(tmp_path, _spec(), scenario)
    assert "emulated engine for none" in (tmp_path / "engine.log").read_text()


def test_an_engine_that_ends_early_is_reported_at_once_with_its_cause(tmp_path):
    line = "ValueError: the fuse is blown"
    error = _fails(_spec(faults={"fail_start": line}), tmp_path)
    assert line in str(error)
    assert "exit code 1" in str(error)
    named = re.search(r"\(log: (.*)\)$", str(error))
    assert named is not None and line in Path(named[1]).read_text()
    assert "\n" not in str(error)
    assert error.log_tail == (line,)


def test_only_the_log_of_this_start_counts(tmp_path):
    _fails(_spec(faults={"fail_start": "ValueError: old"}), tmp_path)
    error = _fails(_spec(faults={"fail_start": "ValueError: new"}), tmp_path)
    assert error.log_tail == ("ValueError: new",)


def test_an_engine_that_is_not_ready_in_time_is_ended(tmp_path):
    error = _fails(_spec(faults={"start_delay_s": 600}), tmp_path, timeout_s=0.5)
    assert "did not answer within 0.5 s" in str(error)


def test_an_engine_that_runs_no_step_is_ended(tmp_path):
    error = _fails(_spec(cost={"seconds_per_token": 600}), tmp_path, timeout_s=5.0)
    assert "healthy but ran no step" in str(error)


def test_cancelling_a_start_leaves_nothing(tmp_path):
    async def main() -> EngineProcess:
        process = EngineProcess(_spec(faults={"start_delay_s": 600}), tmp_path)
        start = asyncio.ensure_future(process.start(CEILING_S))
        while process.engine_pid == 0:
            await asyncio.sleep(0.02)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        return process

    process = asyncio.run(main())
    assert process.returncode is not None
    assert process.engine_pid == 0


def test_a_start_error_survives_pickling():
    error = pickle.loads(pickle.dumps(EngineStartError("no", ("a", "b"))))
    assert (str(error), error.log_tail) == ("no", ("a", "b"))


def _listening(pid: int) -> list[str]:
    """Addresses of the Internet sockets on which a process listens."""
    return [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_an_engine_listens_on_a_socket_that_no_other_user_reaches(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        socket = Path(process.address.socket)
        assert str(process.address) == f"unix:{socket}"
        assert socket.is_socket() and socket.parent == engines_directory()
        status = socket.parent.lstat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())
        assert _listening(process.engine_pid) == []
        # Unlike a port, its name in the list of processes is of no use to another user.
        await process.stop()
        assert not socket.exists()
        with pytest.raises(EngineUnreachable, match=f"engine at unix:{socket} is unreachable"):
            await client.describe()

    _with_engine(tmp_path, _spec(), scenario)


def test_an_engine_has_its_temporary_files_in_a_directory_of_its_own_that_goes_with_it(tmp_path):
    places: list[Path] = []

    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        environment = psutil.Process(process.engine_pid).environ()
        place = Path(environment["TMPDIR"])
        assert environment["VLLM_RPC_BASE_PATH"] == str(place)
        assert place.parent == engines_directory() and stat.S_IMODE(place.stat().st_mode) == 0o700
        (place / "socket").touch()
        places.append(place)

    _with_engine(tmp_path, _spec(), scenario)
    assert not places[0].exists()


def test_an_engine_for_a_router_listens_on_a_loopback_port(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        assert process.address.url == f"http://127.0.0.1:{process.address.port}"
        assert _listening(process.engine_pid) == [("127.0.0.1", process.address.port)]
        assert len((await client.generate(_step("a"))).token_ids) == 5

    _with_engine(tmp_path, _spec(tcp=True), scenario)


def test_a_path_too_long_for_a_socket_is_one_line(tmp_path):
    records = tmp_path / ("long" * 30)
    with pytest.raises(BadInput, match=r"^socket /\S+ has a path of \d+ bytes, and sockets take 107: use .+$"):
        EngineProcess(_spec(), tmp_path, records=records)


def test_the_socket_of_a_dead_owner_is_removed_at_the_next_start(tmp_path):
    records = private_directory(tmp_path / "r")
    stale = records / watchdog.socket_name("dead")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    record = {"engine": 1, "engine_started": -1, "mark": "dead", "owner": 1, "owner_started": -1}
    path = records / watchdog.record_name("dead")
    path.write_text(json.dumps({**record, "boot_id": watchdog.boot_id(), "host": os.uname().nodename}))

    async def main() -> None:
        process = EngineProcess(_spec(), tmp_path, records=records)
        try:
            await process.start(CEILING_S)
            assert not stale.exists() and not path.exists()
        finally:
            await process.stop()

    asyncio.run(main())
    assert list(records.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost": {"profile": "nope"}}, "cost profile 'nope'"),
        ({"faults": {"explode": 1}}, "engine faults has unknown key 'explode'"),
        ({"faults": {"slow_factor": "much"}}, "slow_factor is 'much'"),
        ({"emulation": {"kv_capacity_tokens": 500}}, "fewer than max_model_len 100000"),
        ({"emulation": {"color": 1}}, "engine emulation has unknown key 'color'"),
    ],
)
def test_an_impossible_emulation_is_refused_before_anything_starts(tmp_path, changes, message):
    with pytest.raises(BadInput, match=message):
        EngineProcess(_spec(**changes), tmp_path)


def test_a_crash_ends_steps_and_is_seen_by_wait(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        running = asyncio.ensure_future(client.generate(_step("a", 90_000)))
        await client.generate(_step("b"))
        with pytest.raises(EngineUnreachable):
            await client.generate(_step("c"))
        with pytest.raises(EngineUnreachable):
            await running
        assert await process.wait() == 1
        assert process.log_tail()[-1] == "RuntimeError: crashed as asked (fault)"

    _with_engine(tmp_path, _spec(faults={"crash_after_requests": 2}), scenario)


def test_a_hanging_engine_is_not_healthy(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        await client.generate(_step("a"))
        hanging = asyncio.ensure_future(client.generate(_step("b")))
        async with EngineClient(process.address, question_timeout_s=0.3) as impatient:
            while await impatient.healthy():
                await asyncio.sleep(0.01)
        assert not hanging.done()
        hanging.cancel()

    _with_engine(tmp_path, _spec(faults={"hang_after_requests": 1}), scenario)


def test_faults_can_be_set_while_it_runs(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        async def fault(**faults) -> int:
            async with (
                cluster_session(process.address.socket) as session,
                session.post(f"{process.address.url}/faults", json=faults) as response,
            ):
                return response.status

        assert await fault(refuse_after_requests=1) == 200
        await client.generate(_step("a"))
        with pytest.raises(EngineUnreachable, match="failed as asked"):
            await client.generate(_step("b"))
        assert await client.healthy()
        assert await fault(slow_factor=5.0) == 200
        slow = await client.generate(_step("c", 20))
        assert slow.decode_s == pytest.approx(19 * 0.005)
        assert await fault(nonsense=1) == 400

    _with_engine(tmp_path, _spec(), scenario)


def test_time_scale_stretches_the_models_seconds(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        started = time.monotonic()
        result = await client.generate(_step("a", 50))
        assert time.monotonic() - started >= 0.1
        assert result.decode_s == pytest.approx(49 * 0.002)

    _with_engine(tmp_path, _spec(time_scale=2.0), scenario)


def test_an_emulated_profile_runs(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        result = await client.generate(_step("a", 100))
        assert 0.1 < result.prefill_s + result.decode_s < 2.0
        assert (await client.describe()).tp_degree == 2

    spec = _spec(cost={"profile": "qwen3-8b-h100"}, tp_degree=2, max_model_len=32768)
    _with_engine(tmp_path, spec, scenario)


def test_the_models_own_end_token_is_used(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": [333, 2]}')

    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        sampling = SamplingParams(900, seed=1)
        result = await client.generate(GenerateRequest("a", [1], sampling))
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] == 333

    spec = EngineSpec("emulated", str(model), 2, 1000, options=EmulatedOptions({"seconds_per_token": 0.0}))
    _with_engine(tmp_path / "engine", spec, scenario)


OWNER = """
import asyncio, json, sys, time
from pathlib import Path
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
process = EngineProcess(EngineSpec.from_mapping(json.loads(sys.argv[1])), Path(sys.argv[2]))
asyncio.run(process.start(60))
print(process.pid, process.engine_pid, flush=True)
time.sleep(600)
"""


def test_sigkill_of_the_owner_ends_the_engine(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, json.dumps(_spec().to_mapping()), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(watchdog.start_time(pid) for pid in pids)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + CEILING_S
    while any(watchdog.start_time(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killing_guard_and_watchdog_together_leaves_nothing_after_stop(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        engine_pid = process.engine_pid
        stat = watchdog._stat(engine_pid)
        assert stat is not None
        os.kill(stat[1], signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == 128 + signal.SIGKILL
        await process.stop()
        # A killed orphan is there until the system has collected it.
        while watchdog.start_time(engine_pid):
            await asyncio.sleep(0.01)

    _with_engine(tmp_path, _spec(), scenario)


def test_nobody_there_is_unreachable():
    async def main() -> None:
        async with EngineClient(EngineAddress("/no/such.sock")) as client:
            assert not await client.healthy()
            for question in (client.generate(_step("a")), client.describe(), client.abort(["a"])):
                with pytest.raises(EngineUnreachable, match="is unreachable"):
                    await question

    asyncio.run(main())


def test_closing_the_client_ends_its_steps(tmp_path):
    async def scenario(process: EngineProcess, _client: EngineClient) -> None:
        client = EngineClient(process.address)
        running = asyncio.ensure_future(client.generate(_step("a", 90_000)))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(EngineUnreachable):
            await running

    _with_engine(tmp_path, _spec(), scenario)


def test_a_wrong_body_is_refused_and_a_large_one_is_not(tmp_path):
    async def scenario(process: EngineProcess, client: EngineClient) -> None:
        context = [100_000 + index for index in range(400_000)]
        result = await client.generate(GenerateRequest("a", context, SamplingParams(3, ignore_eos=True)))
        assert len(result.token_ids) == 3
        with pytest.raises(EngineRefused, match="token ids"):
            await client.generate(GenerateRequest("b", [1 << 40], SamplingParams(3)))
        async with (
            cluster_session(process.address.socket) as session,
            session.post(f"{process.address.url}/inference/v1/generate", data=b"{") as response,
        ):
            assert response.status == 400

    _with_engine(tmp_path, _spec(max_model_len=500_000), scenario)


def test_the_cause_is_found_among_a_real_engines_last_words():
    log = (
        "(APIServer pid=7) INFO 11-05 12:00:00 [api_server.py:1] starting",
        "(EngineCore pid=9) ERROR 11-05 12:00:01 [core.py:77] Traceback (most recent call last):",
        "(EngineCore pid=9) ERROR 11-05 12:00:01 [core.py:77] ValueError: no room for KV blocks",
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.",
        "[rank0]: some farewell",
    )
    assert likely_cause(log) == "ValueError: no room for KV blocks"
    assert likely_cause(("one", "two")) == "two"
    assert likely_cause(()) == ""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_says_why_it_does_not_start(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "no-such-architecture"}')
    (model / "model.safetensors").write_bytes(b"")
    spec = EngineSpec("vllm", str(model), 2, 100)
    error = _fails(spec, tmp_path / "e", timeout_s=800.0)  # it ends by itself, on a busy machine after minutes
    assert "exit code 1" in str(error)
    assert "no-such-architecture" in str(error)
    assert len(error.log_tail) > 3
