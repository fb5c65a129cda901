"""``--degrees`` and ``--cost`` of ``heddle rollout``, from text to what `Rollout` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from heddle_dask.cli.shared_options import read_toml
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import profile_names
from heddle_dask.cost.measured import MeasuredTable, table_names
from heddle_dask.cost.published import model_of
from heddle_dask.engines.kinds import engine_kind

if TYPE_CHECKING:
    from heddle_dask.live.degree_specs import DegreeSpecs


def check_cost(cost: Mapping[str, Any] | None, model: str, engine: str) -> None:
    """Refuse, before anything starts, a measured table that cannot be read, or is of another model than real engines.

    An engine that takes the cost it is given may have that of any model.

    Raises
    ------
    BadInput
        It is such a table.
    """
    if cost is None or "table" not in cost:
        return
    table = MeasuredTable.load(str(cost["table"]))
    if not engine_kind(engine).takes_cost:
        table.check(model_of(model), table.degree)


def parsed_degrees(text: str | None) -> Literal["auto"] | tuple[int, ...] | None:
    """``auto``, or whole numbers with commas between.

    Raises
    ------
    BadInput
        It is neither.
    """
    if text is None:
        return None
    if text == "auto":
        return "auto"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise BadInput(f"--degrees is {text!r}: use 'auto' or whole numbers of at least 1, such as 2,1,1")
    return tuple(int(part) for part in parts)


def check_degrees(
    degrees: Literal["auto"] | tuple[int, ...] | None, specs: DegreeSpecs, local_engines: int | None
) -> None:
    """Refuse, before anything starts, engines that this model or this machine cannot have.

    Parameters
    ----------
    local_engines
        Workers of the cluster that is to be started here, with a GPU each; None: another's cluster, unknown yet.

    Raises
    ------
    BadInput
        A degree at which the model does not run, more GPUs than there are, or `auto` without known costs.
    """
    if degrees is None:
        return
    if degrees == "auto":
        specs.engines()
        return
    if local_engines is not None and sum(degrees) > local_engines:
        raise BadInput(
            f"--degrees {','.join(map(str, degrees))} need {sum(degrees)} workers, and --engines {local_engines} says "
            f"how many there are: use --engines {sum(degrees)}"
        )
    for degree in dict.fromkeys(degrees):
        specs.at(degree)


def parsed_cost(text: str | None) -> dict[str, Any] | None:
    """A cost in a form of `cost_from_mapping`: a shipped profile, a measured table, or what a TOML file holds.

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
