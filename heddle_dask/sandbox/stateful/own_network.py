"""The program that starts a command in a network of its own, with one address that leads out of it.

The network has a loopback and nothing else. On it a socket listens before the command begins; the socket goes to the
supervisor of the command (`supervisor`), which is outside and forwards each connection (`forwarder`). So nothing of it
runs or lies in the sandbox, whose image may have no Python.

Imports the standard library only; `source()` is run with ``python -I -S -c SOURCE PORT COMMAND…``. Standard input is
the socket to the supervisor.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_WAITING = 4096


def leave_network() -> None:
    """Enter a new network; without the right to make one, in a user namespace in which all users are as before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.unshare(_NEW_NETWORK):
        return
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(content)


def listening(port: int) -> socket.socket:
    """A socket that listens on the loopback of this network, which is switched on first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(_WAITING)
    return listener


def main() -> None:
    """Make the network, hand the socket out, become the command."""
    try:
        leave_network()
        with listening(int(sys.argv[1])) as listener, socket.socket(fileno=os.dup(0)) as supervisor:
            socket.send_fds(supervisor, [b"listening"], [listener.fileno()])
    except OSError as error:
        sys.exit(f"sandbox: no network of its own on this machine, which a gateway needs: {error.strerror}")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(sys.argv[2], sys.argv[2:])


def source() -> str:
    """Text of this file with the call that starts it."""
    with open(__file__, encoding="utf-8") as file:
        return file.read() + "\nmain()\n"
