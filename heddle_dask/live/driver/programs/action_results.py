"""Values that actions returned, in the journal: plain data, or a pickle with the signature of the user.

A journal may come from somebody else, and a pickle runs code when it is read. So a value of plain types is written as
JSON (`records.plain_data`). Any other value is pickled and signed with a key of this user, which lies outside of every
run; a pickle is read only if its signature verifies. The signature covers which call the value is of. Without a valid
signature the call is made again on resume, with its idempotency key.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import cloudpickle

from heddle_dask.records.plain_data import NotPlain, from_plain, to_plain

_KEY_BYTES = 32


def key_path() -> Path:
    """Where the key of this user is: ``heddle_dask/journal.key`` in ``$XDG_STATE_HOME`` (``~/.local/state``)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "heddle_dask" / "journal.key"


def value_body(call: str, value: Any, pickled: bytes, idempotency_key: str) -> dict[str, Any]:
    """Fields for the journal from which `value_from_body` makes an equal value.

    A value that is not plain cannot be replayed where the key of this user cannot be made or read.

    Parameters
    ----------
    call
        Names the call in its run.
    pickled
        The value as its tool worker sent it.
    """
    try:
        return {"value": to_plain(value)}
    except NotPlain:
        key = _own_key()
    body = {"idempotency_key": idempotency_key}
    if key is not None:
        body["pickled"] = base64.b64encode(pickled).decode("ascii")
        body["signature"] = _signature(key, call, pickled)
    return body


def can_be_replayed(call: str, body: Mapping[str, Any]) -> bool:
    """Whether `value_from_body` has a value: the action failed, or its value is plain or signed by this user."""
    if body.get("status") != "ok":
        return True
    if "value" in body:
        try:
            from_plain(body["value"])
        except NotPlain:
            return False
        return True
    return _signed_pickle(call, body) is not None


def value_from_body(call: str, body: Mapping[str, Any]) -> Any:
    """Read what `value_body` made; only for a body that `can_be_replayed`."""
    if "value" in body:
        return from_plain(body["value"])
    pickled = _signed_pickle(call, body)
    assert pickled is not None, "the journal's value is not signed"
    return cloudpickle.loads(pickled)


def _signed_pickle(call: str, body: Mapping[str, Any]) -> bytes | None:
    """The pickle, if this user has signed it as the value of that call."""
    text, signature = body.get("pickled"), body.get("signature")
    key = _read_key()
    if key is None or not isinstance(text, str) or not isinstance(signature, str):
        return None
    try:
        pickled = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    # As bytes: a text with other characters than ASCII cannot be compared.
    return pickled if hmac.compare_digest(_signature(key, call, pickled).encode(), signature.encode()) else None


def _signature(key: bytes, call: str, pickled: bytes) -> str:
    # The length keeps the name of the call and the pickle apart.
    name = call.encode("utf-8", "backslashreplace")
    return hmac.new(key, len(name).to_bytes(8, "big") + name + pickled, sha256).hexdigest()


def _own_key() -> bytes | None:
    """The key of this user, made if it is missing; None where that is impossible."""
    path = key_path()
    if path.exists():
        return _read_key()
    aside = path.with_suffix(f".{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # another process may have been faster: then its key is used
        aside.unlink()
    except OSError:
        return None
    return _read_key()


def _read_key() -> bytes | None:
    """The key of this user; None if it is missing, damaged, or another user could have written or read it."""
    try:
        with open(key_path(), "rb") as file:
            facts = os.fstat(file.fileno())
            key = file.read(_KEY_BYTES + 1)
    except OSError:
        return None
    private = facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return key if private and len(key) == _KEY_BYTES else None
