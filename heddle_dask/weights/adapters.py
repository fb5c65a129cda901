"""LoRA adapters, merged with the weights that they were trained on: W + scale B A (Hu et al. 2021, section 4.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from heddle_dask.weights.bfloat16 import from_float32, to_float32
from heddle_dask.weights.manifest import AdapterFacts, TensorFacts, WeightsRefused
from heddle_dask.weights.tensor_files import RawTensor

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
            raise WeightsRefused(
                f"tensor {name} of an adapter is neither lora_A nor lora_B: publish merged weights"
            )
        parts.setdefault(match["module"] + ".weight", {})[match["part"]] = name
    for target, found in parts.items():
        if set(found) != {"A", "B"}:
            raise WeightsRefused(f"an adapter has only one matrix for {target}")
    return {target: (found["A"], found["B"]) for target, found in parts.items()}


def check_adapter(
    tensors: Iterable[TensorFacts], base: Mapping[str, TensorFacts], adapter: AdapterFacts
) -> None:
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
