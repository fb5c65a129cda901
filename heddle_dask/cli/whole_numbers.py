"""Whole numbers, separated by commas, as options take them."""

from __future__ import annotations

from heddle_dask.core.errors import BadInput


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """The numbers in the order given.

    Raises
    ------
    BadInput
        One of them is no whole number, or below 1; the message names the option and gives `example`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadInput(f"{option} {text!r}: use whole numbers of at least 1, for example {example}")
    return numbers
