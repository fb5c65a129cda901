"""Whether published weights may replace those of a running model: decided from a manifest, before any pause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.adapters import check_adapter
from heddle_dask.weights.manifest import ModelFacts, TensorFacts, WeightManifest, WeightsRefused

_NAMED_AT_ONCE = 3

_STORED_AS: Final[Mapping[str, str]] = {"float32": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class RunningModel:
    """The model that an engine was started with.

    Attributes
    ----------
    tensors
        By name, as its files have them.
    dtype
        The type in which the engine runs it; ``"auto"``: that of its files.
    """

    facts: ModelFacts
    tensors: Mapping[str, TensorFacts]
    dtype: str = "auto"


def check_order(manifest: WeightManifest, asked: PolicyVersion, current: PolicyVersion) -> None:
    """Raise `WeightsRefused` when a manifest is not of the version `asked` for, or does not replace `current`."""
    if manifest.version != asked:
        raise WeightsRefused(f"the manifest is of weights {manifest.version}, and {asked} were asked for")
    if not asked.is_newer_than(current):
        raise WeightsRefused(f"weights {asked} are not newer than the engine's {current}")


def check_fits(manifest: WeightManifest, model: RunningModel) -> None:
    """Raise `WeightsRefused` when the weights are those of another model, or of a part of it."""
    if manifest.model.config_digest != model.facts.config_digest:
        raise WeightsRefused(f"weights {manifest.version} are of a model of another shape (config.json)")
    if manifest.model.tokenizer_digest != model.facts.tokenizer_digest:
        raise WeightsRefused(f"weights {manifest.version} are of a model with another tokenizer")
    if manifest.adapter is not None:
        check_adapter(manifest.tensors, model.tensors, manifest.adapter)
        return
    published = {tensor.name: tensor for tensor in manifest.tensors}
    for what, names in (
        ("lack", sorted(set(model.tensors) - set(published))),
        ("have the unknown", sorted(set(published) - set(model.tensors))),
    ):
        if names:
            more = f" and {len(names) - _NAMED_AT_ONCE} more" if len(names) > _NAMED_AT_ONCE else ""
            named = ", ".join(names[:_NAMED_AT_ONCE])
            raise WeightsRefused(f"weights {manifest.version} {what} tensors {named}{more}")
    for name, tensor in published.items():
        own = model.tensors[name]
        if tensor.shape != own.shape:
            raise WeightsRefused(
                f"weights {manifest.version} have {name} of shape {tensor.shape}, the model {own.shape}"
            )
        allowed = {own.dtype, _STORED_AS.get(model.dtype, own.dtype)}
        if tensor.dtype not in allowed:
            raise WeightsRefused(
                f"weights {manifest.version} have {name} as {tensor.dtype}, the model as {' or '.join(sorted(allowed))}"
            )
