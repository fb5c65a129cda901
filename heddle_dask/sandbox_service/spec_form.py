"""The description of a sandbox in JSON."""

from __future__ import annotations

import base64
from typing import Any

from heddle_dask.sandbox.stateful.contract import SandboxSpec


def spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    """A description as JSON values."""
    plain = spec.to_plain()
    return {**plain, "files": {k: base64.b64encode(v).decode() for k, v in plain["files"].items()}}


def spec_from_json(form: dict[str, Any]) -> SandboxSpec:
    """The inverse of `spec_to_json`."""
    files = {path: base64.b64decode(text) for path, text in form["files"].items()}
    return SandboxSpec.from_plain({**form, "files": files})
