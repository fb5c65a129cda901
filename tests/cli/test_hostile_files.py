"""Files of a run that somebody made on purpose, with right checksums: one line or an answer, in bounded memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs.checksum32 import CRC32C
from numcodecs.zstd import Zstd
from worlds.record_builders import plain_trajectory

from heddle_dask.cli.main import heddle
from heddle_dask.core.commands import AdmitTrajectory
from heddle_dask.core.events import TrajectorySubmitted
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import Journal
from heddle_dask.records.schema import ATTRIBUTES_CRC, attributes_crc
from heddle_dask.records.store import RunStore
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, trajectory_to_body

pytestmark = pytest.mark.timeout(120)

METADATA = {"environment": "math", "seed": 3, "model": "none", "samples": 1}
SESSION = {"strategy": "slime", "overrides": [], "seed": 0, "retries": {"max_pool_wait_s": 600}}
CONTROL = {"lines": []}
ROOM_BYTES = 768 << 20  # beyond what the process has
COMMANDS = (["show"], ["show", "--failed"], ["show", "--trajectory", "0"], ["export"], ["replay"])

Lines = list[tuple[str, Any]]


def make_run(folder: Path) -> Path:
    run = folder / "x.zarr"
    with RunStore.create(run, METADATA) as store:
        store.append([plain_trajectory(0), plain_trajectory(1)])
    write_journal(run, [("session", SESSION), ("control", CONTROL), finished(2)])
    return run


def finished(index: int, **changes: Any) -> tuple[str, Any]:
    return TRAJECTORY_FINISHED, {**trajectory_to_body(plain_trajectory(index)), **changes}


def write_journal(run: Path, lines: Lines) -> None:
    journal_path(run).unlink(missing_ok=True)
    with Journal.create(journal_path(run)) as journal:
        for kind, body in lines:
            journal.append(kind, body)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "x.zarr")
    shutil.copy(journal_path(pristine), journal_path(tmp_path / "x.zarr"))
    return tmp_path / "x.zarr"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than so much beyond what the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def invoke(run: Path, command: list[str]) -> Result:
    out = [str(run.with_suffix(".parquet"))] if command == ["export"] else []
    Path(*out or [run.with_suffix(".parquet")]).unlink(missing_ok=True)
    return CliRunner().invoke(heddle, [*command, str(run), *out])


def is_answered(run: Path, command: list[str]) -> Result:
    """An answer (1: a replay that differs), or exit code 2 with exactly one line; and no traceback."""
    result = invoke(run, command)
    told = result.stderr.splitlines()
    assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
    assert (result.exit_code, len(told)) == (2, 1) or result.exit_code in (0, command == ["replay"]), (
        command,
        result.output,
    )
    return result


def set_attributes(run: Path, **changes: Any) -> None:
    root = json.loads((run / "zarr.json").read_text())
    attributes = {**root["attributes"], **changes}
    attributes[ATTRIBUTES_CRC] = attributes_crc(attributes)
    (run / "zarr.json").write_text(json.dumps({**root, "attributes": attributes}))


def set_metadata(**changes: Any) -> Callable[[Path], None]:
    return lambda run: set_attributes(run, metadata={**METADATA, **changes})


def set_rows(table: str, rows: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        committed = json.loads((run / "zarr.json").read_text())["attributes"]["committed"]
        set_attributes(run, committed={**committed, table: rows})
        for path in (run / table).glob("*/zarr.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "shape": [rows]}))

    return change


def set_values(column: str, *values: Any) -> Callable[[Path], None]:
    """Written by zarr itself, so that the checksum is right."""

    def change(run: Path) -> None:
        array = zarr.open_group(run, mode="r+")[column]
        assert isinstance(array, zarr.Array)
        array[: len(values)] = list(values)

    return change


def set_chunk(column: str, content: bytes | int) -> Callable[[Path], None]:
    """A chunk with this content, or with so many zeros."""

    def change(run: Path) -> None:
        packed = Zstd().encode(bytes(content))
        (run / column / "c" / "0").write_bytes(bytes(CRC32C(location="end").encode(packed)))

    return change


def instead_of(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run.parent / name
        path.unlink()
        make(path)

    return change


def set_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def journal(*lines: tuple[str, Any]) -> Callable[[Path], None]:
    return lambda run: write_journal(run, list(lines))


def session(**changes: Any) -> Callable[[Path], None]:
    return journal(("session", {**SESSION, **changes}), ("control", CONTROL))


def control(*lines: Any) -> Callable[[Path], None]:
    return journal(("session", SESSION), ("control", {"lines": list(lines)}), finished(2))


def deep_line(run: Path) -> None:
    text = b'["session",{"strategy":' + b"[" * 200_000 + b"]" * 200_000 + b"}]"
    header = journal_path(run).read_bytes().partition(b"\n")[0] + b"\n"
    crc = zlib.crc32(text, zlib.crc32(header))
    journal_path(run).write_bytes(header + b"%08x %b\n" % (crc, text))


def endless_line(run: Path) -> None:
    with journal_path(run).open("ab") as file:
        file.truncate(1 << 40)  # sparse


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


SUBMITTED = encode(TrajectorySubmitted(0.0, TrajectorySpec(TrajectoryId("t2"), GroupId("g1"))))
ADMIT = encode(AdmitTrajectory(TrajectoryId("t2")))

HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"10^12 rows of {table}": set_rows(table, 10**12) for table in ("tokens", "branches", "steps", "trajectories")},
    "10^30 rows": set_rows("tokens", 10**30),
    "rows that are true": lambda run: set_attributes(run, committed=True),
    "columns that are a number": lambda run: set_attributes(run, columns_added=7),
    "a chunk without an end": instead_of("x.zarr/tokens/ids/c/0", link_to_zeros),
    "a text chunk without an end": instead_of("x.zarr/trajectories/id/c/0", link_to_zeros),
    "a chunk that is a FIFO": instead_of("x.zarr/steps/branch/c/0", os.mkfifo),
    "a column that is a FIFO": instead_of("x.zarr/steps/branch/zarr.json", os.mkfifo),
    "a root that is a FIFO": instead_of("x.zarr/zarr.json", os.mkfifo),
    "a root without an end": instead_of("x.zarr/zarr.json", link_to_zeros),
    "a bomb of numbers": set_chunk("tokens/ids", 1 << 28),
    "a bomb of texts": set_chunk("trajectories/id", 1 << 28),
    "2^31 texts": set_chunk("trajectories/id", struct.pack("<II", 2**31 - 1, 0)),
    "too few numbers": set_chunk("tokens/ids", bytes(8)),
    "another codec": set_json(
        "tokens/ids/zarr.json", codecs=[{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]
    ),
    "another place of chunks": set_json(
        "tokens/ids/zarr.json",
        chunk_key_encoding={"name": "default", "configuration": {"separator": "."}},
    ),
    "an end at 1e300 s": set_values("trajectories/finished_s", 1e300, 1e300),
    "a step at 1e300 s": set_values("steps/decode_s", 1e300),
    "a start without a beginning": set_values("trajectories/started_s", float("-inf")),
    "a reward without an end": set_values("trajectories/reward", float("inf")),
    "ids twice": set_values("trajectories/id", "t0", "t0"),
    "offsets that go back": set_values("trajectories/step_offset", 5, 2),
    "a status of no trajectory": set_values("trajectories/status", "lost"),
    "an author of no token": set_values("tokens/attribution", 99),
    "facts that are a list": set_values("trajectories/metadata", "[1, 2]"),
    "facts that are no JSON": set_values("trajectories/metadata", "{"),
    "facts that are deep": set_values("trajectories/metadata", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "escapes in an id": set_values("trajectories/id", "\x1b]0;mine\x07\x1b[2J"),
    **{
        f"metadata with {name} {value!r:.20}": set_metadata(**{name: value})
        for name, value in [
            ("batches", "x"),
            ("batches", 10**12),
            ("batches", [1]),
            ("sessions", None),
            ("slots", "2"),
            ("tool_cpus", {}),
            ("environment", {"a": 1}),
            ("model", ["m"]),
            ("engine", 5),
            ("engine", {"kind": ["x"]}),
            ("seed", "\x1b[31m"),
            ("batch_facts", 3),
        ]
    },
    "a journal that is a FIFO": instead_of("x.journal", os.mkfifo),
    "a journal without an end": instead_of("x.journal", link_to_zeros),
    "a journal that is a folder": instead_of("x.journal", Path.mkdir),
    "a line without an end": endless_line,
    "a line that is deep": deep_line,
    "a line of no trajectory": journal(("action", {"action_index": 0})),
    "a line of a trajectory 5": journal(("action", {"trajectory_id": 5})),
    "a line of a trajectory []": journal(("step", {"trajectory_id": []})),
    "a trajectory without an end": journal((TRAJECTORY_FINISHED, {"trajectory_id": "t9"})),
    **{
        f"a trajectory with {name} {value!r:.20}": journal(("session", SESSION), finished(2, **{name: value}))
        for name, value in [
            ("finished_s", 1e300),
            ("finished_s", "x"),
            ("seed", "x"),
            ("reward", "x"),
            ("status", 5),
            ("detail", 7),
            ("status", []),
            ("steps", 5),
            ("steps", {"a": [1]}),
            ("actions", {}),
            ("branches", [5]),
            ("metadata", 3),
            ("branches", []),
            ("branches", [{"ids": "AAAAAA==", "authors": [[0, 10**12]], "logprobs": "", "versions": []}]),
            ("no such field", 1),
            ("detail", "\x1b[2J\ud800"),
        ]
    },
    "a session without facts": journal(("session", {}), ("control", CONTROL)),
    **{
        f"a session with {name} {value!r:.20}": session(**{name: value})
        for name, value in [
            ("strategy", 5),
            ("strategy", "none"),
            ("overrides", [5]),
            ("overrides", "x"),
            ("seed", "x"),
            ("retries", []),
            ("retries", {"max_losses": "x"}),
            ("cost", 5),
            ("cost", {"by_degree": []}),
            ("cost", {"by_degree": {"x": 1}, "tp_degree": 1, "of": {}}),
        ]
    },
    "control without lines": journal(("session", SESSION), ("control", {})),
    **{
        f"a control line {line!r:.40}": control(line)
        for line in [
            5,
            [],
            [5, 6],
            [[], []],
            [["TimeReached"], []],
            [["TimeReached", "x"], []],
            [["NoEvent", 0.0], []],
            [["TimeReached", 0.0], [[]]],
            [["TimeReached", 0.0], [5]],
            [SUBMITTED, [ADMIT]],
            [["StepFinished", 0.0, 5], []],
            [["EngineJoined", 0.0, ["e", "many"]], []],
            [["EngineLost", 0.0, [], "x", True], []],
            [["TrajectoryEnded", "x", "t2"], []],
            [["TrajectoryEnded", 1.0, "t2"], []],
            [["JournalLinesMissing", "x"], []],
            [["JournalOfRun", {}], []],
            [["PredictionMade", 0.0, "t2", 0, ["a", "b", "c"]], []],
            [["RunStarted", 0.0, 5], []],
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_one_line_or_an_answer(name: str, run: Path, little_memory: None) -> None:
    HOSTILE[name](run)
    for command in COMMANDS:
        result = is_answered(run, command)
        assert not {"\x1b", "\x07"} & set(result.output), result.output


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a bomb of numbers", "unpacks to 268,435,456"),
        ("a bomb of texts", "unpacks to 268,435,456"),
        ("2^31 texts", "holds 2,147,483,647"),
    ],
)
def test_a_bomb_is_refused_by_what_it_says_of_itself(name: str, told: str, run: Path) -> None:
    HOSTILE[name](run)
    assert told in invoke(run, ["show", "--trajectory", "0"]).stderr


def test_the_files_as_they_were_made_are_answered(run: Path) -> None:
    assert [invoke(run, command).exit_code for command in COMMANDS] == [0] * len(COMMANDS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
quick = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quick
@given(
    name=st.sampled_from(["batches", "sessions", "slots", "engine", "model", "seed", "batch_facts"]),
    value=json_values,
)
def test_any_value_in_the_metadata(name: str, value: object, run: Path) -> None:
    set_metadata(**{name: value})(run)
    is_answered(run, ["show"])


@quick
@given(name=st.sampled_from(sorted(finished(2)[1])), value=json_values)
def test_any_value_in_a_journalled_trajectory(name: str, value: object, run: Path) -> None:
    write_journal(run, [("session", SESSION), finished(2, **{name: value})])
    for command in (["show"], ["show", "--failed"], ["show", "--trajectory", "2"]):
        is_answered(run, command)


@quick
@given(name=st.sampled_from([*SESSION, "cost"]), value=json_values, line=json_values)
def test_any_value_in_a_session_and_its_lines(name: str, value: object, line: object, run: Path) -> None:
    write_journal(run, [("session", {**SESSION, name: value}), ("control", {"lines": [line]})])
    for command in (["replay"], ["show"]):
        is_answered(run, command)
