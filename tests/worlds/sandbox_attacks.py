"""The one table of attacks, run against one kind of sandbox: ``python sandbox_attacks.py KIND DIRECTORY FACTS``.

A script, so that it runs as any user; it needs the package and, for the kind ``remote``, aiohttp. It prints one JSON
object: what came of each row. What must come of it is in ``tests/sandbox/test_attacks.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle_dask.sandbox.outcome import SandboxLimits
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.python_runner import PythonSandbox
from heddle_dask.sandbox.stateful.contract import Command, SandboxFailed, SandboxSpec, StatefulSandbox
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox

MIB = 1 << 20
MEMORY, DISK, FILES, PROCESSES, OUTPUT = 96 * MIB, 8 * MIB, 400, 24, 4000
SPEC = SandboxSpec(memory_bytes=MEMORY, disk_bytes=DISK, max_files=FILES, max_processes=PROCESSES, output_bytes=OUTPUT)
LIMITS = SandboxLimits(
    wall_s=30.0,
    cpu_s=30.0,
    memory_bytes=MEMORY,
    file_bytes=DISK,
    disk_bytes=DISK,
    files=FILES,
    processes=PROCESSES,
    output_bytes=OUTPUT,
)

# Each line of this program is tried; it prints what each came to: "done", or the name of the error.
PROBES = """
import ctypes, json, os, platform, signal, socket, sys
sys.argv = ["probes"]
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
FACTS = {facts}

def call(x86_number, arm_number, *values):
    if libc.syscall(x86_number if x86 else arm_number, *values) < 0:
        raise OSError(ctypes.get_errno(), "")

def new_user_by_clone():
    pid = libc.syscall(56 if x86 else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "")
    os.waitpid(pid, 0)

def connect(family, address):
    with socket.socket(family) as each:
        each.settimeout(2)
        each.connect(address)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def fill(path, size):
    try:
        with open(path, "wb") as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
    finally:
        if os.path.exists(path):
            os.unlink(path)

def use_locks_and_pools():
    import multiprocessing
    fork = multiprocessing.get_context("fork")
    fork.Lock()
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]

def inherited():
    for number in range(3, 64):
        try:
            facts = os.fstat(number)
        except OSError:
            continue
        if facts.st_rdev != os.makedev(1, 3):  # the program's own /dev/null
            return
    raise OSError(9, "")

def told(name):
    if name not in os.environ:
        raise KeyError(name)

def must(value):
    if not value:
        raise AssertionError

def dgram(name):
    socket.socket(getattr(socket, name), socket.SOCK_DGRAM).close()

buffer = ctypes.create_string_buffer(256)
tries = dict(
    open_files_of_host=inherited,
    filter_is_on=lambda: must(libc.prctl(21, 0, 0, 0, 0) == 2),
    no_new_privileges=lambda: must(libc.prctl(39, 0, 0, 0, 0) == 1),
    locks_and_pools=use_locks_and_pools,
    user_namespace=lambda: call(272, 97, 0x10000000),
    user_namespace_by_clone=new_user_by_clone,
    mount=lambda: call(165, 40, b"none", b"/tmp", b"tmpfs", 0, None),
    chroot=lambda: call(161, 51, b"/tmp"),
    setns=lambda: call(308, 268, 0, 0),
    memory_file=lambda: call(319, 279, b"x", 0),
    secret_memory=lambda: call(447, 447, 0),
    system_v_memory=lambda: call(29, 194, 0, 4096, 0o1600),
    message_queue=lambda: call(240, 180, b"x", 0o102, 0o600, None),
    io_uring=lambda: call(425, 425, 1, buffer),
    add_key=lambda: call(248, 217, b"user", b"x", b"y", 1, -3),
    key_of_others=lambda: call(250, 219, 0, -3, 0),
    ptrace=lambda: call(101, 117, 0, 0, 0, 0),
    memory_of_others=lambda: call(310, 270, os.getpid(), None, 0, None, 0, 0),
    bpf=lambda: call(321, 280, 0, buffer, 128),
    perf=lambda: call(298, 241, buffer, 0, -1, -1, 0),
    userfaultfd=lambda: call(323, 282, 1),
    personality=lambda: call(135, 92, 0x0040000),
    vsock=lambda: dgram("AF_VSOCK"),
    netlink=lambda: dgram("AF_NETLINK"),
    packet=lambda: dgram("AF_PACKET"),
    crypto=lambda: dgram("AF_ALG"),
    loopback_of_host=lambda: connect(socket.AF_INET, ("127.0.0.1", FACTS["port"])),
    abstract_socket_of_host=lambda: connect(socket.AF_UNIX, FACTS["abstract"]),
    become_root=lambda: os.setuid(0),
    file_of_host=lambda: open(FACTS["secret"]).close(),
    accounts_of_host=lambda: open("/etc/shadow").close(),
    home_of_root=lambda: os.listdir("/root/.ssh"),
    process_of_host=lambda: os.kill(FACTS["pid"], 0),
    facts_of_host_process=lambda: os.listdir("/proc/%d" % FACTS["pid"]),
    system_of_host=lambda: os.listdir("/sys/class"),
    variable_of_host=lambda: told("HEDDLE_ATTACK_SECRET"),
    terminal=lambda: open("/dev/tty").close(),
    write_usr=lambda: write("/usr/x"),
    write_etc=lambda: write("/etc/x"),
    write_root=lambda: write("/x"),
    write_devices=lambda: write("/dev/x"),
    write_kernel=lambda: write("/proc/sys/kernel/core_pattern"),
    fill_shared_memory=lambda: fill("/dev/shm/x", {memory}),
)
came = dict()
for name, attempt in tries.items():
    try:
        attempt()
        came[name] = "done"
    except BaseException as error:
        came[name] = type(error).__name__
print(json.dumps(came), flush=True)
"""

_CHILDREN = """
import ctypes, mmap, os, signal, socket, threading, time
def children(count, what):
    for number in range(count):
        if os.fork() == 0:
            what(number)
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""
# Each is to end at a limit; the value: the program, and the limits that it may end at.
BOMBS: Mapping[str, str] = {
    "fork_bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "memory_of_one": "x = bytearray(10 << 30)",
    "memory_of_four": "children(4, lambda n: globals().update(x=bytearray(36 << 20)))",
    "memory_shared_by_nobody": """
def grow(number):
    kept = mmap.mmap(-1, 36 << 20)
    for at in range(0, 36 << 20, 4096): kept[at] = 1
    globals().update(kept=kept)
children(4, grow)""",
    "memory_of_a_dead_first_thread": """
def grow(number):
    def hold():
        kept = bytearray(36 << 20)
        time.sleep(60)
    threading.Thread(target=hold, daemon=True).start()
    ctypes.CDLL(None).pthread_exit(None)
children(4, grow)""",
    "memory_unreadable": """
def grow(number):
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    globals().update(x=bytearray(36 << 20))
children(4, grow)""",
    "shared_memory": """
for number in range(5):
    with open('/dev/shm/%d' % number, 'wb') as file: file.write(bytes(8 << 20))
children(2, lambda n: globals().update(x=bytearray(36 << 20)))""",
    "files_in_shared_memory": """
for number in range(2000): open('/dev/shm/%d' % number, 'w').close()
time.sleep(60)""",
    "disk": "for number in range(10): open('f%d' % number, 'wb').write(bytes(4 << 20))\ntime.sleep(60)",
    "deleted_files": """
kept = [open('f', 'wb') for number in range(10) if not os.path.exists('f') or os.unlink('f') is None]
for each in kept: each.write(bytes(4 << 20)), each.flush()
time.sleep(60)""",
    "number_of_files": "for number in range(2000): open('%d' % number, 'w').close()\ntime.sleep(60)",
}
# Ends at its time: nothing in it obeys.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    while True: pass
if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    for number in range(3): os.close(number)
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).pthread_exit(None)
print('begun', flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
# Leaves things of every shape, and ends well.
LEAVINGS = """
for name in (b'\\xff\\xfe', b'new\\nline', b'-rf', b' ', b'$(x)'):
    os.mkdir(name), open(name + b'/' + name, 'w').close()
os.symlink('/etc', 'link'), os.symlink('loop', 'loop'), os.symlink('/', b'\\xfe'), os.mkfifo('fifo')
socket.socket(socket.AF_UNIX).bind('socket')
os.link(b'-rf/-rf', 'hard')
os.mkdir('closed'), open('closed/file', 'w').close(), os.chmod('closed', 0)
open('unreadable', 'w').close(), os.chmod('unreadable', 0)
print('left', flush=True)
"""
# Deeper than a path can be long; the time to delete it grows with the square of its depth.
DEEP = """
for _ in range(2100): os.mkdir('d'), os.chdir('d')
print('left', flush=True)
"""
OUTPUT_BOMB = "import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))"
KILL_ALL = "os.kill(-1, signal.SIGKILL)"

BUSY = "import os, time\nwhile True: [os.fork() or os._exit(0) for _ in range(1)], os.waitpid(-1, 0)\n# attack-busy"
GROWING = (
    _CHILDREN + "\nkept = []\nwhile len(kept) < 6: kept.append(bytearray(6 << 20)), time.sleep(0.02)\n"
    "children(2, lambda n: globals().update(x=bytearray(36 << 20)))\n# attack-growing"
)
FILLING = (
    "import time\nfor n in range(10): open('s%d' % n, 'wb').write(bytes(4 << 20)), time.sleep(0.05)\ntime.sleep(60)"
)


def states_of(word: str) -> dict[int, str]:
    """The states of the live processes on this machine whose command line has the word."""
    found = {}
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit() and word.encode() in (each / "cmdline").read_bytes():
                found[int(each.name)] = (each / "stat").read_text().rpartition(")")[2].split()[0]
    return {pid: state for pid, state in found.items() if state != "Z"}


async def attack_python_tool(mode: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    box = await PythonSandbox.detect(only=mode)  # type: ignore[arg-type]
    places = asyncio.Semaphore(3)

    async def run(code: str, limits: SandboxLimits = LIMITS) -> tuple[str, str]:
        async with places:
            output = await box.run(_CHILDREN + code, limits=limits)
            return output.cause, output.text

    rows = {**BOMBS, "output": OUTPUT_BOMB, "leavings": LEAVINGS, "deep": DEEP, "kill_all": KILL_ALL}
    skipped = facts["skipped"]
    short = SandboxLimits(**{**_plain(LIMITS), "wall_s": 1.5})
    names = [name for name in rows if name not in skipped]
    results = await asyncio.gather(run(probes(facts)), run(STUBBORN, short), *(run(rows[name]) for name in names))
    came: dict[str, Any] = {"probes": json.loads(results[0][1].splitlines()[-1]), "stubborn": results[1]}
    return {**came, **dict(zip(names, results[2:], strict=True))}


def _plain(limits: SandboxLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in SandboxLimits.__slots__}


def probes(facts: Mapping[str, Any]) -> str:
    return PROBES.replace("{facts}", repr(dict(facts))).replace("{memory}", str(MEMORY))


Make = Callable[[str], StatefulSandbox]


async def attack_stateful(make: Make, facts: Mapping[str, Any]) -> dict[str, Any]:
    rows = {**BOMBS, "output": OUTPUT_BOMB, "leavings": LEAVINGS, "deep": DEEP, "kill_all": KILL_ALL}
    names = [name for name in rows if name not in facts["skipped"]]
    came: dict[str, Any] = {}

    async def run(box: StatefulSandbox, code: str, timeout_s: float = 30.0) -> tuple[str, str]:
        await box.put("attack.py", (_CHILDREN + code).encode())
        result = await box.exec(Command("python3 -I -S -B attack.py", timeout_s))
        return result.ended_by or ("" if result.ok else "error"), result.stdout + result.stderr

    async def bombs(part: int) -> None:
        box = make(f"bombs {part}")
        await box.start()
        for name in names[part::3]:
            came[name] = await run(box, rows[name])
            # What is left of it is in nobody's way: the next command of the same sandbox is fine.
            if "memory" in name or name in ("fork_bomb", "output", "kill_all"):
                continue
            cleaned = await box.exec(Command("chmod -R u+rwX . ; rm -rf -- ./* && echo clean", 20.0))
            came[f"after {name}"] = cleaned.stdout.strip() or repr(cleaned)
        if part == 0:
            came["probes"] = json.loads((await run(box, probes(facts)))[1].splitlines()[-1])
            came["stubborn"] = await run(box, STUBBORN, 1.5)
            came["links"] = await refused_links(box)
        # What a sandbox is stopped with; one of them has the deep one too.
        await run(box, LEAVINGS + DEEP if part == 0 else LEAVINGS)
        await box.stop()

    await asyncio.gather(bombs(0), bombs(1), bombs(2), attack_by_services(make, came))
    return came


async def refused_links(box: StatefulSandbox) -> int:
    await box.exec(Command("ln -s /etc/passwd passwd; ln -s /etc etc; mkfifo pipe; ln -s /proc/self/mem mem"))
    refused = 0
    for path in ("passwd", "etc/passwd", "pipe", "mem"):
        try:
            await box.get(path)
        except SandboxFailed:
            refused += 1
    return refused


async def attack_by_services(make: Make, came: dict[str, Any]) -> None:
    """Services, one after the other in one sandbox: frozen between actions, and under the limits of the sandbox."""
    box = make("services")
    await box.start()
    await box.put("busy.py", BUSY.encode())
    seen: dict[str, None] = {}
    for number in range(3):
        await box.exec(Command("exec python3 -I -S busy.py attack-busy", service=f"busy{number}"))
        seen.update(dict.fromkeys(states_of("attack-busy").values()))
    for _ in range(2):
        await box.exec(Command("sleep 0.1"))
        seen.update(dict.fromkeys(states_of("attack-busy").values()))
    came["states of services between actions"] = sorted(seen)
    came["services"] = len(states_of("attack-busy")) >= 3
    await box.stop()
    box = make("limits of services")
    await box.start()
    for name, code in (("growing.py", GROWING), ("filling.py", FILLING)):
        await box.put(name, code.encode())
    await box.exec(Command("exec python3 -I -S growing.py attack-growing", service="growing"))
    begun_s = time.monotonic()
    await box.exec(Command("sleep 0.2"))  # it has begun
    while states_of("attack-growing") and time.monotonic() < begun_s + 20:
        await box.exec(Command("true"))  # of which each alone is too short for a look
    came["services over their memory"] = len(states_of("attack-growing"))
    await box.exec(Command("exec python3 -I -S filling.py attack-filling", service="filling"))
    came["disk of a service"] = (await box.exec(Command("sleep 20"))).ended_by
    came["the command after it"] = (await box.exec(Command("rm -f s* && sleep 0.3 && echo fine"))).stdout
    await box.stop()


async def with_stateful(
    kind: str, directory: Path, body: Callable[[Make], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    if kind != "remote":
        accounting = ProcessAccounting()
        spec = replace(SPEC, image=str(directory.parent / "image.tar")) if kind == "image" else SPEC
        found = kind_named("bubblewrap" if kind == "image" else kind)
        return await body(lambda name: LocalSandbox(name, spec, found, directory, accounting))
    from aiohttp import web

    from heddle_dask.sandbox_service.client import RemoteSandbox
    from heddle_dask.sandbox_service.server import SandboxServer

    runner = web.AppRunner(SandboxServer(directory, "token").application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await body(lambda name: RemoteSandbox(address, "token", SPEC))
    finally:
        await runner.cleanup()


async def main(kind: str, directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    if kind.startswith("python "):
        return await attack_python_tool(kind.removeprefix("python "), facts)
    came = await with_stateful(kind, directory, lambda make: attack_stateful(make, facts))
    return {**came, "directories": sorted(each.name for each in directory.iterdir())}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])))))
