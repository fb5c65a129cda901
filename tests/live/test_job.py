"""What a job hosts, when it ends, its scratch, and what it refuses before anything starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.engines import watchdog
from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.live.clusters.job.batch_job import job_memory_bytes
from heddle_dask.live.clusters.job.options import JobOptions, WorkerTls, gpu_slices
from heddle_dask.live.clusters.job.scratch import job_scratch

LAUNCHER = Path(__file__).parents[2] / "workers" / "job.py"
ADDRESS = "tcp://127.0.0.1:9"  # the port "discard", on which nothing listens


def launched(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAUNCHER), ADDRESS, "--name", "gpu-0", "--connect-s", "0.5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **(environ or {})})


@pytest.mark.parametrize(
    ("environ", "memory_bytes"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2 << 30),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8"}, 4 << 30),
        ({"SLURM_MEM_PER_NODE": "0"}, 0),
        ({}, 0),
    ],
)
def test_the_memory_of_a_job_is_what_slurm_says(environ: dict[str, str], memory_bytes: int) -> None:
    assert job_memory_bytes(environ) == memory_bytes


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        ((), {}, "job gpu-0 does not reach the scheduler at tcp://127.0.0.1:9 through the default route"),
        (("--interface", "none0"), {}, "--interface none0 does not exist on this node"),
        (("--workers", "2", "--tp-degree", "2"), {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "has 3 GPUs"),
        (("--worker-ports", "7000:7002", "--workers", "2"), {}, "need a range of 4 ports"),
        (("--interface", "lo", "--host", "127.0.0.1"), {}, "give one of them"),
        (
            ("--tls-ca-file", "/nowhere", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"),
            {},
            "belong to an address tls://HOST:PORT",
        ),
    ],
)
def test_a_job_that_cannot_work_says_so_in_one_line_and_starts_nothing(
    arguments: tuple[str, ...], environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = launched(*arguments, "--scratch", str(tmp_path), environ=environ)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("heddle job: ") and said in line
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_only_the_login_node_has_is_refused() -> None:
    nowhere = Path("/nowhere/key.pem")
    options = JobOptions("tls://h:1", "gpu-0", tls=WorkerTls(nowhere, nowhere, nowhere))
    with pytest.raises(BadInput, match="file system that the nodes share"):
        options.check()


@pytest.mark.parametrize("ports", ["7000", "7000:", "a:b"])
def test_a_range_of_ports_has_two_ends(ports: str) -> None:
    done = launched("--worker-ports", ports)
    assert done.returncode == 2 and "give FIRST:LAST" in done.stderr


# -- what it hosts ---------------------------------------------------------------------------------------


@given(
    workers=st.integers(1, 8),
    degree=st.integers(1, 4),
    sharers=st.integers(1, 3),
    names=st.lists(st.integers(0, 99).map(str), unique=True, max_size=40),
)
def test_each_worker_has_gpus_of_its_own(workers: int, degree: int, sharers: int, names: list[str]) -> None:
    options = JobOptions(ADDRESS, "gpu-0", workers=workers, tp_degree=degree, engines_per_gpu=sharers)
    needed = -(-workers // sharers) * degree
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(names)}
    if names and len(names) < needed:
        with pytest.raises(BadInput, match="--gres"):
            gpu_slices(options, environ)
        return
    slices = gpu_slices(options, environ)
    assert len(slices) == workers
    if not names:
        assert slices == [None] * workers
        return
    given_out = [gpu for each in slices[::sharers] if each is not None for gpu in each.split(",")]
    assert given_out == names[:needed], "each once, in order"
    assert all(slices.count(each) <= sharers for each in slices)
    assert {len(each.split(",")) for each in slices if each is not None} == {degree}


def test_workers_carry_the_name_of_their_job_and_its_tags() -> None:
    one = JobOptions(ADDRESS, "gpu-3", tp_degree=2)
    assert (one.worker_names, dict(one.resources)) == (("gpu-3",), {"ENGINE": 2})
    two = JobOptions(ADDRESS, "cpu-0", role="tool", workers=2, cpus=6, worker_ports=(7000, 7009))
    assert (two.worker_names, dict(two.resources)) == (("cpu-0-0", "cpu-0-1"), {"TOOL": 6})
    assert two.port_options == ["--worker-port", "7000:7009", "--nanny-port", "7000:7009"]
    assert gpu_slices(two, {"CUDA_VISIBLE_DEVICES": "0"}) == [None, None]
    trainer = JobOptions(ADDRESS, "trainer-0", role="trainer", cpus=6)
    assert dict(trainer.resources) == {"TRAINER": 1}
    assert gpu_slices(trainer, {"CUDA_VISIBLE_DEVICES": "0,1"}) == [None], "all of them are the trainer's"


# -- scratch ---------------------------------------------------------------------------------------------


def test_the_scratch_of_a_job_goes_with_it_also_when_it_fails(tmp_path: Path) -> None:
    base = tmp_path / "node" / "local"
    with pytest.raises(RuntimeError), job_scratch(base) as scratch:
        assert scratch.parent == base and scratch.stat().st_mode & 0o777 == 0o700
        (scratch / "file").write_text("x")
        raise RuntimeError
    assert list(base.iterdir()) == []


def test_the_scratch_of_a_killed_job_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    program = (
        "import sys, time; from pathlib import Path;"
        "from heddle_dask.live.clusters.job.scratch import job_scratch\n"
        "with job_scratch(Path(sys.argv[1])) as path: print(path, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        abandoned = Path(killed.stdout.readline().strip())
        with job_scratch(tmp_path) as first:
            assert abandoned.exists(), "its job lives"
            killed.kill()
            killed.wait()
            with job_scratch(tmp_path) as second:
                assert not abandoned.exists()
                assert first.exists() and second.exists()
    assert list(tmp_path.iterdir()) == []


def test_scratch_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--scratch"), job_scratch(tmp_path / "file"):
        pass


# -- signals ---------------------------------------------------------------------------------------------


def _blocked_signals(pid: int) -> set[int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(status["SigBlk"], 16)
    return {number for number in range(1, 65) if mask & 1 << (number - 1)}


@pytest.mark.parametrize("shielded", [False, True])
def test_the_signals_of_a_batch_system_end_only_what_is_not_shielded(shielded: bool, tmp_path: Path) -> None:
    process = SupervisedProcess(["sleep", "600"], tmp_path, "sleep", shielded=shielded, grace_s=60)
    process.launch()
    deadline = time.monotonic() + 60
    try:
        while not process.program_pid:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for pid in (process.program_pid, process.pid):
            # Every process holds SIGHUP back too until it has handlers of its own.
            while signal.SIGHUP in _blocked_signals(pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            expected = set(watchdog.SHIELDED_SIGNALS) if shielded else set()
            assert _blocked_signals(pid) & set(watchdog.SHIELDED_SIGNALS) == expected
        os.kill(process.pid, signal.SIGINT if shielded else signal.SIGTERM)
        while process.returncode is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.returncode == 128 + (signal.SIGINT if shielded else signal.SIGTERM)
    finally:
        asyncio.run(process.stop(0.0))
