"""Values of the Python API, and paths of runs, that are refused in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from heddle_dask import BadInput, Budget, ChatModel, Engines, Patience, Sampling
from heddle_dask.cli.rollout.parsed_options import parsed_template_kwargs
from heddle_dask.cli.stored_run import check_out
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunStore

COUNTS = [0, -1, 1.5, math.nan, "4", None, True, 10**20]
SECONDS = [0, -1.0, math.nan, math.inf, "4", None, True]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((Budget, "max_steps", v) for v in COUNTS),
        *((Budget, n, v) for n in ("max_step_tokens", "max_context_tokens") for v in COUNTS if v is not None),
        *((Sampling, "temperature", v) for v in SECONDS if v != 0),
        *((Sampling, "top_p", v) for v in [*SECONDS, 1.5]),
        *((Sampling, "top_k", v) for v in [-1, 1.5, math.nan, "4", None, True, 10**20]),
        *((Sampling, "min_p", v) for v in [-0.1, 1.5, math.nan, "4", None, True]),
        *((Patience, name, v) for name in ("workers_s", "engines_s") for v in SECONDS),
        *((Engines, name, v) for name in ("slots", "count") for v in COUNTS if v is not None),
    ],
)
def test_a_bad_value_is_refused_at_construction(kind, name, value):
    with pytest.raises(BadInput, match=name) as refused:
        kind(**{name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [None, 5, "{}", ["a"], {"a": {1}}, {"a": float("nan")}])
def test_template_variables_that_cannot_be_stored_are_refused(value):
    with pytest.raises(BadInput, match="chat_template_kwargs is") as refused:
        ChatModel("path", value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[1]", "5", ""])
def test_template_variables_that_are_no_json_object_are_refused(text):
    with pytest.raises(BadInput, match="--chat-template-kwargs"):
        parsed_template_kwargs(text)
    assert parsed_template_kwargs('{"enable_thinking": false}') == {"enable_thinking": False}
    assert parsed_template_kwargs(None) == {}


@pytest.mark.parametrize("out", ["", "/", ".zarr", "x" * 300])
@pytest.mark.parametrize("mode", ["create", "append", "overwrite", "resume"])
def test_a_path_that_can_be_no_run_is_refused(out, mode):
    with pytest.raises(BadInput) as refused:
        check_out(Path(out), mode)
    assert "\n" not in str(refused.value)


def test_a_foreign_directory_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(BadInput, match="not overwritten"):
        check_out(tmp_path, "overwrite")


def test_a_run_is_closed_to_other_users(tmp_path):
    old = tmp_path / "x.journal"
    with Journal.create(old):
        pass
    assert old.stat().st_mode & 0o777 == 0o600
    old.chmod(0o644)
    with Journal.create(old, overwrite=True):
        pass
    assert old.stat().st_mode & 0o777 == 0o600
    run = tmp_path / "x.zarr"
    run.mkdir(mode=0o755)
    with RunStore.create(run, {}, overwrite=True):
        pass
    assert run.stat().st_mode & 0o777 == 0o700
