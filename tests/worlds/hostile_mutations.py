"""Seeded mutations of the files of a run, of a training and of weights, with right checksums; and what reads them."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from numcodecs.checksum32 import CRC32C
from numcodecs.zstd import Zstd
from worlds.predictor_builders import SMALL, trajectory
from worlds.record_builders import plain_trajectory
from worlds.training_batches import stored_batch, training_batch

from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import HeddleError
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.predictors.learned import LearnedPredictor
from heddle_dask.predictors.stored import load_predictor, save_predictor
from heddle_dask.records.journal import Journal
from heddle_dask.records.journal_lines import HEADER
from heddle_dask.records.schema import ATTRIBUTES_CRC, attributes_crc
from heddle_dask.records.store import RunStore, recover
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, trajectory_to_body
from heddle_dask.sim.clusters import cluster_of
from heddle_dask.training.batch_files import stored_batches
from heddle_dask.training.exports.verl import read_verl_step, write_verl_step
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.sample_rows import sample_rows
from heddle_dask.weights.manifest import ModelFacts, PolicyVersion, json_digest
from heddle_dask.weights.model_directory import model_facts, model_tensors, weights_digest
from heddle_dask.weights.store import WeightStore, read_manifest
from heddle_dask.weights.tensor_files import RawTensor, read_tensors
from heddle_dask.workloads.traces import read_traces

MOST_MIB = 500
_RECORDED = Path(__file__).parent.parent / "journals" / "math-cost.jsonl.gz"
_RUN_COMMANDS = (
    *(["show"], ["show", "--failed"], ["show", "--trajectory", "3"], ["export"], ["replay"], ["top", "--once"]),
)
_VALUES = [None, True, -1, 0, 7, 2**63, 10**30, 1e300, -0.5, "", "x", "\x1b[2J", "x" * 4096, [], {}, [[]], {"a": 1}]
_DEEP = b"[" * 100_000 + b"]" * 100_000


@dataclass(frozen=True, slots=True)
class HostileFiles:
    """A kind of files: what makes good ones, what reads them, and what makes one of them hostile."""

    make: Callable[[Path], None]
    read: Callable[[Path], None]
    mutations: tuple[Callable[[random.Random, Path], str], ...]


def check_hostile(folder: Path, kind: str, count: int, seed: int) -> None:
    """Read `count` mutations of a kind of files: each is answered, or refused in one line, in little memory.

    What a test that hangs has printed names the mutation.
    """
    files = KINDS[kind]
    pristine, place = folder / "pristine", folder / "hostile"
    pristine.mkdir()
    files.make(pristine)
    files.read(pristine)
    counts = {"answered": 0, "refused": 0}
    for number in range(count):
        rng = random.Random(f"hostile-{kind}-{seed}-{number}")
        shutil.copytree(pristine, place)
        told = rng.choice((*files.mutations, *files.mutations, _other_file))(rng, place)
        print(f"{kind} {seed} {number}: {told}")
        outcome = "answered"
        with _little_memory():
            try:
                files.read(place)
            except HeddleError as error:
                assert "\n" not in str(error), error
                outcome = "refused"
        counts[outcome] += 1
        shutil.rmtree(place)
    print(counts)
    assert min(counts.values()) > count // 20


@contextmanager
def _little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (MOST_MIB << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutated_json(rng: random.Random, value: Any) -> tuple[Any, str]:
    """The value with one part replaced, removed, repeated or moved; and where."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}, f"without {key}"
        part, where = mutated_json(rng, value[key])
        return {**value, key: part}, f"{key}.{where}"
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return [*value[:at], *value[at + 1 :]], f"without {at}"
        if rng.random() < 0.1:
            return [*value, *value[at:]], f"{at} twice"
        part, where = mutated_json(rng, value[at])
        return [*value[:at], part, *value[at + 1 :]], f"{at}.{where}"
    new = rng.choice(_VALUES)
    return new, f"= {new!r:.30}"


def _other_file(rng: random.Random, place: Path) -> str:
    """A file that is of another kind, or has other content."""
    path = rng.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    content = path.read_bytes()
    kind = rng.choice(["fifo", "zeros", "sparse", "folder", "cut", "noise", "deep", "empty", "gone"])
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.write(content)
            file.truncate(1 << 40)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        made = {"cut": content[: rng.randrange(len(content) + 1)], "noise": rng.randbytes(64), "deep": _DEEP}
        path.write_bytes(made.get(kind, b""))
    return f"{path.name} {kind}"


def _json_file(rng: random.Random, path: Path) -> str:
    value, where = mutated_json(rng, json.loads(path.read_text()))
    path.write_text(json.dumps(value))
    return f"{path.name} {where}"


def _lines_file(rng: random.Random, path: Path) -> str:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    value, where = mutated_json(rng, json.loads(lines[at]))
    lines[at] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return f"{path.name} line {at} {where}"


# Runs


def _make_run(folder: Path) -> None:
    with gzip.open(_RECORDED, "rt", encoding="utf-8") as file:
        facts, *lines = (json.loads(line) for line in islice(file, 150))
    run = folder / "x.zarr"
    with RunStore.create(run, {"environment": "math", "seed": 3, "model": "none", "samples": 1}) as store:
        store.append([plain_trajectory(index) for index in range(3)])
    with Journal.create(journal_path(run)) as journal:
        journal.append("session", facts)
        journal.append("control", {"lines": lines})
        for index in (3, 4):
            journal.append("action", {"trajectory_id": f"t{index}", "action_index": 0})
            journal.append(TRAJECTORY_FINISHED, trajectory_to_body(plain_trajectory(index)))


def _read_run(folder: Path) -> None:
    run = folder / "x.zarr"
    refused: HeddleError | None = None
    for words in _RUN_COMMANDS:
        out = [str(folder / "x.parquet")] if words == ["export"] else []
        result = CliRunner().invoke(heddle, [*words, str(run), *out])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        told = result.stderr.splitlines()
        assert result.exit_code in (0, 1) or (result.exit_code, len(told)) == (2, 1), (words, result.output)
        assert not {"\x1b", "\x07"} & set(result.output), (words, result.output)
    try:
        with RunStore.append_to(run) as store:
            recover(journal_path(run), store)
    except HeddleError as error:
        refused = error
    if refused is not None:
        raise refused


def _root(rng: random.Random, place: Path) -> str:
    path = place / "x.zarr" / "zarr.json"
    root = json.loads(path.read_text())
    attributes, where = mutated_json(rng, root["attributes"])
    if isinstance(attributes, dict):
        attributes[ATTRIBUTES_CRC] = attributes_crc(attributes)
    path.write_text(json.dumps({**root, "attributes": attributes}))
    return f"attributes {where}"


def _array(rng: random.Random, place: Path) -> str:
    return _json_file(rng, rng.choice(sorted((place / "x.zarr").glob("*/*/zarr.json"))))


def _chunk(rng: random.Random, place: Path) -> str:
    path = rng.choice(sorted((place / "x.zarr").glob("*/*/c/0")))
    packed = bytes(CRC32C(location="end").decode(path.read_bytes()))
    content = bytearray(Zstd().decode(packed))
    for _ in range(rng.choice((1, 1, 8))):
        content[rng.randrange(min(64, len(content)))] = rng.randrange(256)
    path.write_bytes(bytes(CRC32C(location="end").encode(Zstd().encode(bytes(content)))))
    return f"bytes of {path.parent.parent.name}"


def _journal(rng: random.Random, place: Path) -> str:
    path = journal_path(place / "x.zarr")
    lines = [line[9:] for line in path.read_bytes().split(b"\n")[1:-1]]
    at = rng.randrange(len(lines))
    value, where = mutated_json(rng, json.loads(lines[at]))
    lines[at] = json.dumps(value).encode()
    crc, written = zlib.crc32(HEADER), HEADER
    for text in lines:
        crc = zlib.crc32(text, crc)
        written += b"%08x %b\n" % (crc, text)
    path.write_bytes(written)
    return f"journal {at} {where}"


# Trainings


def _make_training(folder: Path) -> None:
    directory = TrainingDirectory(folder)
    directory.begin({"env": "math", "steps": 2}, "create", "line")
    directory.add_metrics({"step": 1, "reward_mean": 0.5, "tokens": 12, "train_s": 0.5})
    directory.add_evaluation({"step": 1, "reward_mean": 0.5})
    directory.batches.mkdir()
    stored_batch(directory.batches, 1)


def _read_training(folder: Path) -> None:
    directory = TrainingDirectory(folder)
    for words in (["show", str(folder)], ["export", str(folder), str(folder.parent / "out"), "--as", "npz"]):
        shutil.rmtree(folder.parent / "out", ignore_errors=True)
        result = CliRunner().invoke(heddle, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0 or (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    directory.check("resume")
    directory.lineage()
    read_lines(directory.metrics)
    read_lines(directory.evaluations)
    assert list(stored_batches(folder)) is not None


def _run_file(rng: random.Random, place: Path) -> str:
    return _json_file(rng, place / "run.json")


def _rows(rng: random.Random, place: Path) -> str:
    return _lines_file(rng, place / rng.choice(("metrics.jsonl", "evaluations.jsonl")))


def _batch(rng: random.Random, place: Path) -> str:
    path = next((place / "batches").glob("*.npz"))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    if rng.random() < 0.7:
        value, where = mutated_json(rng, json.loads(str(arrays["header"])))
        arrays["header"] = np.array(json.dumps(value))
    else:
        where = rng.choice([name for name in arrays if name != "header"])
        arrays[where] = rng.choice([arrays[where][:1], arrays[where].astype("S2"), arrays[where][None], np.array(3)])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())
    return f"batch {where}"


def _bomb(rng: random.Random, place: Path) -> str:
    """An array of the batch that unpacks to 2 GiB."""
    path = next((place / "batches").glob("*.npz"))
    head = b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (536870912,), }"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("header.npy", "w", force_zip64=True) as entry,
    ):
        entry.write(head.ljust(127) + b"\n")
        for _ in range(2048 if rng.random() < 0.1 else 16):
            entry.write(bytes(1 << 20))
    return "batch bomb"


# Weights


def _make_weights(folder: Path) -> None:
    tensors = [RawTensor.of("a", np.ones((4, 4), "<f4")), RawTensor.of("b", np.ones(3, "<f4"))]
    WeightStore(str(folder / "store")).write(PolicyVersion("line", 1), tensors, ModelFacts("m", "t"))
    bucket = next((folder / "store").rglob("*.safetensors"))
    model = folder / "model"
    model.mkdir()
    shutil.copy(bucket, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 8}))
    tokenizer = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": 1, "content": "<e>"}]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _read_weights(folder: Path) -> None:
    store = WeightStore(str(folder / "store"))
    refused: HeddleError | None = None
    read: list[Callable[[], Any]] = [
        lambda: [store.newest(name) for name in store.lineages()],
        lambda: read_manifest(store.manifest_uri(PolicyVersion("line", 1))),
        partial(model_facts, folder / "model"),
        partial(model_tensors, folder / "model"),
        partial(weights_digest, folder / "model"),
        lambda: [list(read_tensors(path)) for path in (folder / "model").glob("*.safetensors")],
    ]
    for each in read:
        try:
            each()
        except HeddleError as error:
            refused = error
    if refused is not None:
        raise refused


def _manifest(rng: random.Random, place: Path) -> str:
    path = next((place / "store").rglob("*.json"))
    body, where = mutated_json(rng, json.loads(path.read_text()))
    if isinstance(body, dict) and rng.random() < 0.8:
        body.pop("digest", None)
        body["digest"] = json_digest(body)
    path.write_text(json.dumps(body))
    return f"manifest {where}"


def _tensors(rng: random.Random, place: Path) -> str:
    path = place / "model" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, where = mutated_json(rng, json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return f"safetensors {where}"


def _model(rng: random.Random, place: Path) -> str:
    return _json_file(rng, place / "model" / rng.choice(("config.json", "tokenizer.json")))


# Traces


def _make_trace(folder: Path) -> None:
    step = {"gen_tokens": 5, "obs_tokens": 2, "in_tokens": 9, "tool": "bash", "tool_s": 0.5, "llm_s": 0.1, "human": 0}
    line = {"id": "a", "group": "g", "prompt_tokens": 7, "complete": True, "success": None, "steps": [step, step]}
    (folder / "trace.jsonl").write_text("".join(json.dumps({**line, "id": str(i)}) + "\n" for i in range(3)))


def _read_trace(folder: Path) -> None:
    assert list(read_traces(folder / "trace.jsonl")) is not None


def _trace(rng: random.Random, place: Path) -> str:
    return _lines_file(rng, place / "trace.jsonl")


# What people hand on: engine tables, predictors, clusters, exports


def _make_handed(folder: Path) -> None:
    table = MeasuredTable.load("tiny-agent-cpu")
    table.save(folder / "table.json")
    predictor = LearnedPredictor(SMALL)
    predictor.warm_start([trajectory(f"t{number}", steps=2 + number % 5) for number in range(30)])
    save_predictor(predictor, folder / "predictor")
    (folder / "cluster.toml").write_text('gpus = 4\ntables = ["table.json"]\nslots = 8\n')
    rows = (replace(row, temperatures=row.temperatures * 0 + 1) for row in sample_rows(training_batch(0, [[20, 30]])))
    write_verl_step(list(rows), folder, step=1)


def _read_handed(folder: Path) -> None:
    fit_table(MeasuredTable.load(folder / "table.json"))
    load_predictor(folder / "predictor").predict([trajectory("t0").points[0]])
    cluster_of(str(folder / "cluster.toml"))
    read_verl_step(folder / "step-000001.npz")


def _table(rng: random.Random, place: Path) -> str:
    return _json_file(rng, place / "table.json")


def _predictor(rng: random.Random, place: Path) -> str:
    path = place / "predictor"
    value, where = mutated_json(rng, json.loads(gzip.decompress(path.read_bytes())))
    path.write_bytes(gzip.compress(json.dumps(value).encode()))
    return f"predictor {where}"


def _cluster(rng: random.Random, place: Path) -> str:
    key, value = rng.choice(["gpus", "slots", "tp", "tables", "pools"]), rng.choice(_VALUES)
    (place / "cluster.toml").write_text(f"{key} = {json.dumps(value)}\n")
    return f"cluster {key} = {value!r:.30}"


KINDS = {
    "handed": HostileFiles(_make_handed, _read_handed, (_table, _table, _predictor, _predictor, _cluster)),
    "run": HostileFiles(_make_run, _read_run, (_root, _array, _chunk, _journal, _journal)),
    "training": HostileFiles(_make_training, _read_training, (_run_file, _rows, _batch, _batch, _bomb)),
    "weights": HostileFiles(_make_weights, _read_weights, (_manifest, _tensors, _model)),
    "trace": HostileFiles(_make_trace, _read_trace, (_trace,)),
}
