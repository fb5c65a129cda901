"""Measured tables of an engine: what `heddle profile` writes; `heddle_dask.cost.table_fit` fits a cost to it.

A table is one JSON object. ``format`` and ``version`` identify it; ``model``, ``shape``, ``degree``, ``device``,
``engine`` and ``date`` say what was measured; the points are seconds. A table overrides the formula of
`heddle_dask.cost.hardware` for its own model and degree, and is refused for any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date as calendar_date
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import read_plain
from heddle_dask.cost.hardware import LAUNCH_S, LAYER_S, SEQUENCE_S, ModelShape, all_reduce_s, check_degree
from heddle_dask.cost.iteration import BLOCK_TOKENS

FORMAT = "heddle-engine-table"
VERSION = 1

TableKind = Literal["engine", "operators"]


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Seconds per token of each of `batch` sequences with `context_tokens` in total."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TokensPoint:
    """Seconds for a number of tokens: a prompt prefilled alone, or a transfer of a context's KV."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BurstPoint:
    """Seconds until `requests` prompts, sent at once, have their first tokens.

    Attributes
    ----------
    cached_tokens, new_tokens
        Tokens of each prompt that the prefix cache has, and that it has not.
    """

    requests: int
    cached_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MixedPoint:
    """Seconds in which each of `decoding` sequences samples `tokens` tokens while `prompts` prompts are answered.

    Attributes
    ----------
    context_tokens
        Mean resident tokens of the decoding sequences in total.
    cached_tokens, new_tokens
        As of `BurstPoint`.
    """

    decoding: int
    context_tokens: int
    tokens: int
    prompts: float
    cached_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """The measurements of one engine.

    Attributes
    ----------
    kind
        ``"engine"``: whole iterations, seen from a client. ``"operators"``: the sum of an iteration's large kernels on
        one GPU of the engine; the formula's constants then add the time outside these kernels.
    model, shape, degree
        The measured model; `check` compares shape and degree.
    device, engine, date
        Hardware and engine, in words; ISO date.
    slots, chunk_tokens
        Maximum number of sequences in a batch, and of prompt tokens in an iteration.
    capacity_tokens
        KV capacity in tokens; 0: not known.
    start_s
        Seconds until the engine answered; 0: not measured.
    engines
        Number of such engines that ran the same sweep at the same time on the same machine.
    block_tokens, chunked_prefill
        Tokens in a KV block of the engine, and whether it splits prompts into chunks.
    cached_step
        A step of one token after a context of which all but the last token is cached; None: not measured.
    bursts, mixed
        Many prompts at once, and prompts beside decoding sequences; empty: not measured.
    conditions
        Other conditions of the measurement, in words.
    """

    model: str
    shape: ModelShape
    degree: int
    device: str
    engine: str
    date: str
    slots: int
    chunk_tokens: int
    decode: tuple[DecodePoint, ...]
    prefill: tuple[TokensPoint, ...]
    kv_transfer: tuple[TokensPoint, ...] = ()
    capacity_tokens: int = 0
    start_s: float = 0.0
    engines: int = 1
    block_tokens: int = BLOCK_TOKENS
    chunked_prefill: bool = True
    cached_step: TokensPoint | None = None
    bursts: tuple[BurstPoint, ...] = ()
    mixed: tuple[MixedPoint, ...] = ()
    kind: TableKind = "engine"
    conditions: str = ""
    where: str = field(default="table", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(TableKind):
            raise BadInput(f"{self.where}: kind {self.kind!r} is unknown: use {' or '.join(get_args(TableKind))}")
        for name in ("model", "device", "engine"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise BadInput(f"{self.where}: {name} is {getattr(self, name)!r}: give a text")
        try:
            calendar_date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise BadInput(f"{self.where}: date is {self.date!r}: give it as YYYY-MM-DD") from None
        for name, least in (
            *(("slots", 1), ("chunk_tokens", 1), ("capacity_tokens", 0)),
            *(("degree", 1), ("engines", 1), ("block_tokens", BLOCK_TOKENS)),
        ):
            _check_whole(getattr(self, name), least, f"{self.where}: {name}")
        if self.block_tokens % BLOCK_TOKENS:
            raise BadInput(f"{self.where}: block_tokens is {self.block_tokens}: use a multiple of {BLOCK_TOKENS}")
        if not isinstance(self.chunked_prefill, bool):
            raise BadInput(f"{self.where}: chunked_prefill is {self.chunked_prefill!r}: use true or false")
        _check_seconds(self.start_s, f"{self.where}: start_s", least=0.0)
        check_degree(self.shape, self.degree)
        if len(self.decode) < 2 or not self.prefill:
            raise BadInput(f"{self.where}: too little to fit: give at least 2 points of decode and 1 of prefill")
        for decode in self.decode:
            _check_whole(decode.batch, 1, f"{self.where}: batch")
            _check_whole(decode.context_tokens, 0, f"{self.where}: context_tokens")
            _check_seconds(decode.seconds, f"{self.where}: decode seconds")
        cached = () if self.cached_step is None else (self.cached_step,)
        for point in (*self.prefill, *self.kv_transfer, *cached):
            _check_whole(point.tokens, 1, f"{self.where}: tokens")
            _check_seconds(point.seconds, f"{self.where}: seconds")
        several: tuple[BurstPoint | MixedPoint, ...] = (*self.bursts, *self.mixed)
        for many in several:
            for field_ in fields(many):
                value, what = getattr(many, field_.name), f"{self.where}: {field_.name}"
                if field_.name == "seconds":
                    _check_seconds(value, what)
                elif field_.name == "prompts":
                    _check_seconds(value, what, least=0.0)
                else:
                    _check_whole(value, 0 if field_.name == "cached_tokens" else 1, what)

    # ------------------------------------------------------------------ use

    def check(self, shape: ModelShape, degree: int) -> None:
        """Refuse the table for another model or degree.

        Raises
        ------
        BadInput
            It was measured with other weights, layers, heads or KV bytes, or at another degree.
        """
        for name in (
            "layers",
            "hidden_size",
            "heads",
            "kv_heads",
            "experts",
            "parameters",
            "kv_bytes_per_token",
        ):
            mine, theirs = getattr(self.shape, name), getattr(shape, name)
            if mine != theirs:
                raise BadInput(
                    f"{self.where} is of another model ({self.model}: {name} {mine:g}, asked for {theirs:g}): "
                    "measure this one with `heddle profile`"
                )
        if degree != self.degree:
            raise BadInput(
                f"{self.where} is of TP degree {self.degree}, asked for {degree}: measure that with `heddle profile`"
            )

    def beside_kernels_s(self) -> float:
        if self.kind == "engine":
            return 0.0
        return LAUNCH_S + self.shape.layers * (LAYER_S + 2 * all_reduce_s(self.degree))

    def whole_s(self, point: DecodePoint) -> float:
        """Seconds of the whole iteration of a point; for operators with the formula's time outside the kernels."""
        sequences_s = SEQUENCE_S * point.batch if self.kind == "operators" else 0.0
        return point.seconds + self.beside_kernels_s() + sequences_s

    def whole_prefill_s(self, point: TokensPoint) -> float:
        """Like `whole_s`, for a prompt."""
        return point.seconds + self.beside_kernels_s() * math.ceil(point.tokens / self.chunk_tokens)

    # ------------------------------------------------------------------ storage

    def to_mapping(self) -> dict[str, Any]:
        """The JSON object from which `from_mapping` makes an equal table."""
        content = asdict(self)
        del content["where"]
        for name in _POINTS:
            content[name] = list(content[name])
        return {"format": FORMAT, "version": VERSION, **content}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "table") -> MeasuredTable:
        """Read a table from parsed JSON."""
        if mapping.get("format") != FORMAT:
            raise BadInput(f"{where} is no engine table: its format is {mapping.get('format')!r}, not {FORMAT!r}")
        if mapping.get("version") != VERSION:
            raise BadInput(
                f"{where} is of version {mapping.get('version')!r}: this program reads version {VERSION}: "
                "measure it again with `heddle profile`"
            )
        content = {key: value for key, value in mapping.items() if key not in ("format", "version")}
        known = {f.name for f in fields(cls)} - {"where"}
        optional = {
            *("kv_transfer", "capacity_tokens", "start_s", "kind", "conditions"),
            *("engines", "block_tokens", "chunked_prefill", "cached_step", "bursts", "mixed"),
        }
        wrong = sorted((set(content) - known) | (known - optional - set(content)))
        if wrong:
            raise BadInput(f"{where} {'lacks' if wrong[0] in known else 'has unknown key'} {wrong[0]!r}")
        try:
            content["shape"] = ModelShape.from_mapping(content["shape"])
            for name, kind in _POINTS.items():
                content[name] = tuple(kind(**point) for point in content.get(name, ()))
            cached = content.get("cached_step")
            content["cached_step"] = None if cached is None else TokensPoint(**cached)
        except BadInput:
            raise
        except (TypeError, ValueError) as error:
            raise BadInput(f"{where}: a point is malformed: {error}") from None
        return cls(**content, where=where)

    def save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.to_mapping(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write the table to {path}: {error.strerror}") from None

    @classmethod
    def load(cls, name_or_path: str | Path) -> MeasuredTable:
        """Read a shipped table by name, or a file."""
        name = str(name_or_path)
        try:
            shipped_one = name in table_names()
            content = json.loads(_shipped(name).read_bytes() if shipped_one else read_plain(Path(name)))
        except OSError as error:
            shipped = f"; shipped are: {', '.join(table_names())}" if table_names() else ""
            raise BadInput(f"engine table {name}: {error.strerror}{shipped}") from None
        except (ValueError, RecursionError) as error:
            raise BadInput(f"engine table {name} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise BadInput(f"engine table {name} is no JSON object: write one with `heddle profile`")
        return cls.from_mapping(content, f"engine table {name}")


def table_names() -> list[str]:
    folder = resources.files("heddle_dask.cost") / "tables"
    if not folder.is_dir():
        return []
    return sorted(e.name.removesuffix(".json") for e in folder.iterdir() if e.name.endswith(".json"))


def _shipped(name: str) -> Any:
    return resources.files("heddle_dask.cost") / "tables" / f"{name}.json"


_POINTS: Mapping[str, type[Any]] = {
    "decode": DecodePoint,
    "prefill": TokensPoint,
    "kv_transfer": TokensPoint,
    "bursts": BurstPoint,
    "mixed": MixedPoint,
}


def _check_whole(value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{what} is {value!r}: use a whole number of at least {least}")


def _check_seconds(value: object, what: str, least: float = 1e-9) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise BadInput(f"{what} is {value!r}: use seconds above 0")
