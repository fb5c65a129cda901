"""The seccomp filter of every sandbox: refuses system calls that tool programs do not need.

Refused are: new namespaces and mounts (a user namespace would allow an unlimited tmpfs), memory that no limit counts
(System V shared memory, memfd), io_uring (it bypasses seccomp), and interfaces with a large kernel attack surface
(ptrace, bpf, keys, perf, userfaultfd). Sockets are of the families AF_UNIX, AF_INET and AF_INET6 only: some others,
such as AF_VSOCK, do not belong to a network namespace. Refused calls fail with EPERM; `clone3` fails with ENOSYS, so
that the C library falls back to `clone`, which has flags that a filter can read.
"""

from __future__ import annotations

import functools
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# Numbers from the kernel's tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
# Numbers from 424 on are equal on all architectures.
_SAME_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "memfd_secret": 447,
}
_REFUSED = {
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "ptrace": 101,
        "personality": 135,
        "pivot_root": 155,
        "chroot": 161,
        "mount": 165,
        "umount2": 166,
        "mq_open": 240,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "chroot": 51,
        "personality": 92,
        "unshare": 97,
        "kexec_load": 104,
        "ptrace": 117,
        "mq_open": 180,
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
    },
}
# For the root of a user namespace with one user: programs such as tar and dpkg give files to others, and end if they
# cannot.
_CHANGES_OF_OWNER = {
    "x86_64": (92, 93, 94, 116, 260),  # chown, fchown, lchown, setgroups, fchownat
    "aarch64": (54, 55, 159),  # fchownat, fchown, setgroups
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACE_FLAGS = 0x7E020000

_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | 1
_SUCCESS = 0x00050000
_ENOSYS = 0x00050000 | 38
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


@functools.cache
def filter_program(*, one_owner: bool = False) -> bytes:
    """The filter for this machine; ``b""`` for an unknown one.

    Parameters
    ----------
    one_owner
        Whether calls that change the owner of a file do nothing, and succeed.
    """
    machine = platform.machine()
    if machine not in _REFUSED:
        return b""
    refused = sorted([*_REFUSED[machine].values(), *_SAME_EVERYWHERE.values()])
    # Each test is followed by its return instruction, which is skipped if the test fails.
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 variants of all calls
        program += [(_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for number in _CHANGES_OF_OWNER[machine] if one_owner else ():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _SUCCESS)]
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    for number in _SOCKET_CALLS[machine]:
        # The kernel reads the family as an int: the low half of the argument, which is loaded here.
        program += [(_EQUAL, 0, len(_SOCKET_FAMILIES) + 3, number), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        for place, family in enumerate(_SOCKET_FAMILIES):
            program += [(_EQUAL, len(_SOCKET_FAMILIES) - place, 0, family)]
        program += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    program += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


@contextmanager
def filter_fd(*, one_owner: bool = False) -> Iterator[int | None]:
    """An open file with the filter for this machine, to be read once; None without a filter."""
    program = filter_program(one_owner=one_owner)
    if not program:
        yield None
        return
    # The filter (below 1 KiB) fits into the pipe's buffer, so writing cannot block.
    reading, writing = os.pipe()
    try:
        os.write(writing, program)
    finally:
        os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)
