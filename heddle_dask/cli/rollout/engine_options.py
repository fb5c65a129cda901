"""``--tp`` and ``--cost`` of ``heddle rollout``, from text to what `Rollout` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from heddle_dask.cli.shared_options import whole_numbers
from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml
from heddle_dask.cost.engine_cost import profile_names
from heddle_dask.cost.measured import MeasuredTable, table_names
from heddle_dask.cost.published import model_of
from heddle_dask.engines.spec import engine_kind


def check_cost(cost: Mapping[str, Any] | None, model: str, engine: str) -> None:
    """Refuse, before anything starts, a measured table that cannot be read or is of another model than the engines'.

    An engine that takes the cost it is given may have that of any model.

    Raises
    ------
    BadInput
        The table cannot be read, or is of another model.
    """
    if cost is None or "table" not in cost:
        return
    table = MeasuredTable.load(str(cost["table"]))
    if not engine_kind(engine).takes_cost:
        table.check(model_of(model), table.degree)


def check_gpus(engines: int, gpus: Sequence[str]) -> None:
    """Refuse more engines than this machine has GPUs: each takes one where no TP degrees are given.

    Raises
    ------
    BadInput
        There are too few.
    """
    if engines > len(gpus):
        seen = f" ({', '.join(gpus)})" if gpus else ""
        raise BadInput(
            f"--engines {engines} need {engines} GPUs, this process sees {len(gpus)}{seen}: use fewer engines, or set "
            "CUDA_VISIBLE_DEVICES"
        )


def parsed_degrees(text: str | None) -> Literal["auto"] | tuple[int, ...] | None:
    """``auto``, or whole numbers separated by commas.

    Raises
    ------
    BadInput
        `text` is neither.
    """
    if text is None:
        return None
    return "auto" if text == "auto" else tuple(whole_numbers("--tp", text, "2,1,1, or use auto"))


def parsed_template_kwargs(text: str | None) -> dict[str, Any]:
    """Variables of the chat template from a JSON object.

    Raises
    ------
    BadInput
        It is none.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"--chat-template-kwargs {text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"--chat-template-kwargs {text!r}: give a JSON object of names and values")
    return value


def parsed_cost(text: str | None) -> dict[str, Any] | None:
    """A cost in a form of `cost_from_mapping`: a shipped profile, a measured table, or the content of a TOML file.

    Raises
    ------
    BadInput
        There is no such profile, table or file.
    """
    if text is None:
        return None
    if text in profile_names():
        return {"profile": text}
    if text in table_names() or text.endswith(".json"):
        return {"table": text if text in table_names() else str(Path(text).resolve())}
    if text.endswith(".toml"):
        return read_toml(Path(text), "--cost")
    raise BadInput(
        f"--cost {text!r} is unknown: give a profile ({', '.join(profile_names())}), a table "
        f"({', '.join(table_names()) or 'FILE.json'}) or a TOML file"
    )
