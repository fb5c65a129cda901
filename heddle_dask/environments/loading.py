"""Makes an environment from the text of ``--env``; every error is one line.

Forms: a name with an optional tier and split (``math``, ``code:hard``, ``search:train``, ``math:hard:train``; easy and
test by default), ``replay:TRACE`` (the name of a
recorded trace, or a file), ``prompts:PATH`` (a file or folder of rows),
``openenv:URL`` (a server of OpenEnv),
``verifiers:ID`` (an environment of verifiers), ``agent:NAME:TASKS`` (an agent that is a
command, and a set of tasks for it), and ``package.module:function``. The function of the last form is one of

- ``async def solve(task, ctx)``: the agent program itself. A function ``tasks(count, seed)`` of the
  same module gives its tasks; without it, tasks are numbered and have an empty prompt.
- a factory without required arguments that returns an environment (`environments.base.Environment`)
  or an object with the Gymnasium API, which is wrapped.
- an environment.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Environment
from heddle_dask.environments.functions import FunctionEnvironment, is_environment
from heddle_dask.environments.gymnasium_adapter import GymnasiumEnvironment

# Names instead of classes: each class is imported on demand, with its own dependencies.
BUILT_IN = {
    "math": "heddle_dask.environments.math_env:MathEnvironment",
    "code": "heddle_dask.environments.code_env:CodeEnvironment",
    "search": "heddle_dask.environments.search_env:SearchEnvironment",
    "shell": "heddle_dask.environments.shell_env:ShellEnvironment",
    "replay": "heddle_dask.environments.replay:ReplayEnvironment",
}
# Their tasks are the user's: what follows the name is theirs to read.
FROM_ELSEWHERE = {
    "agent": "heddle_dask.environments.command_agent:loaded_agent",
    "openenv": "heddle_dask.apis.openenv:OpenEnvEnvironment",
    "prompts": "heddle_dask.environments.task_sets.prompts:Prompts",
    "verifiers": "heddle_dask.environments.task_sets.verifiers_env:VerifiersEnvironment",
}
TIERS = ("easy", "hard")
SPLITS = ("train", "test")
REPLAY_OPTIONS = ("token_scale", "tool_scale")
_FORMS = (
    f"allowed are {', '.join(f'{name}[:tier][:split]' for name in BUILT_IN if name != 'replay')} "
    f"(tier {' or '.join(TIERS)}, split {' or '.join(SPLITS)}), replay:TRACE, "
    f"{', '.join(f'{name}:…' for name in FROM_ELSEWHERE)} and package.module:function"
)


def load_environment(spec: str, *, options: Mapping[str, Any] | None = None) -> Environment:
    """Make the environment that `spec` names.

    Parameters
    ----------
    spec
        See the module.
    options
        For ``replay``: ``token_scale`` and ``tool_scale``. For a factory: its keyword arguments.

    Raises
    ------
    BadInput
        Unknown name, tier or option, or an unusable module or function.
    """
    given = dict(options or {})
    name, colon, rest = spec.partition(":")
    if name == "replay":
        if not rest:
            raise BadInput(f"environment {spec!r}: name the trace, as in replay:tau_dialogues or replay:FILE")
        _only(given, REPLAY_OPTIONS, spec)
        return cast(Environment, _class_of(name)(rest, **given))
    if name in FROM_ELSEWHERE:
        if not rest:
            raise BadInput(f"environment {spec!r}: say what behind the colon, as in {name}:… (docs/tasks.md)")
        return cast(Environment, _call(spec, _class_of(name), given, rest))
    if name in BUILT_IN:
        _only(given, (), spec)
        return cast(Environment, _class_of(name)(**_tier_and_split(spec, rest if colon else None)))
    if not colon:
        raise BadInput(f"no environment {spec!r}; {_FORMS}")
    return _from_user(spec, name, rest, given)


def _tier_and_split(spec: str, text: str | None) -> dict[str, str]:
    chosen = {"tier": "easy", "split": "test"}
    given: set[str] = set()
    for word in [] if text is None else text.split(":"):
        part = "tier" if word in TIERS else "split"
        if word not in (*TIERS, *SPLITS) or part in given:
            allowed = f"one tier ({', '.join(TIERS)}) and one split ({', '.join(SPLITS)})"
            raise BadInput(f"environment {spec!r}: no tier or split {word!r}; allowed are {allowed}")
        given.add(part)
        chosen[part] = word
    return chosen


def _from_user(spec: str, module_name: str, path: str, options: dict[str, Any]) -> Environment:
    module = _imported(spec, module_name)
    found: Any = module
    for part in path.split("."):
        if not part or not hasattr(found, part):
            raise BadInput(f"environment {spec!r}: module {module_name!r} has no {path!r}")
        found = getattr(found, part)
    if inspect.iscoroutinefunction(found):
        _only(options, (), spec)
        tasks = getattr(module, "tasks", None)
        return FunctionEnvironment(found, name=spec, tasks=tasks if callable(tasks) else None)
    if not isinstance(found, type) and is_environment(found):
        _only(options, (), spec)
        return cast(Environment, found)
    if not callable(found):
        raise BadInput(
            f"environment {spec!r}: a {type(found).__name__} is neither a coroutine function "
            "solve(task, ctx), nor a factory, nor an environment"
        )
    return _made(spec, found, options)


def _made(spec: str, factory: Callable[..., Any], options: dict[str, Any]) -> Environment:
    product = _call(spec, factory, options)
    if is_environment(product):
        return cast(Environment, product)
    if all(callable(getattr(product, name, None)) for name in ("reset", "step", "close")):
        product.close()  # made to find out its kind; each trajectory gets its own
        return GymnasiumEnvironment(lambda: factory(**options), name=spec)
    if inspect.iscoroutine(product):
        product.close()  # avoids Python's warning about a coroutine that is never awaited
    raise BadInput(
        f"environment {spec!r}: returned a {type(product).__name__}, which has neither "
        "name, tasks and solve nor the Gymnasium API (reset, step, close)"
    )


def _call(spec: str, factory: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    try:
        return factory(*args, **options)
    except BadInput:
        raise
    # Report any error of the user's code in one line.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise BadInput(f"environment {spec!r}: {_one_line(error)}") from error


def _imported(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise BadInput(f"environment {spec!r}: no module {error.name!r} on the import path; {_FORMS}") from error
        raise BadInput(f"environment {spec!r}: {_one_line(error)}") from error
    # A module may raise anything during its import.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise BadInput(f"environment {spec!r}: importing {module_name!r} failed: {_one_line(error)}") from error


def _class_of(name: str) -> Any:
    module_name, _, attribute = {**BUILT_IN, **FROM_ELSEWHERE}[name].partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _only(options: Mapping[str, Any], allowed: Sequence[str], spec: str) -> None:
    for name in options:
        if name not in allowed:
            what = f"allowed are {', '.join(allowed)}" if allowed else "it takes none"
            raise BadInput(f"environment {spec!r} has no option {name!r}; {what}")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


_WITHOUT_SPLITS = ("replay",)


def training_name(env: str) -> str:
    """The name of an environment with its tasks for training: ``math:hard`` is ``math:hard:train``.

    A user's environment has one kind of tasks and keeps its name.

    Raises
    ------
    BadInput
        It names held-out tasks, or a recorded trace.
    """
    words = env.split(":")
    if words[0] not in BUILT_IN:
        return env
    if words[0] in _WITHOUT_SPLITS:
        raise BadInput(f"--env {env}: a recorded trace has no policy to train: use an environment")
    if "test" in words[1:]:
        raise BadInput(f"--env {env}: these are the held-out tasks: leave :test away")
    return env if "train" in words[1:] else f"{env}:train"


def held_out_name(env: str) -> str:
    """The name of the same environment with its held-out tasks: ``math:hard:train`` is ``math:hard``.

    A user's environment keeps its name: other seeds draw its held-out tasks.
    """
    words = env.split(":")
    if words[0] not in BUILT_IN:
        return env
    return ":".join(word for word in words if word not in SPLITS)
