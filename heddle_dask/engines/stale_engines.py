"""Ends what engines of dead owners have left behind: processes, records and sockets."""

from __future__ import annotations

import json
import os
import socket
import stat

from heddle_dask.engines import watchdog

_HOST = os.uname().nodename


def kill_stale(records: str) -> list[int]:
    """Kill the processes left by engines of dead owners; returns the pids of those engines.

    A record is believed only as far as it can do no harm: it must be a file of this user, and a process is killed only
    if it carries the record's mark, or is in the session of a leader that does.

    Parameters
    ----------
    records
        Directory of the records. Those of living owners are left alone; spent ones are removed, with their sockets.
    """
    killed: list[int] = []
    try:
        names = sorted(os.listdir(records))
    except FileNotFoundError:
        return killed
    for name in names:
        if not (name.startswith("engine-") and name.endswith(watchdog.RECORD_SUFFIX)):
            continue
        path = os.path.join(records, name)
        mark = name.removeprefix("engine-").removesuffix(watchdog.RECORD_SUFFIX)
        try:
            record = _own_record(path)
            if record is None:
                continue
            engine, engine_started = int(record["engine"]), int(record["engine_started"])
            owner, owner_started = int(record["owner"]), int(record["owner_started"])
            boot_id = record["boot_id"]
            if record.get("host", _HOST) != _HOST:
                continue  # the directory is shared with another machine or a container
            broken = not mark or record["mark"] != mark
        except (ValueError, OverflowError, KeyError, TypeError):
            broken = True  # half-written when the machine went down: names no process
        if not broken and boot_id == watchdog.boot_id():
            if watchdog.start_time(owner) == owner_started:
                continue
            # Pids are reused: the session counts only if its leader is the recorded engine, and carries the mark.
            leads = watchdog.start_time(engine) == engine_started and watchdog.carries_mark(engine, mark)
            if watchdog.kill_tree(engine if leads else 0, mark):
                killed.append(engine)
            if _answers(os.path.join(records, watchdog.socket_name(mark))):
                continue  # an engine in another PID namespace, where its owner may live
        watchdog.remove_files(records, mark)
    return killed


def _answers(path: str) -> bool:
    """Whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _own_record(path: str) -> dict[str, int | str] | None:
    """The content of a record; None when it is gone, is a link, or belongs to another user.

    Raises
    ------
    ValueError, TypeError
        It is no JSON object.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(handle, encoding="utf-8") as file:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            return None
        return dict(json.load(file))
