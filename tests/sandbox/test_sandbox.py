"""The sandbox: each bad program comes back as an answer, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import functools
import glob
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.isolation.granted import CPUS_VARIABLE, THREAD_VARIABLES
from heddle_dask.sandbox.outcome import SandboxLimits, ToolOutput
from heddle_dask.sandbox.process_accounting import ProcessAccounting, scan
from heddle_dask.sandbox.python_runner import PythonSandbox, run_python, sandbox_mode

T = TypeVar("T")
MIB = 1 << 20
LIMITS = SandboxLimits(wall_s=20.0, cpu_s=20.0)


@pytest.fixture(params=["bubblewrap", "weak"])
def mode(request: pytest.FixtureRequest) -> str:
    async def detect() -> None:
        await PythonSandbox.detect(only=request.param)

    try:
        asyncio.run(detect())
    except HeddleError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(autouse=True)
def folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other test processes make their sandbox folders elsewhere."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def in_sandbox(mode: str, body: Callable[[PythonSandbox], Awaitable[T]]) -> T:
    async def main() -> T:
        return await body(await PythonSandbox.detect(only=mode))  # type: ignore[arg-type]

    return asyncio.run(main())


def run(mode: str, code: str, limits: SandboxLimits = LIMITS, **more: object) -> ToolOutput:
    before = traces_of_runs()
    output = in_sandbox(mode, lambda box: box.run(code, limits=limits, **more))  # type: ignore[arg-type]
    assert_gone(before)
    return output


def traces_of_runs() -> set[str | int]:
    """Our directories of runs; processes of runs on this machine, ours and those of other test processes."""
    folders = glob.glob(os.path.join(tempfile.gettempdir(), "heddle-sandbox-*"))
    return {*folders, *(entry.pid for entry in scan() if is_of_a_run(entry.pid))}


def assert_gone(before: set[str | int]) -> None:
    """Nothing that was not there before stays. What other test processes run goes by itself."""
    suspects = traces_of_runs() - before
    deadline_s = time.monotonic() + 60
    while suspects and time.monotonic() < deadline_s:
        time.sleep(0.05)
        suspects &= traces_of_runs()
    assert not suspects


def is_of_a_run(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"EXIT_PROCESSES" in command


def test_prints_come_back(mode: str) -> None:
    output = run(mode, "print(6 * 7)\nimport sys; print('to stderr', file=sys.stderr)")
    assert output == ToolOutput("42\nto stderr\n", True, "", output.seconds)


def test_standard_library_works(mode: str) -> None:
    code = "import json, math, decimal, sqlite3, zlib, threading\nprint(json.dumps([math.pi]))"
    assert run(mode, code).text == "[3.141592653589793]\n"


def test_exception_is_an_error_with_the_agents_own_frames(mode: str) -> None:
    output = run(mode, "def f(x):\n    return 1 / x\nf(0)")
    assert (output.ok, output.cause) == (False, "error")
    assert output.text.startswith("Traceback")
    assert "return 1 / x" in output.text
    assert "run_program" not in output.text
    assert "ZeroDivisionError" in output.text


def test_syntax_error_is_an_error(mode: str) -> None:
    output = run(mode, "print(1")
    assert output.cause == "error"
    assert "SyntaxError" in output.text


def test_exit_status_is_an_error(mode: str) -> None:
    output = run(mode, "print('so far')\nraise SystemExit(3)")
    assert (output.cause, output.text) == ("error", "so far\n[failed: exit status 3]")


def test_death_by_signal_is_an_error(mode: str) -> None:
    output = run(mode, "import ctypes; ctypes.string_at(0)")
    assert (output.cause, output.text) == ("error", "[failed: killed by signal 11]")


def test_fork_bomb_ends_with_cause_processes(mode: str) -> None:
    output = run(mode, "import os\nwhile True: os.fork()")
    assert output.cause == "processes"


def test_fork_bomb_that_ignores_refusals_ends_with_cause_processes(mode: str) -> None:
    if mode == "weak" and os.geteuid() != 0:
        pytest.skip("no process can be started at all: it spins until the time limit")
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(mode, code).cause == "processes"


def test_the_probe_of_a_mode_does_not_depend_on_when_the_watchdog_looks(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine its first look came while the probe's processes lived, and no mode was left."""
    monkeypatch.setattr("heddle_dask.sandbox.process_accounting._FIRST_LOOK_S", 0.0)
    monkeypatch.setattr("heddle_dask.sandbox.process_accounting._LONGEST_LOOK_S", 0.0)
    monkeypatch.setattr(
        "heddle_dask.sandbox.python_runner.ProcessAccounting",
        functools.partial(ProcessAccounting, period_s=0.0),
    )
    for _ in range(3):
        asyncio.run(PythonSandbox.detect(only=mode))  # type: ignore[arg-type]


def test_processes_within_the_limit_are_allowed(mode: str) -> None:
    if mode == "weak" and os.geteuid() != 0:
        pytest.skip("this mode allows no processes without root")
    code = """
import threading, os
for _ in range(5):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
threads = [threading.Thread(target=print, args=('x',)) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    assert sorted(run(mode, code).text.split()) == ["x"] * 4, run(mode, code)


def test_processes_in_the_background_are_killed(mode: str) -> None:
    if mode == "weak" and os.geteuid() != 0:
        pytest.skip("this mode allows no processes without root")
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('parent')"
    output = run(mode, code)
    assert (output.ok, output.text) == (True, "parent\n")


def test_endless_loop_ends_at_the_wall_clock_limit(mode: str) -> None:
    output = run(mode, "print('before')\nwhile True: pass", SandboxLimits(wall_s=2))
    assert (output.cause, output.text) == ("timeout", "before\n[stopped: ran longer than 2 s]")


def test_cpu_limit_ends_a_loop(mode: str) -> None:
    output = run(mode, "while True: pass", SandboxLimits(wall_s=60, cpu_s=1))
    assert (output.cause, output.text) == ("timeout", "[stopped: used more than 1 s of CPU time]")


def test_a_gigabyte_of_output_is_cut(mode: str) -> None:
    code = "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))"
    output = run(mode, code, SandboxLimits(output_bytes=1000))
    assert output.cause == "output"
    assert output.text == "x" * 1000 + "\n[stopped: wrote more than 1000 bytes of output]"


def test_output_of_just_the_limit_is_fine(mode: str) -> None:
    output = run(mode, "print('x' * 999)", SandboxLimits(output_bytes=1000))
    assert (output.ok, len(output.text)) == (True, 1000)


def test_ten_gigabytes_of_memory_fail(mode: str) -> None:
    output = run(mode, "x = bytearray(10 << 30)")
    assert output.cause == "memory"
    assert "MemoryError" in output.text


def test_memory_of_all_processes_together_is_limited(mode: str) -> None:
    if mode == "weak" and os.geteuid() != 0:
        pytest.skip("this mode allows no processes without root")
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0: break
x = bytearray(60 << 20)
time.sleep(20)
"""
    assert run(mode, code, SandboxLimits(wall_s=60, memory_bytes=100 * MIB)).cause == "memory"


def test_a_large_file_fails(mode: str) -> None:
    code = "f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))"
    output = run(mode, code, SandboxLimits(file_bytes=2 * MIB))
    assert output.cause == "files"


def test_filling_the_disk_fails(mode: str) -> None:
    code = "for i in range(100000): open(f'{i}', 'wb').write(bytes(1 << 19))"
    output = run(mode, code, SandboxLimits(wall_s=60, disk_bytes=8 * MIB))
    assert output.cause == "files"


def test_the_number_of_files_is_limited(mode: str) -> None:
    code = """
import itertools, os, time
for i in itertools.count():
    if i < 400: os.mkdir(str(i))
    else: time.sleep(0.01)
"""
    output = run(mode, code, SandboxLimits(wall_s=60, files=300))
    assert output.cause == "files", "it ends long before its time"
    assert "300 files" in output.text


def test_installed_packages_are_hidden_in_bubblewrap() -> None:
    code = """
import os
print([p for folder, names, _ in os.walk('/') if folder.endswith('-packages') for p in names])
import ctypes, json, sqlite3
"""
    assert run("bubblewrap", code).text == "[]\n"


def test_network_is_out_of_reach(mode: str) -> None:
    async def isolated(box: PythonSandbox) -> bool:
        return box.confinement.isolates_network

    if not in_sandbox(mode, isolated):
        pytest.skip("this mode promises no network isolation here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        output = run(mode, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert output.cause == "error"
    assert "OSError" in output.text or "ConnectionRefusedError" in output.text


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/status", "/root", "/home", "/etc", "/proc/1", "/var", "/sys"]
)
def test_files_of_the_host_are_out_of_reach_in_bubblewrap(path: str) -> None:
    code = f"import os\nprint(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())"
    output = run("bubblewrap", code)
    assert output.cause == "error"
    assert "FileNotFoundError" in output.text


def test_nothing_but_the_private_places_is_writable_in_bubblewrap() -> None:
    code = """
import os
from pathlib import Path
for folder in [*Path('/').rglob('*')]:
    if folder.is_dir() and not folder.is_symlink() and folder.parts[1] != 'tmp' and folder != Path('/dev/shm'):
        try:
            (folder / 'mine').write_text('x')
        except OSError:
            continue
        print(folder)
"""
    assert run("bubblewrap", code, SandboxLimits(wall_s=60, cpu_s=60)).text == ""


def test_system_calls_that_leak_are_refused_in_bubblewrap() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), ctypes.get_errno())
print(libc.shmget(0, 4096, 0o1600), ctypes.get_errno())
try:
    os.memfd_create('x')
except OSError as error:
    print(error.errno)
"""
    assert run("bubblewrap", code).text == "-1 1\n-1 1\n1\n"


def test_only_sockets_of_the_network_namespace_can_be_made_in_bubblewrap() -> None:
    code = """
import socket
for name in ('AF_VSOCK', 'AF_NETLINK', 'AF_PACKET', 'AF_ALG', 'AF_UNIX', 'AF_INET', 'AF_INET6'):
    try:
        socket.socket(getattr(socket, name), socket.SOCK_DGRAM).close()
        print(name, 'made')
    except OSError as error:
        print(name, error.errno)
socket.socketpair()
"""
    refused = ["AF_VSOCK 1", "AF_NETLINK 1", "AF_PACKET 1", "AF_ALG 1"]
    made = ["AF_UNIX made", "AF_INET made", "AF_INET6 made"]
    assert run("bubblewrap", code).text.splitlines() == refused + made


def test_signals_reach_nobody_outside(mode: str) -> None:
    code = f"import os\nos.kill({os.getpid()}, 0)"
    output = run(mode, code)
    if mode == "weak" and os.geteuid() != 0:
        pytest.skip("same user: this mode does not promise it")
    assert output.cause == "error"


def test_environment_is_empty_of_the_hosts_variables(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    names = run(mode, "import os\nprint(*os.environ)").text.split()
    allowed = {"HOME", "TMPDIR", "PATH", "LANG", "MALLOC_ARENA_MAX", "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}
    allowed |= {CPUS_VARIABLE, *THREAD_VARIABLES}
    assert set(names) <= allowed


def test_given_files_are_there_and_granted_cpus_are_told(mode: str) -> None:
    code = "import os\nprint(open('sub/a.txt').read(), os.environ['OMP_NUM_THREADS'], os.environ['HEDDLE_CPUS'])"
    assert run(mode, code, files={"sub/a.txt": "hello"}, cpus=3).text == "hello 3 3\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
def test_files_outside_the_directory_are_bad_input(path: str) -> None:
    with pytest.raises(BadInput, match="relative path"):
        asyncio.run(run_python("", files={path: ""}))


@pytest.mark.parametrize("name", ["wall_s", "memory_bytes", "processes"])
def test_limits_of_zero_are_bad_input(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        SandboxLimits(**{name: 0})


def test_unreadable_leavings_are_removed(mode: str) -> None:
    output = run(mode, "import os\nos.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0)")
    assert output.ok


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.3])
def test_cancellation_leaves_nothing(mode: str, after_s: float) -> None:
    async def body(box: PythonSandbox) -> None:
        before = traces_of_runs()
        task = asyncio.create_task(box.run("import time; time.sleep(600)", limits=LIMITS))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_gone(before)

    in_sandbox(mode, body)


def test_many_at_once_do_not_block_the_loop(mode: str) -> None:
    async def body(box: PythonSandbox) -> tuple[list[ToolOutput], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart = asyncio.create_task(beat())
        code = "import time; time.sleep(0.5); print({})"
        outputs = await asyncio.gather(*(box.run(code.format(i), limits=LIMITS) for i in range(60)))
        heart.cancel()
        return outputs, beats

    outputs, beats = in_sandbox(mode, body)
    assert [output.text for output in outputs] == [f"{i}\n" for i in range(60)]
    assert beats > 10


def test_run_python_detects_once_per_loop() -> None:
    async def both() -> list[ToolOutput]:
        return await asyncio.gather(run_python("print(1)"), run_python("print(2)"))

    assert [output.text for output in asyncio.run(both())] == ["1\n", "2\n"]
    assert sandbox_mode() in ("bubblewrap", "weak")


def test_runs_off_the_main_thread() -> None:
    answers: list[ToolOutput] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(run_python("print(1)"))))
    thread.start()
    thread.join()
    assert answers[0].ok


def test_without_a_working_mode_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(HeddleError, match="install the package `bubblewrap`"):
        asyncio.run(PythonSandbox.detect())


def test_death_of_the_parent_ends_the_run(mode: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from heddle_dask.sandbox.python_runner import PythonSandbox\n"
        "async def main():\n"
        "    box = await PythonSandbox.detect(only=sys.argv[1])\n"
        "    print('up', flush=True)\n"
        "    await box.run('import time; time.sleep(600)')\n"
        "asyncio.run(main())\n"
    )
    before = traces_of_runs()
    with subprocess.Popen([sys.executable, "-c", program, mode], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"

        def started() -> bool:
            return any(is_of_a_run(child.pid) for child in psutil.Process(parent.pid).children(recursive=True))

        deadline_s = time.monotonic() + 30
        while not started() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert started()
        time.sleep(1)  # past the start, where the death signal is not yet set
        folders = [trace for trace in traces_of_runs() - before if isinstance(trace, str)]
        parent.kill()
    for folder in folders:
        assert mode == "weak"  # which says that its directory stays
        shutil.rmtree(folder)
    assert_gone(before)
