"""Seeded command lines with nasty values, made from the options that click knows; and what became of each."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from worlds.record_builders import plain_trajectory

from benchmarks.command import bench
from heddle_dask.cli import cluster_choice
from heddle_dask.cli.doctor import checks
from heddle_dask.cli.main import heddle
from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.store import RunStore

FUZZ_TIMES = int(os.environ.get("HEDDLE_FUZZ_TIMES", "1"))
"""How many times as many command lines and files are tried as in the tests of each day."""
ALL = OneLineGroup("all", commands={**heddle.commands, "benchmarks": bench})
LONG = "x" * 300
NUMBERS = [
    *(
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "0.5",
        f"{10**20}",
        f"{2**70}",
        "1e400",
        "many",
        "1_0",
        "0x10",
        "",
        " ",
    ),
]
TEXTS = [
    *(
        "",
        " ",
        "/",
        ".",
        "..",
        "-",
        "--",
        LONG,
        "a\u200bb",
        "\u00e9\n",
        ":",
        "::",
        "a:b:c",
        "x,,y",
        "=",
        "a=b",
    ),
]
ADDRESSES = [
    *("", "tls://", "tcp://", "tcp://x:abc", "tcp://127.0.0.1:99999", "://", "x", "tls://127.0.0.1:1"),
    *("inproc://x", "tcp://127.0.0.1:9", "ucx://x:1", "ws://"),
]
PATHS = [
    *("/", "", ".", "missing", "missing/deep/file", LONG, "file.txt", "file.txt/below", "foreign", "empty"),
    *("locked.txt", "broken.json", "broken.toml", "binary.bin", "nostore.zarr", "halfstore.zarr", "run.zarr"),
    *("noreader.zarr", "list.json", "unknown.toml", "types.toml", "link"),
]
ENVS = [
    *("exits:solve", "interrupts:solve", "raises:solve", "syntax:solve", "agents:nothing", "agents:number"),
    *("agents:tasks", "tasks_raise:solve", "tasks_exit:solve", "tasks_empty:solve", "tasks_wrong:solve"),
    *(
        "factory:make",
        "factory:exits",
        "missing:solve",
        "agents:",
        ":solve",
        "agents:solve:more",
        "math:math",
    ),
    *(
        "math:easy:easy",
        "replay:",
        "replay:missing",
        "replay:broken.json",
        "replay:list.json",
        "foreign:solve",
    ),
    *(
        "replay:foreign",
        f"{LONG}:solve",
        "os.path:join",
        "code:",
        "MATH",
        "..agents:solve",
        "agents..x:solve",
    ),
]
MODELS = ["Qwen/Qwen3-8B", "foreign", "empty", "file.txt", "badmodel", "", "/", LONG, "missing/", "nomodel"]
NAMES = [
    "best",
    "heddle:",
    "heddle:x=y",
    "heddle,",
    "admission=at-most,alive=x",
    "placement=",
    "=",
    "speed=high",
]
BY_NAME = {
    **dict.fromkeys(("--scheduler",), ADDRESSES),
    "--config": [*PATHS, "/dev/zero"],
    **dict.fromkeys(("--env",), ENVS),
    **dict.fromkeys(("--model",), MODELS),
    **dict.fromkeys(("--strategy", "--set", "--arm", "--arms", "--presets", "--retries", "--cells"), NAMES),
    **dict.fromkeys(("--out", "--cluster", "--trace", "--table", "--html", "--live", "--overhead", "--cost"), PATHS),
    "--engine": [
        "sglang",
        "exits:kind",
        "interrupts:kind",
        "raises:kind",
        "agents:number",
        "agents:missing",
        "a:b:c",
    ],
}
COMMANDS = {
    ("rollout",): ["--engine", "emulated", "--env", "agents:solve", "--tasks", "2", "--out", "out.zarr"],
    ("simulate",): ["--workload", "math", "--trajectories", "16", "--seeds", "1"],
    ("plan",): ["--workload", "math", "--trajectories", "16", "--seeds", "1", "--gpus", "1"],
    ("profile",): ["--engine", "emulated", "--out", "table.json"],
    ("show",): ["run.zarr"],
    ("replay",): ["run.zarr"],
    ("doctor",): [],
    ("top",): ["run.zarr", "--once"],
    ("train",): [
        "--engine",
        "emulated",
        "--env",
        "agents:solve",
        "--steps",
        "1",
        "--mismatch",
        "tell",
        "--out",
        "trained",
    ],
    ("benchmarks", "actions"): ["--experiment", "cpu-units"],
    ("benchmarks", "decisions"): ["--events", "100", "--engines", "1", "--trajectories", "1"],
    ("benchmarks", "fidelity"): ["--trace", "tau_dialogues"],
    ("benchmarks", "live"): ["--trace", "tau_dialogues", "--engine", "emulated"],
    ("benchmarks", "overhead"): ["--trajectories", "1"],
    ("benchmarks", "paper"): ["--trajectories", "16", "--seeds", "1"],
    ("benchmarks", "predictor"): ["--trace", "tau_dialogues"],
    ("benchmarks", "scale"): ["--trajectories", "16"],
    ("benchmarks", "soak"): ["--minutes", "0.1"],
    ("benchmarks", "watched"): ["--trajectories", "1"],
}
"""Each command with arguments that it accepts. One that is not here gets none."""

_MODULES = {
    "exits": "import sys\nsys.exit(7)\n",
    "interrupts": "raise KeyboardInterrupt\n",
    "raises": "raise ValueError('two\\nlines')\n",
    "syntax": "def (:\n",
    "agents": (
        "from heddle_dask.environments.base import Task\nnumber = 7\n"
        "def tasks(count, seed):\n    return [Task(f't{i}', 'x') for i in range(min(count, 9))]\n"
        "async def solve(task, ctx):\n    return 1.0\n"
    ),
    "tasks_raise": "def tasks(count, seed):\n    raise OSError('no\\nfile')\nasync def solve(task, ctx):\n    pass\n",
    "tasks_exit": "def tasks(count, seed):\n    raise SystemExit(5)\nasync def solve(task, ctx):\n    pass\n",
    "tasks_empty": "def tasks(count, seed):\n    return []\nasync def solve(task, ctx):\n    pass\n",
    "tasks_wrong": "def tasks(count, seed):\n    return [1, None]\nasync def solve(task, ctx):\n    pass\n",
    "factory": "def make(needed):\n    pass\ndef exits():\n    raise SystemExit(4)\n",
}


class ReachedTheCluster(Exception):
    """Raised in place of the start of processes, of a long computation or of a measurement."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command line.

    Attributes
    ----------
    outcome
        ``refused`` (exit code 2, one line, nothing written), ``accepted`` (it would have started something),
        ``answered`` (exit code 0, or 1 of `doctor`); else what is wrong.
    """

    arguments: tuple[str, ...]
    outcome: str
    said: str


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `directory` the working directory, full of what can go wrong, and let no process start."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    for name in ("HOME", "TMPDIR"):
        (directory / name).mkdir()
        monkeypatch.setenv(name, str(directory / name))
    for name, text in _MODULES.items():
        (directory / f"{name}.py").write_text(text)
    files = {
        "file.txt": "text",
        "locked.txt": "",
        "broken.json": '{"a": [1,',
        "list.json": "[1, 2]",
        "broken.toml": "a = [1,",
        "unknown.toml": "no-such-key = 1\n",
        "types.toml": "tasks = [1, 2]\nengines = true\nslots = -1\nseed = 1.5\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "binary.bin").write_bytes(bytes(range(256)))
    (directory / "locked.txt").chmod(0)
    (directory / "link").symlink_to("nowhere")
    for name in ("empty", "foreign", "nostore.zarr", "halfstore.zarr", "badmodel", "nomodel"):
        (directory / name).mkdir()
    (directory / "foreign" / "notes.txt").write_text("mine")
    (directory / "nostore.zarr" / "zarr.json").write_text("no json")
    (directory / "halfstore.zarr" / "zarr.json").write_text(json.dumps({"attributes": {}, "node_type": "group"}))
    (directory / "badmodel" / "tokenizer.json").write_text("{}")
    (directory / "badmodel" / "config.json").write_text("[]")
    (directory / "nomodel" / "config.json").write_text("{}")
    with RunStore.create(directory / "run.zarr", {"environment": "math", "seed": 0}) as store:
        store.append([plain_trajectory(0)])
    with RunStore.create(directory / "noreader.zarr", {}) as store:
        store.append([plain_trajectory(0)])
    journal_path(directory / "noreader.zarr").write_bytes(b"no journal\n" * 3)
    _start_nothing(monkeypatch)


def _start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*arguments: object, **options: object) -> object:
        raise ReachedTheCluster

    for module, name in (
        ("heddle_dask.live.clusters.local.LocalRolloutCluster", "__init__"),
        ("heddle_dask.engines.process.EngineProcess", "start"),
        ("heddle_dask.cli.rollout.run", "local_client"),
        ("heddle_dask.cli.sweep_runs", "run_jobs"),
        ("heddle_dask.profiling.engines", "profile_engine"),
        ("heddle_dask.profiling.operators", "measure_operators"),
        ("benchmarks.checkpoints", "measure_storing"),
        ("benchmarks.dashboard", "measure_dashboard"),
        ("benchmarks.decisions", "measure_decisions"),
        ("benchmarks.learning.trainings", "train"),
        ("benchmarks.live", "running_engines"),
        ("benchmarks.live", "_learn"),
        ("benchmarks.overhead", "measure_overhead"),
        ("benchmarks.predictor", "_held_fold"),
        ("benchmarks.redundancy.rows", "measure_redundancy"),
        ("benchmarks.samples", "measure_samples"),
        ("benchmarks.scale.multiprocessing", "get_context"),
        ("benchmarks.soak", "_run"),
        ("benchmarks.soak_faults.place", "take_own_namespaces"),
        ("benchmarks.watched", "measure_watched"),
        ("benchmarks.weights", "measure_weights"),
        ("benchmarks.experiments.Experiments", "measured"),
        ("benchmarks.commands.dashboard", "_serve"),
        ("benchmarks.paper.sweep.PaperSweep", "play"),
    ):
        monkeypatch.setattr(f"{module}.{name}", reached)
    monkeypatch.setattr(cluster_choice, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("heddle_dask.cli.rollout.run.CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("heddle_dask.cli.top.watch.CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(checks, "_sandbox", lambda: checks.Check("sandbox", "ok", ""))


def command_lines(count: int, seed: int, first_words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """`count` lines over the commands with these first words: a good one with one or two values or words replaced."""
    rng = random.Random(f"command-lines-{seed}")
    # `behaviour` has no line of nasty values to refuse: it plays hundreds of rollouts, or compares with a file of them.
    commands = [each for each in commands_of(ALL) if each[0][0] in first_words and "behaviour" not in each[0]]
    for number in range(count):
        name, command = commands[number % len(commands)]
        arguments = list(COMMANDS.get(name, []))
        for _ in range(rng.choice((1, 1, 2))):
            arguments += _nasty(rng, command, arguments)
        yield (*name, *arguments)


def commands_of(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands that are no groups, with their names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, OneLineGroup | click.Group):
            yield from commands_of(command, (*above, name))
        else:
            yield (*above, name), command


def _nasty(rng: random.Random, command: click.Command, arguments: list[str]) -> list[str]:
    """More arguments; a positional one is replaced in place."""
    kind = rng.random()
    if kind < 0.04:
        return [rng.choice(["--no-such-option", "--tasks-", "-x", *TEXTS])]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.is_flag]
    if not options:
        return [rng.choice(TEXTS)]
    places = [i for i, word in enumerate(arguments) if word == "run.zarr"]
    if places and kind < 0.6:
        arguments[places[0]] = rng.choice(PATHS)
        return []
    option = rng.choice(options)
    name = next(name for name in option.opts if name.startswith("--"))
    return [name, rng.choice(_values(name, option))] if kind < 0.97 else [name]


def _values(name: str, option: click.Option) -> Sequence[str]:
    if name in BY_NAME:
        return [*BY_NAME[name], *TEXTS]
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return NUMBERS
    return [*TEXTS, *NUMBERS, *NAMES]


def answer_of(arguments: tuple[str, ...]) -> Answer:
    """Run one command line in this process."""
    before = _files()
    result = CliRunner().invoke(ALL, list(arguments))
    lines = result.stderr.splitlines()
    told = lines[-1] if lines else ""
    if isinstance(result.exception, ReachedTheCluster):
        return Answer(arguments, "accepted", "")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        where = result.exception.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        return Answer(arguments, f"traceback {type(result.exception).__name__}", f"{result.exception} at {place}")
    if result.exit_code == 0 or (arguments[:1] == ("doctor",) and result.exit_code == 1):
        return Answer(arguments, "answered", "")
    if result.exit_code != 2:
        return Answer(arguments, f"exit code {result.exit_code}", told)
    if len(lines) != 1 or result.stdout:
        return Answer(arguments, f"{len(lines)} lines", " | ".join(lines))
    if _files() != before:
        return Answer(arguments, "refused, but it wrote", str(sorted(_files() ^ before)))
    return Answer(arguments, "refused", told)


def check(directory: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int, first_words: Sequence[str]) -> None:
    """Run so many command lines; each is refused in one line, or legitimate, which is rare."""
    count *= FUZZ_TIMES
    prepare(directory, monkeypatch)
    answers = [answer_of(line) for line in command_lines(count, seed, first_words)]
    counts = Counter(answer.outcome for answer in answers)
    print(f"{count} command lines of {', '.join(first_words)}: {dict(counts)}")
    wrong = [answer for answer in answers if answer.outcome not in ("refused", "accepted", "answered")]
    assert not wrong, "\n".join(map(str, wrong))
    assert counts["refused"] >= count // 2 and counts["accepted"] <= count // 8


def _files() -> frozenset[str]:
    return frozenset(
        os.path.join(directory, name)
        for directory, folders, files in os.walk(".")
        if not directory.endswith("__pycache__")
        for name in (*files, *folders)
        if name != "__pycache__"
    )
