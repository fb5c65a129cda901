"""LoRA adapters, merged with the weights that they were trained on; which weights a running model may take.

Merged are W + scale B A (Hu et al. 2021, section 4.1), also in types that NumPy lacks: bfloat16 is the upper half of
float32. Whether published weights may replace those of a running model is decided from a manifest, before any pause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.manifest import AdapterFacts, ModelFacts, TensorFacts, WeightManifest, WeightsRefused
from heddle_dask.weights.tensor_files import RawTensor


def to_float32(tensor: RawTensor) -> npt.NDArray[np.float32]:
    """The numbers of a tensor.

    Raises
    ------
    WeightsRefused
        Its type has no arithmetic here, such as a quantised one.
    """
    raw = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    if tensor.dtype == "BF16":
        values = (raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif tensor.dtype in ("F32", "F16"):
        values = raw.view({"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float32)
    else:
        raise WeightsRefused(f"tensor {tensor.name} has type {tensor.dtype}: an adapter needs F32, F16 or BF16")
    return values.reshape(tensor.shape)


def from_float32(name: str, dtype: str, values: npt.NDArray[np.float32]) -> RawTensor:
    """A tensor of these numbers, each rounded to the nearest of its type, ties to even."""
    shape = values.shape
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype="<f4").reshape(-1).view("<u4")
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        # The sum above would turn some patterns of "not a number" into infinity or zero.
        data: npt.NDArray[Any] = np.where(np.isnan(values.reshape(-1)), np.uint16(0x7FC0), rounded).astype("<u2")
    elif dtype in ("F32", "F16"):
        data = np.ascontiguousarray(values, dtype={"F32": "<f4", "F16": "<f2"}[dtype])
    else:
        raise WeightsRefused(f"tensor {name} has type {dtype}: an adapter needs F32, F16 or BF16")
    return RawTensor(name, dtype, shape, data)


# As PEFT stores them: base_model.model.<module>.lora_A.weight (rank, in) and lora_B.weight (out, rank). With an
# adapter's name, as in a running PeftModel: lora_A.default.weight.
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight")


def adapter_pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B by that of the weight that they change.

    Raises
    ------
    WeightsRefused
        A tensor is no LoRA matrix, or its partner is missing.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise WeightsRefused(f"tensor {name} of an adapter is neither lora_A nor lora_B: publish merged weights")
        parts.setdefault(match["module"] + ".weight", {})[match["part"]] = name
    for target, found in parts.items():
        if set(found) != {"A", "B"}:
            raise WeightsRefused(f"an adapter has only one matrix for {target}")
    return {target: (found["A"], found["B"]) for target, found in parts.items()}


def check_adapter(tensors: Iterable[TensorFacts], base: Mapping[str, TensorFacts], adapter: AdapterFacts) -> None:
    """Raise `WeightsRefused` for matrices that fit no weight of the base."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for target, (down, up) in adapter_pairs(shapes).items():
        if target not in base:
            raise WeightsRefused(f"an adapter changes {target}, which the model does not have")
        expected = base[target].shape
        if len(expected) != 2 or (shapes[down], shapes[up]) != (
            (adapter.rank, expected[1]),
            (expected[0], adapter.rank),
        ):
            raise WeightsRefused(
                f"an adapter of rank {adapter.rank} has matrices {shapes[up]} and {shapes[down]} for {target} "
                f"of shape {expected}"
            )


def merged(
    base: Iterable[RawTensor], adapter_tensors: Mapping[str, RawTensor], adapter: AdapterFacts
) -> Iterator[RawTensor]:
    """The tensors of the base with the adapter added, in the base's types; sums are in float32."""
    pairs = adapter_pairs(adapter_tensors)
    for tensor in base:
        pair = pairs.get(tensor.name)
        if pair is None:
            yield tensor
            continue
        down, up = (to_float32(adapter_tensors[name]) for name in pair)
        change = np.float32(adapter.scale) * (up @ down)
        yield from_float32(tensor.name, tensor.dtype, to_float32(tensor) + change)


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
