"""An object of the user's that a text names: ``package.module:object``, or ``FILE.py:object``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from heddle_dask.core.errors import BadInput

USER_FILE = "heddle_user_file_"
"""Opens the names of the modules that are made of files."""


def named_object(text: str, *, what: str) -> Any:
    """The object; a file is run as a module, whose functions are sent to workers by value.

    Parameters
    ----------
    what
        Opens the message of an error.

    Raises
    ------
    BadInput
        There is no such module, file or object, or importing it fails.
    """
    module_name, colon, path = text.rpartition(":")
    if not colon or not module_name or not path:
        raise BadInput(f"{what} {text!r}: use package.module:name or FILE.py:name")
    try:
        found: Any = _of_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    # A module may raise anything during its import.
    except (Exception, SystemExit) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{what} {text!r}: importing {module_name!r} failed: {told}") from error
    for part in path.split("."):
        if not part or not hasattr(found, part):
            raise BadInput(f"{what} {text!r}: {module_name!r} has no {path!r}")
        found = getattr(found, part)
    return found


def _of_file(text: str) -> ModuleType:
    path = Path(text).resolve()
    name = f"{USER_FILE}{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {text}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module
