"""How a command of a sandbox of an image is started: as the image's user, in its folder, with its variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from heddle_dask.core.errors import HeddleError
from heddle_dask.isolation.granted import cpu_variables
from heddle_dask.sandbox.confinement import PreparedRun
from heddle_dask.sandbox.enclosure import Inside, enclosed
from heddle_dask.sandbox.images.writable_layer import limited
from heddle_dask.sandbox.stateful.contract import Command, SandboxSpec
from heddle_dask.sandbox.stateful.image_directory import ImageDirectory
from heddle_dask.sandbox.stateful.kinds import (
    BubblewrapKind,
    SandboxKind,
    behind_gateway,
    environment_of,
    folders_of,
    limits_of,
    shell_of,
)
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The agent may have deleted the folder: the next command must still run.
_IN_FOLDER = 'cd -- "$1" 2>/dev/null || cd /; exec /bin/sh -c "$0"'
_OWN = ("HOME", "PATH", "LANG", "TERM", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "MALLOC_ARENA_MAX")
# Those of the root of a container, as far as they concern its own files and processes.
_OF_ROOT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")


class ImageKind:
    """Bubblewrap in the namespaces of the sandbox's writable layer, as root and as an ordinary user alike."""

    name = "bubblewrap"

    def __init__(self, kind: SandboxKind) -> None:
        if not isinstance(kind, BubblewrapKind):
            raise HeddleError("sandbox: an image needs the kind bubblewrap: install the package bubblewrap")
        self._program = kind.program
        self.private_user = kind.private_user

    @contextmanager
    def prepare(self, command: Command, files: WorkDirectory, spec: SandboxSpec) -> Iterator[PreparedRun]:
        assert isinstance(files, ImageDirectory)
        image = files.image
        own = {name: value for name, value in environment_of(command, image.home, _PATH).items() if name in _OWN}
        # Not in the environment of bubblewrap itself: the image would choose what is loaded into it (LD_PRELOAD).
        variables = {**own, **dict(image.environment), **cpu_variables(command.cpus)}
        found = Inside(
            root=("--bind", files.layer.inside, "/"),
            writable=folders_of(spec) + tuple(each for pair in variables.items() for each in ("--setenv", *pair)),
            folder="/",
            command=("/bin/sh", "-c", _IN_FOLDER, shell_of(command)[-1], image.directory),
            shared_memory_bytes=spec.memory_bytes // 2,
            uid=image.uid,
            gid=image.gid,
            capabilities=tuple(f"CAP_{each}" for each in _OF_ROOT) if image.uid == 0 else (),
            network=spec.network or bool(spec.gateway),
            read_only=False,
        )
        limits = limits_of(spec, own_processes=2)
        enter = (*files.enter(), *limited(limits.pop("RLIMIT_NPROC")))
        with enclosed(self._program, found, user_namespace=True) as made:
            # As root before it becomes the user of images, who may not be able to run this Python.
            argv = (
                behind_gateway(spec, (*enter, *made.argv))
                if self.private_user
                else (*enter, *behind_gateway(spec, made.argv))
            )
            yield PreparedRun(
                argv, {}, rlimits=limits, wrapper_processes=2, pass_fds=made.pass_fds, gateway=spec.gateway
            )
