"""A short Dockerfile carried out in a sandbox: an image at hand, and what is done to it when a sandbox is set up.

Only what needs no builder: ``FROM`` one image, ``WORKDIR``, ``ENV``, ``ARG`` with a default, ``COPY`` from the folder,
and ``RUN``, which has no network. Images that need more are built elsewhere.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from heddle_dask.core.errors import HeddleError
from heddle_dask.environments.task_sets.box_files import archive_of, command_in

MOST_COPIED_BYTES = 8 << 20
"""Most that all `COPY` together may bring: the files travel with each new sandbox."""
_IGNORED = ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_NETWORK = re.compile(r"\b(apt-get|apt|apk|yum|dnf|pip3?|npm|curl|wget|git clone|cargo|go get|uv)\b")


class NotCarriedOut(HeddleError):
    """A Dockerfile that needs a builder; the message says why."""


@dataclass
class SetUp:
    """What makes a sandbox of an image into that of the Dockerfile.

    Attributes
    ----------
    image
        Name of its image, as ``FROM`` has it.
    files
        By their paths in the sandbox.
    commands
        For the setup, in order.
    directory
        Last ``WORKDIR``; empty: that of the image.
    """

    image: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    directory: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def carried_out(path: Path) -> SetUp:
    """Read a Dockerfile; the folder where it is has what it copies.

    Raises
    ------
    NotCarriedOut
        It does what only a builder does.
    """
    made = SetUp()
    arguments: dict[str, str] = {}
    for word, rest in _instructions(path.read_text()):
        if word in _IGNORED:
            continue
        if word == "USER" and rest in ("root", "0"):
            continue
        if word not in (*_STEPS, "ARG"):
            raise NotCarriedOut(f"its Dockerfile has {word} {rest[:60]}")
        if not made.image and word not in ("FROM", "ARG"):
            raise NotCarriedOut("its Dockerfile does not begin with FROM")
        if word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = _unquoted(value)
            continue
        # The shell fills in what a command has.
        told = rest if word == "RUN" else _filled(rest, {**arguments, **made.variables})
        _STEPS[word](made, told, path.parent)
    if not made.image:
        raise NotCarriedOut("its Dockerfile has no FROM")
    return made


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word.upper(), rest.strip()))
    return found


def _from(made: SetUp, rest: str, folder: Path) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    if made.image or len(words) != 1:
        raise NotCarriedOut("its Dockerfile has several stages")
    made.image = words[0]


def _workdir(made: SetUp, rest: str, folder: Path) -> None:
    made.directory = str(PurePosixPath(made.directory or "/", _unquoted(rest)))
    made.commands.append(f"mkdir -p {shlex.quote(made.directory)}")


def _env(made: SetUp, rest: str, folder: Path) -> None:
    first, _, others = rest.partition(" ")
    if "=" not in first:
        made.variables[first] = _unquoted(others.strip())
        return
    for pair in shlex.split(rest):
        name, _, value = pair.partition("=")
        made.variables[name] = value


def _run(made: SetUp, rest: str, folder: Path) -> None:
    if rest.startswith("--"):
        raise NotCarriedOut(f"its Dockerfile has RUN {rest.split()[0]}")
    if "<<" in rest:
        raise NotCarriedOut("its Dockerfile has RUN with a text in the file")
    if found := _NETWORK.search(rest):
        raise NotCarriedOut(f"its Dockerfile runs {found.group()}, which needs a network")
    command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
    made.commands.append(command_in(command, made.directory, made.variables))


def _copy(made: SetUp, rest: str, folder: Path) -> None:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    flags = [word for word in words if word.startswith("--") and not word.startswith("--chown")]
    *sources, target = [word for word in words if not word.startswith("--")]
    if flags or not sources:
        raise NotCarriedOut(f"its Dockerfile has COPY {rest[:60]}")
    place = PurePosixPath(made.directory or "/", target)
    into = target.endswith("/") or target == "." or len(sources) > 1
    entries = [entry for source in sources for entry in _entries(folder, source, place, into)]
    content = archive_of((path, str(name).lstrip("/")) for path, name in entries)
    if len(content) + sum(map(len, made.files.values())) > MOST_COPIED_BYTES:
        raise NotCarriedOut(f"its Dockerfile copies more than {MOST_COPIED_BYTES >> 20} MiB")
    name = f"/tmp/.heddle-copy-{len(made.files)}.tar"
    made.files[name] = content
    made.commands.append(f"tar -xf {name} -C / && rm -f {name}")


def _entries(folder: Path, source: str, place: PurePosixPath, into: bool) -> list[tuple[Path, PurePosixPath]]:
    """What a source of `COPY` is, and where each goes: the content of a folder, or the file itself."""
    inside = source.lstrip("/").removeprefix("./")
    if ".." in PurePosixPath(inside).parts:
        raise NotCarriedOut(f"its Dockerfile copies {source}, which is outside its folder")
    found = [folder] if inside in ("", ".") else sorted(folder.glob(inside))
    if not found:
        raise NotCarriedOut(f"its Dockerfile copies {source}, which is not there")
    entries: list[tuple[Path, PurePosixPath]] = []
    for path in found:
        if path.is_dir():
            entries += [(each, place / each.name) for each in sorted(path.iterdir())]
        else:
            entries.append((path, place / path.name if into or len(found) > 1 else place))
    return entries


def _filled(text: str, values: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda m: values.get(m[1] or m[3], m[2] or ""), text)


def _unquoted(text: str) -> str:
    return " ".join(shlex.split(text))


_STEPS: dict[str, Callable[[SetUp, str, Path], None]] = {
    "FROM": _from,
    "WORKDIR": _workdir,
    "ENV": _env,
    "RUN": _run,
    "COPY": _copy,
}
