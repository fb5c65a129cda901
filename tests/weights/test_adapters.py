"""Adapters merged with their base, and arithmetic in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.adapters import (
    RunningModel,
    adapter_pairs,
    check_fits,
    check_order,
    from_float32,
    merged,
    to_float32,
)
from heddle_dask.weights.manifest import (
    AdapterFacts,
    ModelFacts,
    TensorFacts,
    WeightBucket,
    WeightManifest,
    WeightsRefused,
)
from heddle_dask.weights.tensor_files import RawTensor

PREFIX = "base_model.model.model.layers.0."


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    array = np.array(values, dtype=np.float32)
    ours = from_float32("x", "BF16", array)
    theirs = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    numbers = ~np.isnan(array)
    assert np.array_equal(ours.data[numbers], theirs[numbers])
    back = to_float32(ours)
    assert np.array_equal(back[numbers], torch.from_numpy(array).to(torch.bfloat16).float().numpy()[numbers])
    assert np.isnan(back[~numbers]).all()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_an_adapter_is_added_to_its_base(dtype: str) -> None:
    random = np.random.default_rng(0)
    weight, other = random.normal(size=(6, 4)).astype("f4"), random.normal(size=3).astype("f4")
    down, up = random.normal(size=(2, 4)).astype("f4"), random.normal(size=(6, 2)).astype("f4")
    base = [
        from_float32("model.layers.0.q_proj.weight", dtype, weight),
        from_float32("model.norm.weight", dtype, other),
    ]
    parts = [
        RawTensor.of(PREFIX + "q_proj.lora_A.weight", down),
        RawTensor.of(PREFIX + "q_proj.lora_B.weight", up),
    ]
    found = list(merged(base, {one.name: one for one in parts}, AdapterFacts(2, 0.5, "")))
    assert [one.name for one in found] == [one.name for one in base]
    rounded = to_float32(base[0])
    assert to_float32(found[0]) == pytest.approx(to_float32(from_float32("x", dtype, rounded + 0.5 * (up @ down))))
    assert found[1] is base[1] and found[0].dtype == dtype


def test_names_of_adapters() -> None:
    a, b = PREFIX + "q_proj.lora_A.default.weight", PREFIX + "q_proj.lora_B.default.weight"
    assert adapter_pairs([b, a]) == {"model.layers.0.q_proj.weight": (a, b)}
    with pytest.raises(WeightsRefused, match="only one matrix"):
        adapter_pairs([a])
    with pytest.raises(WeightsRefused, match="neither lora_A nor lora_B"):
        adapter_pairs([PREFIX + "q_proj.lora_magnitude_vector"])


FACTS = ModelFacts("shape", "words")
MODEL = RunningModel(FACTS, {name: TensorFacts(name, "F32", (4, 2)) for name in ("a.weight", "b.weight")})


def manifest_of(*tensors: TensorFacts, adapter: AdapterFacts | None = None) -> WeightManifest:
    bucket = WeightBucket("bucket", 8, "digest", tensors)
    kind = "full" if adapter is None else "adapter"
    return WeightManifest(PolicyVersion("run", 5), FACTS, (bucket,), kind, adapter)  # type: ignore[arg-type]


WHOLE = manifest_of(*MODEL.tensors.values())


def test_weights_that_fit() -> None:
    check_fits(WHOLE, MODEL)
    as_engine = manifest_of(*(replace(one, dtype="BF16") for one in MODEL.tensors.values()))
    check_fits(as_engine, replace(MODEL, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (manifest_of(TensorFacts("a.weight", "F32", (4, 2))), "lack tensors b.weight"),
        (manifest_of(*MODEL.tensors.values(), TensorFacts("c", "F32", (1,))), "unknown tensors c"),
        (manifest_of(*(replace(one, shape=(2, 4)) for one in MODEL.tensors.values())), "of shape"),
        (manifest_of(*(replace(one, dtype="BF16") for one in MODEL.tensors.values())), "as BF16"),
        (replace(WHOLE, model=ModelFacts("other", "words")), "another shape"),
        (replace(WHOLE, model=ModelFacts("shape", "others")), "another tokenizer"),
        (
            manifest_of(
                TensorFacts("a.lora_A.weight", "F32", (2, 3)),
                TensorFacts("a.lora_B.weight", "F32", (4, 2)),
                adapter=AdapterFacts(2, 1.0, ""),
            ),
            "rank 2 has matrices",
        ),
        (
            manifest_of(
                TensorFacts("z.lora_A.weight", "F32", (2, 2)),
                TensorFacts("z.lora_B.weight", "F32", (4, 2)),
                adapter=AdapterFacts(2, 1.0, ""),
            ),
            "which the model does not have",
        ),
    ],
)
def test_weights_that_do_not_fit(manifest: WeightManifest, match: str) -> None:
    with pytest.raises(WeightsRefused, match=match):
        check_fits(manifest, MODEL)


def test_only_the_version_that_was_asked_for_and_never_an_older_one() -> None:
    check_order(WHOLE, PolicyVersion("run", 5), PolicyVersion("run", 4))
    check_order(WHOLE, PolicyVersion("run", 5), PolicyVersion())
    check_order(WHOLE, PolicyVersion("run", 5), PolicyVersion("before", 9))
    for asked, current in (
        (PolicyVersion("other", 5), PolicyVersion("other", 4)),
        (PolicyVersion("run", 6), PolicyVersion("run", 4)),
        (PolicyVersion("run", 5), PolicyVersion("run", 5)),
        (PolicyVersion("run", 5), PolicyVersion("run", 6)),
    ):
        with pytest.raises(WeightsRefused):
            check_order(WHOLE, asked, current)
