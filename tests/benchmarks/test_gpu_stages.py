"""The stages of ``make gpu``: their commands are ones that exist, and each ends as a row."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.command import bench
from benchmarks.commands.gpu import NAMES, gpu
from benchmarks.gpu_stages import CHECKOUT, GpuStage, run_stages, stages
from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput


@pytest.mark.parametrize("on_gpu", [True, False])
def test_each_stage_is_a_command_that_takes_its_arguments(on_gpu: bool, model_dir: str, tmp_path: Path) -> None:
    made = stages(model_dir, tmp_path, on_gpu=on_gpu)
    assert tuple(stage.name for stage in made) == NAMES
    for stage in made:
        arguments = list(stage.arguments)
        if arguments[1] == "pytest":
            assert all((CHECKOUT / name).is_file() for name in arguments if name.endswith(".py"))
            continue
        group = bench if arguments[1] == "benchmarks" else heddle
        name, *rest = arguments[2:]
        command = group.get_command(click.Context(group), name)
        assert command is not None
        command.make_context(name, rest)


def test_a_stage_that_fails_or_takes_too_long_is_a_row_with_its_last_lines(tmp_path: Path) -> None:
    tried = [
        GpuStage("good", 60, ("-c", "print('noise'); print('{\"makespan_s\": 2.5}')")),
        GpuStage("tests", 60, ("-c", "print('1 failed, 41 passed, 2 skipped in 3.00s'); raise SystemExit(1)")),
        GpuStage("slow", 0.5, ("-c", "import time; time.sleep(60)")),
    ]
    told: list[str] = []
    good, tests, slow = run_stages(tried, tmp_path, told.append, tmp_path)
    assert (good["exit_code"], good["result"]) == (0, {"makespan_s": 2.5}) and "last_lines" not in good
    assert tests["exit_code"] == 1 and tests["result"] == {"failed": 1, "passed": 41, "skipped": 2}
    assert slow["exit_code"] is None and slow["last_lines"] == []
    assert len(told) == 3 and all(row["device"] and row["torch"] for row in (good, tests, slow))


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="here is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu, ["--out", str(tmp_path / "rows.jsonl")])
    assert isinstance(result.exception, BadInput) and "give --cpu" in str(result.exception)
    assert not list(tmp_path.iterdir())
