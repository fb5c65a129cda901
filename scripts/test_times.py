"""Seconds of the stages of `make test`, and of their slowest tests.

    python scripts/test_times.py begin                     forget an earlier run
    python scripts/test_times.py stage NAME COMMAND… [+ NAME COMMAND…]…
                                                           run a command, say its seconds, end as it ends; those after a
                                                           plus run beside it, and their output follows
    python scripts/test_times.py summary                   all stages, and the twenty slowest tests
    python scripts/test_times.py record                    note the seconds of files, by which the next run orders them

tests/conftest.py writes the seconds of tests, where `HEDDLE_TEST_TIMES` names a file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "test-times"
STAGES, TESTS, STARTED = FOLDER / "stages.tsv", FOLDER / "tests.tsv", FOLDER / "started"
RECORDED = ROOT / "tests" / "file_seconds.tsv"
SLOWEST = 20
# Below that, the place of a file in the queue does not matter.
RECORDED_FROM_S = 3.0
# A stage takes at most 15 minutes on two cores. One that stands still is ended while its run can still tell of it.
LIMIT_S = float(os.environ.get("HEDDLE_STAGE_LIMIT_S", 2400.0))


def begin() -> None:
    """Forget an earlier run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in (STAGES, TESTS, STARTED):
        path.write_text("")


def rows(path: Path) -> list[tuple[float, str, str]]:
    """Lines of seconds, stage and name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = (line.split("\t") for line in lines)
    return [(float(seconds), stage, name) for seconds, stage, name in parts]


def stage(words: list[str]) -> int:
    """Run stages beside each other; returns an exit code. One that fails is the last: what there is then is told."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    parts = [list(part) for plus, part in itertools.groupby(words, "+".__eq__) if not plus]
    (first, *command), beside = parts[0], parts[1:]
    with ThreadPoolExecutor(len(parts)) as threads:
        outputs = [FOLDER / f"{name}.log" for name, *_ in beside]
        others = [
            threads.submit(_run, name, others_command, output)
            for (name, *others_command), output in zip(beside, outputs, strict=True)
        ]
        codes = [_run(first, command, None)]
        for output, other in zip(outputs, others, strict=True):
            codes.append(other.result())
            sys.stdout.write(output.read_text(encoding="utf-8", errors="replace"))
            sys.stdout.flush()
    if any(codes):
        summary()
    return max(codes)


def _run(name: str, command: list[str], output: Path | None) -> int:
    """One stage; its exit code, 128 and the signal where one has ended it."""
    began_s = time.monotonic()
    env = {**os.environ, "HEDDLE_TEST_TIMES": str(TESTS), "HEDDLE_TEST_STAGE": name}
    with contextlib.ExitStack() as files:
        to = None if output is None else files.enter_context(output.open("wb"))
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=to, stderr=to and subprocess.STDOUT)
        try:
            returned = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(name, psutil.Process(process.pid))
            returned = process.wait()
    # pytest ends with 1 where tests have failed: a stage that a signal has ended is another thing.
    code = returned if returned >= 0 else 128 - returned
    seconds = time.monotonic() - began_s
    with STAGES.open("a", encoding="utf-8") as file:
        file.write(f"{seconds:.1f}\t{name}\t{'ok' if code == 0 else f'exit code {code}'}\n")
    print(f"stage {name}: {seconds:.0f} s", flush=True)
    return code


def _end(name: str, root: psutil.Process) -> None:
    """Kill a stage that is over its limit, and say which processes it had."""
    print(f"stage {name} is ended after {LIMIT_S:.0f} s; its processes:", flush=True)
    for each in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            age_s = time.time() - each.create_time()
            print(f"{each.pid} {each.status()} {age_s:.0f} s {' '.join(each.cmdline())[:200]}", flush=True)
            each.kill()


def summary() -> None:
    """All stages with their seconds, and the slowest tests of all of them."""
    stages = rows(STAGES)
    print("\nseconds  stage")
    for seconds, name, end in stages:
        print(f"{seconds:7.0f}  {name}{'' if end == 'ok' else f' ({end})'}")
    print(f"{time.time() - STARTED.stat().st_mtime:7.0f}  all\n\nseconds  the {SLOWEST} slowest tests")
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
        sys.exit(stage(rest))
    {"begin": begin, "summary": summary, "record": record}[verb]()
