"""What a language model says as a judge: its prompt, and the number in its reply. Pure."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heddle_dask.chat.reply_parts import answer_of
from heddle_dask.core.errors import BadInput, cut_text, encodable_text, is_finite, text_of

Messages = list[dict[str, str]]

JUDGE_PROMPT = """\
Given a question, its right answer and a response, say whether the response is right.

Question:
{question}

Right answer:
{answer}

Response:
{response}

End with one line: "Verdict: yes" or "Verdict: no"."""
"""Of `JudgeReward`: whether the response agrees with the payload's ``answer``."""

_VALUE = r"([-+]?\d+(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|yes|no|true|false|correct|incorrect|right|wrong)"
_NAMED = re.compile(rf"\b(?:score|rating|grade|verdict|judge?ment)\b\W{{1,6}}?{_VALUE}(?!\w)", re.IGNORECASE)
_ALONE = re.compile(rf"\W{{0,3}}{_VALUE}\W{{0,3}}", re.IGNORECASE)
_TRUE, _FALSE = ("yes", "true", "correct", "right"), ("no", "false", "incorrect", "wrong")


class Unreadable(Exception):
    """The reply of a judge has no verdict; the message is one line."""


def read_score(text: str) -> float | None:
    """The number or yes/no behind the last "score", "rating", "grade" or "verdict", or the whole reply; None: neither.

    Examples
    --------
    >>> read_score("It adds up.\\nScore: 7/10"), read_score("**Verdict:** yes"), read_score("No."), read_score("Hm")
    (0.7, 1.0, 0.0, None)
    """
    found = _NAMED.findall(text) or ([alone[1]] if (alone := _ALONE.fullmatch(text.strip())) else [])
    if not found:
        return None
    value = found[-1].lower()
    if value in _TRUE or value in _FALSE:
        return float(value in _TRUE)
    above, _, below = value.partition("/")
    return float(above) / float(below) if below and float(below) else None if below else float(above)


def messages_of(prompt: object) -> Messages:
    """A prompt as messages of a chat: a text is that of the user.

    Raises
    ------
    BadInput
        It is neither a text nor a list of messages with ``role`` and ``content``.
    """
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    wanted = "judge: use a text, or a list of messages {'role': …, 'content': …} of texts"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise BadInput(wanted)
    for each in given:
        if not isinstance(each, Mapping) or any(not isinstance(each.get(key), str) for key in ("role", "content")):
            raise BadInput(wanted)
    return [{key: encodable_text(each[key]) for key in ("role", "content")} for each in given]


def verdict_of(reply: Mapping[str, Any], read: Callable[[str], Any]) -> Any:
    """What `read` finds in a reply, behind its thinking; a number is a float.

    Raises
    ------
    Unreadable
        The reply was cut, or `read` raises or finds nothing, or no finite number.
    """
    text = str(reply["content"])
    if reply["finish_reason"] == "length":
        raise Unreadable(f"its reply was cut at its limit (max_tokens): {_end(text)}")
    try:
        value = read(answer_of(text))
    except Exception as error:
        raise Unreadable(f"its reply cannot be read: {type(error).__name__}: {text_of(error)}: {_end(text)}") from error
    if value is None or (isinstance(value, numbers.Real) and not is_finite(float(value))):
        raise Unreadable(f"its reply has no verdict: {_end(text)}")
    return float(value) if isinstance(value, numbers.Real) else value


def _end(text: str) -> str:
    return repr(cut_text(text[-200:], 200))


def filled(template: str, fields: Mapping[str, object]) -> str:
    """The template with these fields in place of their names in braces.

    Raises
    ------
    BadInput
        It names another field, or is no template.
    """
    try:
        return template.format_map(fields)
    except (LookupError, ValueError, AttributeError) as error:
        known = ", ".join(fields)
        raise BadInput(f"judge: the prompt cannot be filled: {type(error).__name__} {error} (known: {known})") from None
