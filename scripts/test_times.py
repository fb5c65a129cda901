"""Seconds of the stages of `make test`, and of their slowest tests.

    python scripts/test_times.py begin                   forget an earlier run
    python scripts/test_times.py stage NAME COMMAND…     run a command, say its seconds, end as it ends
    python scripts/test_times.py summary                 all stages, and the twenty slowest tests
    python scripts/test_times.py record                  note the seconds of files, by which the next run orders them

tests/conftest.py writes the seconds of tests, where `HEDDLE_TEST_TIMES` names a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "test-times"
STAGES, TESTS = FOLDER / "stages.tsv", FOLDER / "tests.tsv"
RECORDED = ROOT / "tests" / "file_seconds.tsv"
SLOWEST = 20
# Below that, the place of a file in the queue does not matter.
RECORDED_FROM_S = 3.0


def begin() -> None:
    """Forget an earlier run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in (STAGES, TESTS):
        path.write_text("")


def rows(path: Path) -> list[tuple[float, str, str]]:
    """Lines of seconds, stage and name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = (line.split("\t") for line in lines)
    return [(float(seconds), stage, name) for seconds, stage, name in parts]


def stage(name: str, command: list[str]) -> int:
    """Run one stage; returns its exit code. A stage that fails is the last: what there is then is told."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    code = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "HEDDLE_TEST_TIMES": str(TESTS), "HEDDLE_TEST_STAGE": name}
    ).returncode
    seconds = time.monotonic() - began_s
    with STAGES.open("a", encoding="utf-8") as file:
        file.write(f"{seconds:.1f}\t{name}\t{'ok' if code == 0 else f'exit code {code}'}\n")
    print(f"stage {name}: {seconds:.0f} s", flush=True)
    if code:
        summary()
    return code


def summary() -> None:
    """All stages with their seconds, and the slowest tests of all of them."""
    stages = rows(STAGES)
    print("\nseconds  stage")
    for seconds, name, end in stages:
        print(f"{seconds:7.0f}  {name}{'' if end == 'ok' else f' ({end})'}")
    print(f"{sum(seconds for seconds, *_ in stages):7.0f}  all\n\nseconds  the {SLOWEST} slowest tests")
    for seconds, name, test in sorted(rows(TESTS), reverse=True)[:SLOWEST]:
        print(f"{seconds:7.1f}  {test} ({name})")
    sys.stdout.flush()


def record() -> None:
    """Write the seconds of each file: the most that a stage of the last run took; files of other runs stay."""
    known = {name: float(seconds) for seconds, name in _recorded() if (ROOT / name).exists()}
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for seconds, name, test in rows(TESTS):
        found[test.partition("::")[0], name] += seconds
    for file in {file for file, _ in found}:
        known[file] = max(seconds for (name, _), seconds in found.items() if name == file)
    kept = sorted((name, seconds) for name, seconds in known.items() if seconds >= RECORDED_FROM_S)
    RECORDED.write_text("".join(f"{seconds:.0f}\t{name}\n" for name, seconds in kept), encoding="utf-8")


def _recorded() -> list[list[str]]:
    lines = RECORDED.read_text(encoding="utf-8").splitlines() if RECORDED.exists() else []
    return [line.split("\t") for line in lines]


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "stage":
        sys.exit(stage(rest[0], rest[1:]))
    {"begin": begin, "summary": summary, "record": record}[verb]()
