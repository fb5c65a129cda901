"""The program inside the sandbox that runs the agent's code. Imports only the standard library.

`source()` returns the text of this file, which the confined interpreter runs with `-c`. It reads its order (a
marshalled dict) from standard input, lowers its limits, gives up its user id if ordered to, and then compiles and
runs the agent's code. This code is no security boundary: the boundaries are resource limits, namespaces and user ids,
which the agent's code cannot undo.

Keys of the order: ``limits`` (dict from name of `resource.RLIMIT_*` to value), ``uid`` (int or None), ``calls_filter``
(bytes; empty where the confinement has one), ``files`` (dict from relative path to text), ``code`` (str), and ``calls``
(None, or a dict with ``function`` and ``arguments``, a list of encoded argument tuples).
"""

from __future__ import annotations

import marshal
import os
import resource
import sys

# Not imported from `typing`, which would take several milliseconds per run; mypy knows this name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXIT_MEMORY = 240
EXIT_FILES = 241
EXIT_PROCESSES = 242
READY = b"\0"


def encode(value: Any) -> Any:
    """Encode a value of plain built-in types as JSON-able lists, which preserve tuples, sets and int keys."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["b", value.hex()]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__[0] + "*", [encode(item) for item in value]]
    if kind is dict:
        return ["d*", [[encode(key), encode(item)] for key, item in value.items()]]
    raise TypeError(f"value of type {kind.__name__} cannot leave the sandbox")


def decode(data: Any) -> Any:
    """Inverse of `encode`; raises ValueError, TypeError, KeyError or IndexError on anything else."""
    if data is None or type(data) in (bool, str):
        return data
    kind, *rest = data
    if kind == "i":
        return int(rest[0], 16)
    if kind == "f":
        return float.fromhex(rest[0])
    if kind == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind == "b":
        return bytes.fromhex(rest[0])
    if kind == "d*":
        return {decode(key): decode(item) for key, item in rest[0]}
    makers = {"l*": list, "t*": tuple, "s*": set, "f*": frozenset}
    return makers[kind](decode(item) for item in rest[0])


def confine(order: dict[str, Any]) -> None:
    """Lower all limits and give up the user id, irrevocably."""
    for name, value in order["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # A soft CPU limit below the hard one gives SIGXCPU, which differs from other kills.
        soft = value - 1 if name == "RLIMIT_CPU" and value > 1 else value
        resource.setrlimit(kind, (soft, value))
    uid = order["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if order["calls_filter"]:
        refuse_calls(order["calls_filter"])


def refuse_calls(program: bytes) -> None:
    """Set the filter of system calls, irrevocably."""
    import ctypes

    class _Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, more in ((38, 1, 0), (22, 2, ctypes.byref(_Filter(len(program) // 8, program)))):
        if libc.prctl(option, value, more, 0, 0):  # no new privileges, which a filter needs; a filter
            raise OSError(ctypes.get_errno(), "no filter of system calls")


def write_files(files: dict[str, str]) -> None:
    """Write the given texts into the private directory, which is the current one."""
    for path, text in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def exit_code(error: BaseException) -> int:
    """Exit status that encodes the limit behind an uncaught exception."""
    if isinstance(error, MemoryError):
        return EXIT_MEMORY
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and number in (27, 28, 122):  # EFBIG, ENOSPC, EDQUOT
        return EXIT_FILES
    if isinstance(error, BlockingIOError) and number == 11:  # EAGAIN: fork refused
        return EXIT_PROCESSES
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return EXIT_PROCESSES
    return 1


def fresh_main() -> dict[str, Any]:
    """A new, empty ``__main__`` module for the agent's code."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    return module.__dict__


def run_program(code: str) -> None:
    """Run the code as a script; tracebacks start at the script's first frame."""
    space = fresh_main()
    try:
        exec(compile(code, "main.py", "exec"), space)
    except SystemExit:
        raise
    except BaseException as error:
        frame = error.__traceback__
        error.__traceback__ = frame.tb_next if frame else None
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(exit_code(error))


def run_calls(code: str, calls: dict[str, Any]) -> None:
    """Call one function of the code on each argument tuple and send one JSON line per call.

    The lines are written to a duplicate of standard output; output of the code is discarded. Results are compared
    outside: the expected values are never in here.
    """
    import json

    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def send(index: int, key: str, value: Any) -> None:
        out.write(json.dumps([index, key, value]) + "\n")
        out.flush()

    space = fresh_main()
    try:
        exec(compile(code, "main.py", "exec"), space)
        function = space[calls["function"]]
    except BaseException as error:
        send(-1, "e", describe(error))
        return
    for index, data in enumerate(calls["arguments"]):
        try:
            send(index, "r", encode(function(*decode(data))))
        except BaseException as error:
            send(index, "e", describe(error))


def describe(error: BaseException) -> str:
    """One line for an exception, at most 300 characters."""
    return f"{type(error).__name__}: {error}"[:300]


def source() -> str:
    """Text of this file with the call that starts it, for ``python -c``."""
    with open(__file__, encoding="utf-8") as file:
        return file.read() + "\nmain()\n"


def main() -> None:
    """Read the order, apply the limits, run the code.

    The order is sent after the first byte of output. By then every wrapper process has set its parent-death signal: a
    worker killed earlier never sends the order, and a worker killed later takes this process with it.
    """
    os.write(1, READY)
    order = marshal.loads(sys.stdin.buffer.read())
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    confine(order)
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        line_buffering=True, encoding="utf-8", errors="replace"
    )
    write_files(order["files"])
    if order["calls"] is not None:
        run_calls(order["code"], order["calls"])
        return
    write_files({"main.py": order["code"]})
    run_program(order["code"])
