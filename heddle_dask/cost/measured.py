"""Measured tables of an engine: what `heddle profile` writes, and the cost that is fitted to it.

A table is one JSON object. ``format`` and ``version`` identify it; ``model``, ``shape``, ``degree``, ``device``,
``engine`` and ``date`` say what was measured; the points are seconds. A table overrides the formula of
`heddle_dask.cost.hardware` for its own model and degree, and is refused for any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date as calendar_date
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import LAUNCH_S, LAYER_S, SEQUENCE_S, ModelShape, all_reduce_s, check_degree
from heddle_dask.cost.iteration import BLOCK_TOKENS, EngineCost
from heddle_dask.cost.least_squares import non_negative_least_deviations

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
class TableFit:
    """An engine's cost fitted to a table, with the errors of the fit.

    Attributes
    ----------
    request_s
        Time of a request outside the engine: measured, else the time of single prompts beyond their tokens and
        iterations.
    decode_error_mean, decode_error_max, prefill_error_mean, prefill_error_max
        Errors of the fit relative to the measured values.
    kv_setup_s, kv_token_s
        Seconds of a KV transfer: fixed, and per token; None when not measured.
    """

    cost: EngineCost
    request_s: float
    decode_error_mean: float
    decode_error_max: float
    prefill_error_mean: float
    prefill_error_max: float
    kv_setup_s: float | None = None
    kv_token_s: float | None = None


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

    def fit(self, *, capacity_tokens: int | None = None) -> TableFit:
        """The non-negative cost terms closest to the points: least absolute relative deviations.

        Decoding first: fixed, per sequence, per resident token and, for a mixture of experts, by the experts that the
        batch visits. Then the prefill rate, given these. The cost per sequence is `sequence_s`; `token_s` stays 0. The
        time of a prompt beyond its tokens and iterations is `request_s`; if the table has measured `request_s`, the
        rest is the engine's own time, `prompt_s` of the cost.
        """
        terms = self._decode_terms()
        base = EngineCost(
            **terms,
            chunk_tokens=self.chunk_tokens,
            capacity_tokens=capacity_tokens or self.capacity_tokens or EngineCost(0.0).capacity_tokens,
            block_tokens=self.block_tokens,
            whole_prompts=not self.chunked_prefill,
        )
        way_s = self._way_s(base)
        rate, beside_s = self._prefill_terms(base, way_s or 0.0)
        request_s, prompt_s = (beside_s, 0.0) if way_s is None else (way_s, beside_s)
        cost = replace(base, prefill_token_s=rate, prompt_s=prompt_s)
        decode = [abs(cost.decode_token_s(p.batch, p.context_tokens) / self.whole_s(p) - 1) for p in self.decode]
        prefill = [abs((request_s + cost.prefill_s(p.tokens)) / self.whole_prefill_s(p) - 1) for p in self.prefill]
        setup, per_token = _line(self.kv_transfer) if self.kv_transfer else (None, None)
        return TableFit(
            cost,
            request_s,
            sum(decode) / len(decode),
            max(decode),
            sum(prefill) / len(prefill),
            max(prefill),
            setup,
            per_token,
        )

    def _decode_terms(self) -> dict[str, float]:
        share = self.shape.expert_share
        rows = np.array(
            [[1.0, p.batch, p.context_tokens, 1.0 - (1.0 - share) ** p.batch] for p in self.decode],
            dtype=float,
        )
        if not share:
            rows = rows[:, :3]
        # For operators, the formula's share is known and not fitted, but errors are relative to the whole time.
        whole = np.array([self.whole_s(p) for p in self.decode])
        measured = np.array([p.seconds for p in self.decode])
        found = non_negative_least_deviations(rows / whole[:, None], measured / whole)
        spared_s = float(found[3]) if share else 0.0
        return {
            "fixed_s": float(found[0]) + spared_s + self._beside_kernels_s(),
            "sequence_s": float(found[1]) + (SEQUENCE_S if self.kind == "operators" else 0.0),
            "context_token_s": float(found[2]),
            "spared_s": spared_s,
            "expert_share": share,
        }

    def _way_s(self, base: EngineCost) -> float | None:
        """Seconds of a request outside its iteration; None if no cached step was measured."""
        if self.cached_step is None:
            return None
        return max(0.0, self.cached_step.seconds - base.decode_token_s(1, self.cached_step.tokens))

    def _prefill_terms(self, base: EngineCost, way_s: float) -> tuple[float, float]:
        """Seconds per prompt token, and seconds of a prompt beyond its tokens, its iterations and `way_s`."""
        seconds = np.array([self.whole_prefill_s(p) for p in self.prefill])
        rest = seconds - [way_s + base.prefill_s(p.tokens) for p in self.prefill]
        # One request time per prompt, and one iteration per chunk.
        chunk_tokens = math.inf if self.cached_step is None else self.chunk_tokens
        columns = [[float(p.tokens), math.ceil(p.tokens / chunk_tokens) or 1.0] for p in self.prefill]
        rows = np.array(columns) if self.kind == "engine" and len(columns) > 1 else np.array(columns)[:, :1]
        found = non_negative_least_deviations(rows / seconds[:, None], rest / seconds)
        return float(found[0]), float(found[1]) if len(found) > 1 else 0.0

    def _beside_kernels_s(self) -> float:
        if self.kind == "engine":
            return 0.0
        return LAUNCH_S + self.shape.layers * (LAYER_S + 2 * all_reduce_s(self.degree))

    def whole_s(self, point: DecodePoint) -> float:
        """Seconds of the whole iteration of a point; for operators with the formula's time outside the kernels."""
        sequences_s = SEQUENCE_S * point.batch if self.kind == "operators" else 0.0
        return point.seconds + self._beside_kernels_s() + sequences_s

    def whole_prefill_s(self, point: TokensPoint) -> float:
        """Like `whole_s`, for a prompt."""
        return point.seconds + self._beside_kernels_s() * math.ceil(point.tokens / self.chunk_tokens)

    # ------------------------------------------------------------------ storage

    def to_mapping(self) -> dict[str, Any]:
        """The JSON object from which `from_mapping` makes an equal table."""
        content = asdict(self)
        del content["where"]
        for name in ("decode", "prefill", "kv_transfer"):
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
            *("engines", "block_tokens", "chunked_prefill", "cached_step"),
        }
        wrong = sorted((set(content) - known) | (known - optional - set(content)))
        if wrong:
            raise BadInput(f"{where} {'lacks' if wrong[0] in known else 'has unknown key'} {wrong[0]!r}")
        try:
            content["shape"] = ModelShape.from_mapping(content["shape"])
            content["decode"] = tuple(DecodePoint(**point) for point in content["decode"])
            content["prefill"] = tuple(TokensPoint(**point) for point in content["prefill"])
            content["kv_transfer"] = tuple(TokensPoint(**point) for point in content.get("kv_transfer", ()))
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
            text = (
                _shipped(name).read_text(encoding="utf-8")
                if name in table_names()
                else Path(name).read_text(encoding="utf-8")
            )
            content = json.loads(text)
        except OSError as error:
            shipped = f"; shipped are: {', '.join(table_names())}" if table_names() else ""
            raise BadInput(f"engine table {name}: {error.strerror}{shipped}") from None
        except ValueError as error:
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


def _line(points: Sequence[TokensPoint]) -> tuple[float, float]:
    """Fixed seconds and seconds per token closest to the points, by relative error."""
    seconds = np.array([p.seconds for p in points])
    rows = np.array([[1.0, float(p.tokens)] for p in points])
    found = non_negative_least_deviations(rows / seconds[:, None], np.ones(len(points)))
    return float(found[0]), float(found[1])


def _check_whole(value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{what} is {value!r}: use a whole number of at least {least}")


def _check_seconds(value: object, what: str, least: float = 1e-9) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise BadInput(f"{what} is {value!r}: use seconds above 0")
