"""The recorded traces ship with the package and have the same names wherever a trace is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.live_setup import Workload
from benchmarks.predictor_trace import read_finished
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.scheduler.warm_start import check_warm, past_of_trace
from heddle_dask.workloads.bootstrap import bootstrap
from heddle_dask.workloads.choice import load_workload
from heddle_dask.workloads.recorded import RECORDED, trace_file
from heddle_dask.workloads.traces import read_traces

UNKNOWN = (
    "'tau_dialogue' is neither a file nor a recorded trace; recorded traces are "
    "claude_code_transcripts, claude_code_proxy, tau_dialogues, intercode"
)


def test_the_names_are_those_of_the_files_and_of_their_readme() -> None:
    directory = trace_file(RECORDED[0]).parent
    assert {f"{name}.jsonl.gz" for name in RECORDED} == {path.name for path in directory.glob("*.gz")}
    readme = (directory / "README.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` \| [\d,]+ \|.*\| (?:MIT|Apache-2\.0) \|$", readme, re.M)) == RECORDED


def test_a_name_is_the_recorded_trace_whatever_the_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tau_dialogues", "mine"):
        Path(name).write_text("")
    assert trace_file("tau_dialogues") == trace_file(Path("tau_dialogues")) != tmp_path / "tau_dialogues"
    assert trace_file(tmp_path / "tau_dialogues") == tmp_path / "tau_dialogues"
    assert trace_file("mine") == Path("mine")
    # Neither is there: the path is left to reading.
    assert trace_file("tau_dialogues.jsonl") == Path("tau_dialogues.jsonl")
    assert trace_file("runs/mine") == Path("runs/mine")


def test_an_unknown_name_lists_the_names_wherever_it_is_given() -> None:
    wrong = "tau_dialogue"
    for give in (
        lambda: trace_file(wrong),
        lambda: next(read_traces(wrong)),
        lambda: load_environment(f"replay:{wrong}"),
        lambda: check_warm(wrong),
        lambda: read_finished(Path(wrong)),
        lambda: Workload(Path(wrong), 4, 1.0, 1.0, 0).planned(4096),
    ):
        with pytest.raises(BadInput, match=re.escape(UNKNOWN)):
            give()


def test_name_and_file_are_the_same_trace() -> None:
    name, path = "tau_dialogues", trace_file("tau_dialogues")
    draw = {"trajectories": 40, "seed": 3, "max_context_tokens": 65_536}
    drawn = bootstrap(name, **draw)
    assert drawn == bootstrap(path, **draw) == load_workload(name, samples=1, **draw)
    assert drawn[0].domain.startswith("tau_dialogues/")
    by_name, by_path = load_environment(f"replay:{name}"), ReplayEnvironment(path)
    assert by_name.name == by_path.name
    assert by_name.tasks(20, 1) == by_path.tasks(20, 1)
    first, second = (next(past_of_trace(Path(one), 1.0, 1.0)) for one in (name, path))
    assert first == second and first.domain.startswith(by_name.name)
    check_warm(name)
    one, other = (Workload(Path(each), 8, 0.5, 0.02, 0) for each in (name, path))
    assert one.name == other.name == name
    assert one.planned(4096) == other.planned(4096)


def test_a_trace_that_does_not_fit_is_refused_in_one_line_before_anything_is_measured() -> None:
    with pytest.raises(BadInput, match=r"^trace 'tau_dialogues': trajectory .* fills a context of 4096"):
        Workload(Path("tau_dialogues"), 2, 50.0, 1.0, 0).planned(4096)
