"""Saves and loads a learned predictor: its training data, the history of prompts and its model, as gzipped JSON.

A loaded predictor makes the same predictions and goes on learning. Running trajectories are not saved: a new run has
others. Files of version 5 have no history of prompts besides their training data: it is made from these.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import MOST_JSON_BYTES, read_plain
from heddle_dask.core.value_types import FAULTS, check_types, checked
from heddle_dask.predictors.core_model import CoreModel, LengthDistributions
from heddle_dask.predictors.features import FEATURES, Finished, Floats, Progress
from heddle_dask.predictors.learned import LearnedPredictor, LearningSettings, Learnt
from heddle_dask.predictors.length_distributions import Location, ResidualDistribution
from heddle_dask.predictors.model import Calibration, Model
from heddle_dask.predictors.prompt_history import DEFAULT_DRIFT, PastAttempt, Variances, prompt_of
from heddle_dask.predictors.trees import Trees, TreeSettings

FORMAT = "heddle predictor"
VERSION = 6
_BEFORE_HISTORY = 5
_PROGRESS = tuple(each.name for each in fields(Progress))
_FINISHED = tuple(each.name for each in fields(Finished) if each.name != "points")
# Numbers of fields at their ends that rows of version 5 lack; all have defaults.
_LATER_PROGRESS, _LATER_FINISHED = 2, 4


def save_predictor(predictor: LearnedPredictor, path: Path | str) -> None:
    path = Path(path)
    learnt = predictor.learnt()
    data = {
        "format": FORMAT,
        "version": VERSION,
        "features": FEATURES,
        "trees": asdict(predictor.trees),
        "learning": asdict(predictor.learning),
        "told": learnt.told,
        "fitted_at": learnt.fitted_at,
        "run": learnt.run,
        "finished": [_finished_out(one) for one in learnt.finished],
        "history": {key: [list(each) for each in attempts] for key, attempts in learnt.history.items()},
        "model": _model_out(predictor.model),
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
    partial.replace(path)


def load_predictor(path: Path | str) -> LearnedPredictor:
    """Read what `save_predictor` wrote."""
    where = f"predictor file {str(path)!r}"
    try:
        with gzip.open(io.BytesIO(read_plain(Path(path)))) as file:
            text = file.read(MOST_JSON_BYTES + 1)
        if len(text) > MOST_JSON_BYTES:
            raise BadInput(f"{where} is larger than {MOST_JSON_BYTES:,} bytes: train it again")
        data = json.loads(text)
    except BadInput:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, RecursionError):
        raise BadInput(f"{where} is no saved predictor: give a file written by save_predictor") from None
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror or error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BadInput(f"{where} is no saved predictor: give a file written by save_predictor")
    if data.get("version") not in (_BEFORE_HISTORY, VERSION) or data.get("features") != list(FEATURES):
        raise BadInput(
            f"{where} is of version {data.get('version')} or has other features; this program reads versions "
            f"{_BEFORE_HISTORY} and {VERSION}: train it again"
        )
    try:
        return _predictor_in(data)
    except BadInput:
        raise
    except (*FAULTS, xgb.core.XGBoostError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{where} is damaged ({line:.80}): train it again") from None


def _predictor_in(data: Mapping[str, Any]) -> LearnedPredictor:
    predictor = LearnedPredictor(TreeSettings(**data["trees"]), LearningSettings(**data["learning"]))
    model = _model_in(data["model"], predictor.trees)
    before = data["version"] == _BEFORE_HISTORY
    kinds: set[Any] = set()
    finished = tuple(_finished_in(one, before, kinds) for one in data["finished"])
    history: dict[str, list[PastAttempt]] = {}
    if before:
        for one in finished:
            history.setdefault(prompt_of(one), []).append(PastAttempt.of(one))
    else:
        history = {key: [checked(PastAttempt(*each)) for each in attempts] for key, attempts in data["history"].items()}
    run = 0 if before else int(data["run"])
    predictor.restore(Learnt(finished, int(data["told"]), int(data["fitted_at"]), run, history), model)
    return predictor


def _finished_out(one: Finished) -> list[Any]:
    points = [[getattr(point, name) for name in _PROGRESS] for point in one.points]
    return [[getattr(one, name) for name in _FINISHED], points]


def _finished_in(data: Any, before: bool, kinds: set[Any]) -> Finished:
    own, points = data
    names = _FINISHED[:-_LATER_FINISHED] if before else _FINISHED
    kept = [_progress_in(point, before, kinds) for point in points]
    return replace(checked(Finished(**dict(zip(names, own, strict=True)), points=())), points=tuple(kept))


def _progress_in(values: list[Any], before: bool, kinds: set[Any]) -> Progress:
    """One point; `kinds` has the types of those that were found good: there are very many."""
    names = _PROGRESS[:-_LATER_PROGRESS] if before else _PROGRESS
    named: dict[str, Any] = dict(zip(names, values, strict=True))
    for name in ("step_tokens", "observed_tokens", "tool_labels", "tool_times_s"):
        named[name] = tuple(named[name])
    kind = tuple(type(each) if type(each) is not list else (list, *map(type, each)) for each in values)
    if kind not in kinds:
        check_types(Progress(**named))
        kinds.add(kind)
    return Progress(**named)


def _model_out(model: Model | None) -> dict[str, Any] | None:
    if model is None:
        return None
    location_s, trees, shifts = model.core.location_s, model.core.trees, model.calibration
    return {
        "finished": model.finished,
        "ratio_trust": model.ratio_trust if math.isfinite(model.ratio_trust) else None,
        "labels": model.core.labels,
        "laws": _distributions_out(model.core.distributions),
        "location_s": _location_out(location_s) if location_s else None,
        "trees": _trees_out(trees) if trees else None,
        "calibration": {"weight": shifts.weight.tolist(), "shift": shifts.shift.tolist()} if shifts else None,
    }


def _model_in(data: Any, settings: TreeSettings) -> Model | None:
    if data is None:
        return None
    location_s, trees, shifts = data["location_s"], data["trees"], data["calibration"]
    core = CoreModel(
        distributions=_distributions_in(data["laws"]),
        location_s=_location_in(location_s) if location_s else None,
        labels=dict(data["labels"]),
        trees=_trees_in(trees, settings) if trees else None,
    )
    calibration = Calibration(np.array(shifts["weight"]), np.array(shifts["shift"])) if shifts else None
    # Models of earlier versions have none.
    trust = data.get("ratio_trust")
    return Model(core, calibration, int(data["finished"]), math.inf if trust is None else float(trust))


def _trees_out(trees: Trees) -> dict[str, str | None]:
    return {
        "any_step": _booster_out(trees.any_step),
        "start": _booster_out(trees.start) if trees.start else None,
    }


def _trees_in(data: Mapping[str, Any], settings: TreeSettings) -> Trees:
    start = data["start"]
    trees = Trees(_booster_in(data["any_step"], settings), _booster_in(start, settings) if start else None)
    trees.prepare()
    return trees


def _booster_out(booster: xgb.Booster) -> str:
    return bytes(booster.save_raw("json")).decode()


def _booster_in(text: str, settings: TreeSettings) -> xgb.Booster:
    booster = xgb.Booster({"nthread": settings.threads})
    booster.load_model(bytearray(text.encode()))
    return booster


def _location_out(location: Location) -> dict[str, Any]:
    return {"overall": location.overall, "cells": dict(location.cells)}


def _location_in(data: Mapping[str, Any]) -> Location:
    return checked(Location(data["overall"], data["cells"]))


def _distributions_out(distributions: LengthDistributions) -> dict[str, Any]:
    return {
        **_location_out(distributions.location),
        "trust": distributions.history_variances.trust,
        "drift": distributions.history_variances.drift,
        **{name: _residual_out(getattr(distributions, name)) for name in ("constant", "prompt", "history")},
    }


def _distributions_in(data: Mapping[str, Any]) -> LengthDistributions:
    return LengthDistributions(
        _location_in(data),
        checked(Variances(data["trust"], data.get("drift", DEFAULT_DRIFT))),
        *(_residual_in(data[name]) for name in ("constant", "prompt", "history")),
    )


def _residual_out(residual: ResidualDistribution) -> dict[str, Any]:
    return {
        "at": residual.at.tolist(),
        "survival": residual.survival.tolist(),
        "tail_at": residual.tail_at,
        "tail_scale": residual.tail_scale,
    }


def _residual_in(data: Mapping[str, Any]) -> ResidualDistribution:
    at: Floats = np.array(data["at"], dtype=np.float64)
    survival: Floats = np.array(data["survival"], dtype=np.float64)
    return ResidualDistribution(at, survival, float(data["tail_at"]), float(data["tail_scale"]))
