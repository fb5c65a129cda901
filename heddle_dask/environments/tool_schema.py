"""The schema of a tool that is a plain function, which a model reads, and the arguments of a call by it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, get_type_hints

from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Function = Callable[..., Any]
# Values of the user's, which may look like schemas.
_VALUES = frozenset({"default", "const", "enum", "examples"})
MOST_ERRORS = 3
"""Wrong arguments of a call that are told."""


@lru_cache(maxsize=256)
def schema_of(function: Function) -> Mapping[str, Any]:
    """The JSON schema of a function: types from its hints, descriptions from its docstring where it has them.

    The docstring may be of NumPy, Google or reST style. A function with an attribute `tool_schema` has that one.

    Raises
    ------
    BadInput
        A parameter without a type hint, with one that has no JSON schema, or that cannot be given by its name.
    """
    if isinstance(given := getattr(function, "tool_schema", None), Mapping):
        return given
    told = function.func if isinstance(function, partial) else function
    name = getattr(told, "__name__", None) or type(told).__name__
    try:
        parameters = _parameters(function)
    except (NameError, TypeError, ValueError) as error:
        raise BadInput(f"tool {name!r}: {' '.join(str(error).split())}") from None
    about, of_parameters = _descriptions(inspect.getdoc(told if inspect.isroutine(told) else type(told).__call__) or "")
    for parameter, schema in parameters["properties"].items():
        if of_parameters.get(parameter):
            schema.setdefault("description", of_parameters[parameter])
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def arguments_for(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model's call as the type hints of the function have them: instances of its classes.

    Raises
    ------
    ValueError
        With a line that says which argument is wrong, and why.
    """
    from pydantic import ValidationError
    from pydantic_core import ArgsKwargs

    if hasattr(function, "tool_schema"):
        return dict(given)  # who gave the schema checks what fits it
    parameters = inspect.signature(function).parameters
    # A default need not be of its parameter's type.
    kept = {name: value for name, value in given.items() if name in parameters and value is parameters[name].default}
    named = {name: value for name, value in given.items() if name not in kept}
    try:
        made = _adapter(function).validate_python(ArgsKwargs((), named))
        # Of an `Iterable`, which is not picklable.
        return {name: list(made[name]) if isinstance(made[name], Iterator) else made[name] for name in named} | kept
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise ValueError("; ".join(wrong[:MOST_ERRORS])) from None
    except Exception as error:  # of a class of the user's
        raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=256)
def _adapter(function: Function) -> TypeAdapter[dict[str, Any]]:
    """What checks the arguments of a call, and gives them back."""
    # Imported here because it takes 0.2 s, and not each run has tools.
    from pydantic import TypeAdapter

    def taken(**arguments: Any) -> dict[str, Any]:
        return arguments

    # An object with `__call__` is called by it.
    called: Any = function.func if isinstance(function, partial) else function
    if not inspect.isroutine(called):
        called = called.__call__
    taken.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    taken.__annotations__ = get_type_hints(called, include_extras=True)
    checked: Any = taken
    return TypeAdapter(checked)


def _parameters(function: Function) -> dict[str, Any]:
    """What a call must give; TypeError or ValueError if that has no schema."""
    from pydantic.errors import PydanticUserError
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        def emit_warning(self, kind: Any, detail: str) -> None:
            """A default that is no JSON value is left out."""

    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"parameter {parameter.name!r} has no name in a call: models give arguments by name")
        if parameter.annotation is parameter.empty and parameter.kind != parameter.VAR_KEYWORD:
            raise TypeError(f"parameter {parameter.name!r} has no type hint")
    try:
        schema = _adapter(function).json_schema(schema_generator=Quiet)
    except PydanticUserError as error:
        raise TypeError(f"a type hint has no JSON schema: {error.message}") from None
    schema.pop("additionalProperties", None)
    schema.setdefault("properties", {})
    untitled: dict[str, Any] = _untitled(schema)
    return untitled


def _untitled(schema: Any) -> Any:
    """Without the titles that repeat the names of parameters, and the type first, as models have seen it."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _untitled(value)
        for key, value in sorted(schema.items(), key=lambda item: item[0] != "type")
        if not (key == "title" and isinstance(value, str))
    }


def _descriptions(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says about the function, and about its parameters."""
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:  # prose that looks like a section
        return text, {}
    found = {each.arg_name: " ".join((each.description or "").split()) for each in parsed.params}
    return (parsed.description or "").strip(), found
