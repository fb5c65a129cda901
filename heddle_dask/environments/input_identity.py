"""Inputs of a run by their content: the payloads of tasks, roots of sandboxes, and what a function of the user does.

Of a function, comments, line breaks and places of files do not count.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from heddle_dask.environments.base import Task
from heddle_dask.sandbox.images.archive import BadImage
from heddle_dask.sandbox.images.cache import image_digest
from heddle_dask.sandbox.images.identity import add_content

_PLAIN = (bool, int, float, str, bytes, type(None))


def prompts_digest(tasks: Iterable[Task]) -> str:
    return _digest([[task.task_id, task.prompt] for task in tasks])


def payloads_digest(tasks: Iterable[Task]) -> str:
    """Digest of what else an environment knows of its tasks, such as hidden tests."""
    return _digest([[_plain(task.payload), task.group, task.domain, task.max_steps] for task in tasks])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A payload in a form that is the same in every process."""
    if isinstance(value, Mapping):
        return {"mapping": sorted(([repr(name), _plain(each)] for name, each in value.items()), key=lambda row: row[0])}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def root_digest(root: str) -> str:
    """Digest of what an image, or the files of a directory, contain: 1 GB of files takes about a second.

    Empty for what is not on this machine.
    """
    with contextlib.suppress(BadImage):
        return image_digest(root).removeprefix("sha256:")[:16]
    digest = sha256()  # a file in a form of its own, such as Apptainer's
    add_content(digest, Path(root))
    return digest.hexdigest()[:16]


def code_digest(function: Any) -> str:
    """Digest of a function, and of the functions and constants of its own module that it names.

    A callable object counts by its class, a partial function also by its arguments. What a library does is not seen.
    """
    lines: dict[str, str] = {}
    _describe(function, lines)
    text = "\n".join(f"{name} {line}" for name, line in sorted(lines.items()))
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _describe(value: Any, lines: dict[str, str], name: str = "") -> None:
    if isinstance(value, functools.partial):
        given = (*value.args, *(each for pair in sorted(value.keywords.items()) for each in pair))
        lines[f"{name}.partial"] = repr([each for each in given if _is_plain(each)])
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    value = inspect.unwrap(value)
    if isinstance(value, FunctionType):
        _describe_function(value, lines)
    elif isinstance(value, type):
        lines.setdefault(f"class {value.__qualname__}", _source(value))
    elif callable(value):
        call = vars(type(value)).get("__call__")
        _describe(call if isinstance(call, FunctionType) else type(value), lines)


def _describe_function(function: FunctionType, lines: dict[str, str]) -> None:
    if function.__qualname__ in lines:
        return
    lines[function.__qualname__] = _source(function)
    for name, value in _named(function):
        if _is_plain(value):
            lines[f"{function.__qualname__} {name}"] = repr(value)
        elif getattr(value, "__module__", None) == function.__module__:
            _describe(value, lines, name)


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and the variables of enclosing functions that a function names."""
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not set yet


def _global_names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _source(value: Any) -> str:
    """The syntax of a function or class; of one without a source, its byte code."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(value))))
    except (OSError, TypeError, SyntaxError):
        code = getattr(value, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {[each for each in code.co_consts if _is_plain(each)]}"
