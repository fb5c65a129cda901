"""Memory and time as people write them in cluster files, and as SLURM reads them."""

from __future__ import annotations

import math
import re

from heddle_dask.core.errors import BadInput, is_finite

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP])(i?B)?", re.IGNORECASE)
_PREFIXES = "KMGTP"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)")
_DURATION_S = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MIB = 1 << 20


def memory_bytes_of(text: object, name: str) -> int:
    """Bytes of ``16GB`` (10^9), ``16GiB`` (2^30) or ``16G`` (2^30, as in ``#SBATCH --mem=16G``).

    Raises
    ------
    BadInput
        It is none of these, or no byte at all; `name` says what is wrong.
    """
    match = _MEMORY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise BadInput(f"{name} is {text!r}: give a number with a unit, such as 16GB, 16GiB or 500MB")
    number, prefix, suffix = match.groups()
    base = 1000 if suffix is not None and suffix.upper() == "B" else 1024
    unit: int = base ** (_PREFIXES.index(prefix.upper()) + 1)
    amount = math.ceil(float(number) * unit)
    if not 0 < amount < 1 << 60:
        raise BadInput(f"{name} is {text!r}: use more than nothing and less than 2^60 bytes")
    return amount


def slurm_memory(memory_bytes: int) -> str:
    """For ``--mem``: whole mebibytes, rounded up."""
    return f"{math.ceil(memory_bytes / _MIB)}M"


def seconds_of(text: object, name: str) -> float:
    """Seconds of a number, of ``90s``, ``30min``, ``2h``, ``1d``, or of a time as SLURM writes it.

    SLURM's forms are ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` and ``D-HH:MM:SS``. A text of digits alone would be
    minutes to SLURM and seconds to everybody else: it is refused.

    Raises
    ------
    BadInput
        It is none of these, or not above 0; `name` says what is wrong.
    """
    seconds = float(text) if is_finite(text) else _parsed_seconds(text) if isinstance(text, str) else None
    if seconds is None:
        raise BadInput(
            f"{name} is {text!r}: give HH:MM:SS, D-HH:MM:SS, a number with a unit such as 90s, 30min, 2h or 1d, "
            "or a number of seconds without quotes"
        )
    if not 0 < seconds < 2**31:
        raise BadInput(f"{name} is {text!r}: use more than 0 and less than 2^31 seconds")
    return seconds


def _parsed_seconds(text: str) -> float | None:
    text = text.strip()
    with_unit = _DURATION.fullmatch(text)
    if with_unit is not None:
        return float(with_unit[1]) * _DURATION_S[with_unit[2]]
    clock = _CLOCK.fullmatch(text)
    if clock is None or (clock.lastindex == 2 and clock[1] is None):
        return None
    days, first, second, third = (None if part is None else int(part) for part in clock.groups())
    if days is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first or 0, second or 0, third
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return float((days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def slurm_time(seconds: float) -> str:
    """For ``--time``: ``HH:MM:SS`` or ``D-HH:MM:SS``, rounded up to whole seconds."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}" if days else f"{hour:02}:{minute:02}:{second:02}"
