"""What is known of an agent that is a command: how it is installed, started, configured, and how its answer is read.

Those of known agents are files of this package (`known_agents`); a user's own is a TOML file of the same form. Every
error is one line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.needs import Needs
from heddle_dask.core.toml_table import read_toml, unknown_key

DIALECTS = ("chat", "responses", "messages")
PLACES = ("instruction", "instruction_file", "model", "url", "key", "folder")
"""What stands in braces in `command`, `stdin`, `environment` and `files`."""
INSTRUCTION_FILE = "/tmp/instruction.md"
STDOUT = "stdout"
MOST_BYTES = 120_000
"""Of the command with its instruction and its files: the kernel takes no longer one (128 KiB)."""

_DIRECTORY = Path(__file__).parents[1] / "agents"
_PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_END = "END-OF-THIS-FILE"


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """An agent that is a command.

    Attributes
    ----------
    name
        Stored with each trajectory.
    command
        Program and arguments. What `PLACES` names in braces is filled in: the instruction, the path of a file with it,
        the name of the model, URL and key of the gateway, and the folder in which the agent is installed.
    stdin
        Text for its standard input; empty: nothing comes.
    environment
        Variables besides those of the gateway (`AgentGateway.environment`), and in place of them.
    files
        Contents of files that are written before it starts, by absolute path.
    folder
        In which it is installed, on every machine with tool workers; it can be read at the same path in the sandbox.
        Empty: it is among the tools of the machine, or in the task's image.
    path
        Folders below `folder` in which its programs are.
    answer
        Where it says its answer: ``"stdout"``, or an absolute path; empty: nowhere.
    answer_key
        Of the JSON object that is the last line there; empty: the whole text is the answer.
    keep
        Absolute paths of files that are recorded when it has ended, such as its own trajectory.
    memory
        What it needs at least, with its tools.
    limit_s
        Seconds that it has, where the task says nothing.
    model
        Name of the model, which it asks the gateway for.
    install
        Command lines that install it, for people.
    version
        With which this description was tried.
    dialect
        The API that it speaks, one of `DIALECTS`; for people.

    Raises
    ------
    BadInput
    """

    name: str
    command: tuple[str, ...]
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    path: tuple[str, ...] = ()
    answer: str = ""
    answer_key: str = ""
    keep: tuple[str, ...] = ()
    memory: int | str = "1 GiB"
    limit_s: float = 1800.0
    model: str = "heddle"
    install: tuple[str, ...] = ()
    version: str = ""
    dialect: str = ""

    def __post_init__(self) -> None:
        where = f"agent {self.name!r}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise BadInput(f"agent: name is {self.name!r}: use letters, digits, '.', '_' and '-'")
        _check_kinds(self, where)
        if not self.command or not self.command[0]:
            raise BadInput(f"{where}: command is empty: give the program and its arguments, as a list")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise BadInput(f"{where}: environment: {name!r} is no name of a variable")
        places = [*self.files, *self.keep, *((self.answer,) if self.answer not in ("", STDOUT) else ())]
        for path in [*places, *((self.folder,) if self.folder else ())]:
            if not path.startswith("/"):
                raise BadInput(f"{where}: {path!r} is no absolute path")
        if self.dialect not in ("", *DIALECTS):
            raise BadInput(f"{where}: dialect is {self.dialect!r}: use {', '.join(DIALECTS)}")
        if not (is_finite(self.limit_s) and self.limit_s > 0):
            raise BadInput(f"{where}: limit_s is {self.limit_s!r}: use seconds above 0")
        Needs(memory=self.memory)
        for text in [*self.command, self.stdin, *self.environment.values(), *self.files.values()]:
            for found in _PLACE.findall(text):
                if found not in PLACES:
                    raise BadInput(f"{where}: {{{found}}} is none of {', '.join(f'{{{each}}}' for each in PLACES)}")
        if not self.folder and any("{folder}" in text for text in self.command):
            raise BadInput(f"{where}: its command has {{folder}}: give the folder in which it is installed")

    def shell_text(
        self, instruction: str, variables: Mapping[str, str], *, url: str, key: str, directory: str = ""
    ) -> str:
        """The command of a shell that configures and starts it.

        Parameters
        ----------
        variables
            Environment variables, before its own.
        directory
            In which it starts; empty: where the shell is.

        Raises
        ------
        BadInput
            The instruction is too long.
        """
        values = {
            "instruction": instruction,
            "instruction_file": INSTRUCTION_FILE,
            "model": self.model,
            "url": url,
            "key": key,
            "folder": self.folder,
        }

        def filled(text: str) -> str:
            return _PLACE.sub(lambda found: values.get(found[1], found[0]), text)

        files = {path: filled(content) for path, content in self.files.items()}
        if any("{instruction_file}" in text for text in (*self.command, self.stdin)):
            files[INSTRUCTION_FILE] = instruction
        given = {**variables, **{name: filled(value) for name, value in self.environment.items()}}
        lines = [f"cd -- {shlex.quote(directory)} || exit 125"] if directory else []
        lines += [_written(path, content) for path, content in files.items()]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
        lines += [f'export PATH={shlex.quote(f"{self.folder}/{each}")}:"$PATH"' for each in reversed(self.path)]
        command = "exec " + " ".join(shlex.quote(filled(each)) for each in self.command)
        lines.append(f"{command} {_here(filled(self.stdin))}" if self.stdin else command)
        text = "\n".join(lines)
        if len(text.encode()) > MOST_BYTES:
            raise BadInput(f"agent {self.name!r}: its command has {len(text.encode()):,} bytes of {MOST_BYTES:,}")
        return text


def _written(path: str, content: str) -> str:
    folder = path.rpartition("/")[0]
    made = f"mkdir -p -- {shlex.quote(folder)} && " if folder else ""
    return f"{made}cat > {shlex.quote(path)} {_here(content)}"


def _here(content: str) -> str:
    """A here-document with the text, which ends with a newline."""
    end = _END
    while end in content:
        end += "-"
    return f"<<'{end}'\n{content.removesuffix(chr(10))}\n{end}"


def _check_kinds(description: AgentDescription, where: str) -> None:
    for each in fields(description):
        value = getattr(description, each.name)
        match each.name:
            case "command" | "path" | "keep" | "install":
                if not isinstance(value, tuple) or not all(isinstance(one, str) and "\0" not in one for one in value):
                    raise BadInput(f"{where}: {each.name} is {value!r}: use a list of texts")
            case "environment" | "files":
                texts = [*value, *value.values()] if isinstance(value, Mapping) else [None]
                if not all(isinstance(one, str) and "\0" not in one for one in texts):
                    raise BadInput(f"{where}: {each.name}: use a table of texts")
            case "limit_s" | "memory":
                pass
            case _:
                if not isinstance(value, str) or "\0" in value:
                    raise BadInput(f"{where}: {each.name} is {value!r}: use a text")


def description_of(table: Mapping[str, Any], where: str) -> AgentDescription:
    """The description in a table of TOML; `where` opens the messages of errors.

    Raises
    ------
    BadInput
    """
    names = [each.name for each in fields(AgentDescription)]
    for key in table:
        if key not in names:
            raise unknown_key(key, names, where)
    for key in ("name", "command"):
        if key not in table:
            raise BadInput(f"{where} has no {key}")
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    try:
        return AgentDescription(**given)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


LIKE = "like"
"""A key of a user's own file: the known agent from which all other keys that are not given are taken."""


def known_agents() -> tuple[str, ...]:
    """Names of the agents that this package describes."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.toml")))


def agent_named(text: str, *, folder: str = "") -> AgentDescription:
    """The description that a name or the path of a TOML file means.

    Parameters
    ----------
    folder
        In which it is installed; empty: as the description says, or `installed_at` if that is there.

    Raises
    ------
    BadInput
        There is none, or it is not in order.
    """
    if text in known_agents():
        path = _DIRECTORY / f"{text}.toml"
    elif text.endswith(".toml"):
        path = Path(text)
    else:
        raise BadInput(f"no agent {text!r}: allowed are {', '.join(known_agents())} and a TOML file (docs/agents.md)")
    table = read_toml(path, "agent")
    if LIKE in table:
        table = _like_known(table, f"agent {path.name}")
    usual = installed_at(str(table.get("name", "")))
    if folder or ("folder" not in table and usual.is_dir()):
        table["folder"] = str(Path(folder).absolute() if folder else usual)
    return description_of(table, f"agent {path.name}")


def installed_at(name: str) -> Path:
    """Where an agent is looked for whose description names no folder."""
    return Path.home() / ".heddle" / "agents" / name


def _like_known(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table, with what it does not say from the agent that it is like; tables in it are joined."""
    known = table[LIKE]
    if known not in known_agents():
        raise BadInput(f"{where}: {LIKE} is {known!r}: use {', '.join(known_agents())}")
    found = read_toml(_DIRECTORY / f"{known}.toml", "agent")
    for key, value in table.items():
        if key != LIKE:
            before = found.get(key)
            found[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return found
