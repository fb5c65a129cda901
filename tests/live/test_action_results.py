"""What a journal holds of the value of an action, and what a journal of somebody else can do: nothing."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from heddle_dask.live.driver.programs.action_results import (
    can_be_replayed,
    key_path,
    value_body,
    value_from_body,
)


@dataclass(frozen=True)
class Report:
    passed: int


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def journalled(value: Any, call: str = "t/a0") -> dict[str, Any]:
    body = {"status": "ok", **value_body(call, value, cloudpickle.dumps(value), "session/t/a0")}
    return dict(json.loads(json.dumps(body)))


@pytest.fixture
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return key_path()


def test_plain_values_need_no_key(own_key: Path) -> None:
    value = {"found": [("a", 1.5)], "raw": b"\x00"}
    body = journalled(value)
    assert "pickled" not in body and can_be_replayed("t/a0", body)
    assert value_from_body("t/a0", body) == value
    assert not own_key.exists()


def test_other_values_are_signed_with_a_key_of_this_user_alone(own_key: Path) -> None:
    body = journalled(Report(3))
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600 and own_key.stat().st_size == 32
    assert can_be_replayed("t/a0", body) and value_from_body("t/a0", body) == Report(3)
    assert not can_be_replayed("t/a1", body), "it is the value of another call"
    again = journalled(Report(4))
    assert value_from_body("t/a0", again) == Report(4)
    assert not can_be_replayed("t/a0", {**again, "signature": body["signature"]})
    assert list(own_key.parent.iterdir()) == [own_key]


def forged(pickled: bytes, **others: Any) -> dict[str, Any]:
    return {"status": "ok", "pickled": base64.b64encode(pickled).decode(), **others}


def bodies_of_somebody_else(trap: bytes) -> list[Mapping[str, Any]]:
    return [
        forged(trap),
        forged(trap, signature=""),
        forged(trap, signature="0" * 64),
        forged(trap, signature="ä"),
        forged(trap, signature=None),
        {**forged(trap, signature="0" * 64), "pickled": "no base64"},
        {"status": "ok", "value": base64.b64encode(trap).decode()},  # as earlier versions wrote it
        {"status": "ok", "value": {"pickle": base64.b64encode(trap).decode()}},
        {"status": "ok"},
    ]


def test_a_journal_of_somebody_else_runs_no_code(own_key: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = cloudpickle.dumps(Trap(sprung))
    for has_key in (False, True):
        if has_key:
            journalled(Report(1))
        for body in bodies_of_somebody_else(trap):
            if can_be_replayed("t/a0", body):
                assert isinstance(value_from_body("t/a0", body), str)
            assert not sprung.exists()
    cloudpickle.loads(trap)
    assert sprung.exists(), "the trap works"


def test_a_key_that_others_can_read_is_not_used(own_key: Path) -> None:
    body = journalled(Report(1))
    for mode in (0o640, 0o602):
        own_key.chmod(mode)
        assert not can_be_replayed("t/a0", body)
        assert "pickled" not in journalled(Report(1))
    own_key.chmod(0o600)
    assert can_be_replayed("t/a0", body)
    own_key.write_bytes(b"short")
    assert not can_be_replayed("t/a0", body)


def test_without_a_key_the_value_cannot_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    body = journalled(Report(1))
    assert body == {"status": "ok", "idempotency_key": "session/t/a0"}
    assert not can_be_replayed("t/a0", body)


def test_two_processes_make_one_key(own_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def slower(source: Path, target: Path) -> None:
        if not Path(target).exists():
            Path(target).write_bytes(b"k" * 32)
            Path(target).chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", slower)
    body = journalled(Report(1))
    assert own_key.read_bytes() == b"k" * 32 and can_be_replayed("t/a0", body)
    assert list(own_key.parent.iterdir()) == [own_key]


def test_a_failed_action_is_replayed_as_it_is() -> None:
    assert can_be_replayed("t/a0", {"status": "raised"})
