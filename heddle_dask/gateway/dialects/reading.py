"""Reading bodies of requests: JSON, fields and texts, refused in one line that says where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from heddle_dask.core.errors import BadInput, cut_text, encodable_value
from heddle_dask.core.sampling import StructuredOutput, check_sampling, check_seed, checked_stop

_MOST_CHOICES = 128
_LINE = 500


class ApiFields(BaseModel):
    """Fields of an API; those that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


Fields = TypeVar("Fields", bound=ApiFields)
Parts = str | list[dict[str, Any]] | None


def read_fields(kind: type[Fields], body: bytes) -> Fields:
    """The fields of a body.

    Raises
    ------
    BadInput
        The body is no JSON object, or a field has another type.
    """
    try:
        # strict=False: clients exist that write bare line breaks inside strings.
        value = json.loads(body, strict=False)
    except RecursionError:
        raise BadInput("the body is nested too deep") from None
    except ValueError as error:
        raise BadInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput("the body must be a JSON object")
    if b"\\ud" in body or b"\\uD" in body:
        value = encodable_value(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise BadInput(cut_text(f"{where}: {first['msg']}", _LINE)) from None


_TEXT_KINDS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_PICTURES = frozenset({"image", "image_url", "input_image"})


def joined_text(content: Parts, where: str) -> str:
    """The text of a content that is a text or a list of parts, one part a line.

    Raises
    ------
    BadInput
        A part is no text: images, sound and files are refused.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, where) for part in content)


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type", "text")
    if kind in _PICTURES:
        raise BadInput(f"{where}: images are not supported: send text only")
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind not in _TEXT_KINDS and kind != "refusal":
        raise BadInput(f"{where}: content of type {str(kind)[:60]!r} is not supported: send text only")
    if not isinstance(text, str):
        raise BadInput(f"{where}: a part of type {kind!r} needs a text")
    return text


def structured_of(form: Mapping[str, Any] | None, schema: Any, where: str) -> StructuredOutput | None:
    """The form that the answer must have, of a ``response_format`` or one like it.

    Parameters
    ----------
    schema
        The JSON schema, from where the API keeps it.
    """
    kind = (form or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_schema={"type": "object"})
    if kind != "json_schema":
        raise BadInput(f"{where}: type {kind!r} is not supported: use text, json_object or json_schema")
    if not isinstance(schema, dict):
        raise BadInput(f"{where}: json_schema needs a schema, a JSON object")
    return StructuredOutput(json_schema=schema)


def sampling_fields(
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: str | list[str] | None = None,
    n: int | None = None,
) -> dict[str, Any]:
    """Fields of a `StepOrder`, checked; None stays: it stands for the run's value."""
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"max_tokens is {max_tokens}: use a whole number of at least 1")
    if n is not None and not 1 <= n <= _MOST_CHOICES:
        raise BadInput(f"n is {n}: use a whole number from 1 to {_MOST_CHOICES}")
    if top_k == -1:  # vLLM's own name for no limit
        top_k = 0
    check_sampling("request", _or(temperature, 1.0), _or(top_p, 1.0), _or(top_k, 0), _or(min_p, 0.0))
    if seed is not None:
        check_seed("request", seed)
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": checked_stop("request", stop or None),
        "n": n or 1,
    }


def _or(value: Any, default: float) -> Any:
    return default if value is None else value


def template_text(variables: Mapping[str, Any] | None, effort: str | None) -> str:
    """JSON text of the variables of a chat template; an effort of thinking sets what vLLM sets by it."""
    of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    both = {**of_effort, **(variables or {})}
    return json.dumps(both) if both else ""
