"""A Hugging Face model directory as weights are compared with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import read_plain
from heddle_dask.weights.manifest import ModelFacts, TensorFacts, WeightsRefused, json_digest
from heddle_dask.weights.tensor_files import read_header

_CHUNK_BYTES = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 32 << 10
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")

SHAPE_KEYS: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
"""Keys of ``config.json`` that must be equal. Others change their form with the version of transformers that wrote
them."""


def model_facts(directory: str | Path) -> ModelFacts:
    """What the weights of a model directory are published with.

    Raises
    ------
    BadInput
        It has no readable ``config.json``.
    """
    path = Path(directory)
    try:
        config = json.loads(read_plain(path / "config.json"))
        shape = {key: config.get(key) for key in SHAPE_KEYS}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"model directory {directory} has no readable config.json: {error}") from None
    return ModelFacts(json_digest(shape), _tokenizer_digest(path))


def model_tensors(directory: str | Path) -> tuple[TensorFacts, ...]:
    """Names, types and shapes of a model directory's weights.

    Raises
    ------
    BadInput
        It has no readable safetensors files.
    """
    files = weight_files(directory)
    try:
        return tuple(stored.facts for file in files for stored in read_header(file))
    except (OSError, WeightsRefused) as error:
        raise BadInput(f"the weights of model directory {directory} cannot be read: {error}") from None


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises
    ------
    BadInput
        There are none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise BadInput(f"model directory {directory} has no *.safetensors, which weight updates need")
    return files


def model_digest(directory: str | Path) -> str:
    """Digest of a model's configuration and weights as a run is known by them; empty where there are none.

    Of a long file, its first and last bytes and samples between them are read: a training step changes all of it.
    `weights_digest` reads everything.
    """
    digest = hashlib.blake2b(digest_size=8)
    path = Path(directory)
    files = [file for pattern in _MODEL_FILES for file in sorted(path.glob(pattern)) if file.is_file()]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\n".encode())
        with file.open("rb") as reading:
            if size <= _CHUNK_BYTES:
                digest.update(reading.read())
                continue
            for number in range(_SAMPLES):
                reading.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(reading.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def weights_digest(directory: str | Path) -> str:
    """Digest of a model directory's weights: names, types, shapes and data, however they are split into files.

    Raises
    ------
    BadInput
        It has no readable safetensors files.
    """
    parts = []
    for file in weight_files(directory):
        try:
            header = read_header(file)
        except (OSError, WeightsRefused) as error:
            raise BadInput(f"the weights of model directory {directory} cannot be read: {error}") from None
        with file.open("rb") as reading:
            for one in header:
                hasher = hashlib.blake2b(digest_size=16)
                reading.seek(one.start)
                left = one.stop - one.start
                while left:
                    chunk = reading.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        raise BadInput(f"the weights of model directory {directory} change while they are read")
                    hasher.update(chunk)
                    left -= len(chunk)
                parts.append([one.facts.name, one.facts.dtype, list(one.facts.shape), hasher.hexdigest()])
    return json_digest(sorted(parts))


def _tokenizer_digest(directory: Path) -> str:
    try:
        tokenizer = json.loads(read_plain(directory / "tokenizer.json"))
        model = tokenizer["model"]
        added = [[each["id"], each["content"]] for each in tokenizer.get("added_tokens") or ()]
        return json_digest([model.get("vocab"), model.get("merges"), sorted(added)])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"the tokenizer of model directory {directory} cannot be read: {error}") from None
    for name in ("tokenizer.model", "vocab.json"):
        if (directory / name).is_file():
            return hashlib.blake2b((directory / name).read_bytes(), digest_size=16).hexdigest()
    return ""
