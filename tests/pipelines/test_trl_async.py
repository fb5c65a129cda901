"""The classes that TRL's AsyncGRPOTrainer asks for, with TRL's own types and its own queue reader."""

from __future__ import annotations

import inspect
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.live_world import emulated
from worlds.shared_cluster import shared_cluster_sync
from worlds.training_builders import finished_group

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.trl_rollouts import trl_prompts
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import read_tensors

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.slow  # TRL takes ten seconds to import

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's module; it warns of the version of vLLM that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import PartialState
        from trl.experimental.async_grpo import async_grpo_trainer

        PartialState(cpu=True)  # accelerate's logger asks for it
    return async_grpo_trainer


def groups() -> Iterator[Any]:
    for number, version in enumerate((1, 1, 3)):
        yield trajectory_group(finished_group(f"g{number}", version=version), "trl")


def test_the_classes_have_the_methods_of_the_protocols(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, TrlWeightTransfer

    for protocol, ours in (
        (trl.RolloutWorkerProtocol, TrlRolloutWorker),
        (trl.WeightTransferProtocol, TrlWeightTransfer),
    ):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                theirs, own = inspect.signature(method), inspect.signature(getattr(ours, name))
                assert list(theirs.parameters) == list(own.parameters), name
    worker = TrlRolloutWorker(groups)
    assert set(trl.RolloutWorkerProtocol.__annotations__) <= set(vars(worker))


def test_trls_reader_takes_the_samples_and_drops_what_is_too_old(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, WorkerStopped

    worker = TrlRolloutWorker(groups)
    worker.start()
    worker.update_model_version(4)
    reader = trl.RolloutQueueDataset(
        worker.rollout_buffer,
        model_version_fn=lambda: worker.model_version,
        check_health_fn=worker.check_health,
        stale_after_s=60.0,
        metrics=defaultdict(list),
        max_staleness=1,
        poll_interval_s=0.05,
    )
    found = []
    with pytest.raises(WorkerStopped, match="the rollout has ended"):
        for sample in reader:
            found.append(sample)
    assert len(found) == 2  # two members of the third group; those of the others are two versions old
    assert found[0]["completion_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert found[0]["old_log_probs"].tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1.0]
    assert [sample["advantage"] for sample in found] == [-0.5, 0.5]
    assert found[0]["metrics"] == {"reward": 0.0, "truncated": 0.0}


def test_a_full_queue_holds_the_rollout_back_until_it_is_stopped(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker

    taken = []

    def endless() -> Iterator[Any]:
        while True:
            taken.append(1)
            yield from groups()

    worker = TrlRolloutWorker(endless, most_waiting=3)
    worker.start()
    while not worker.rollout_buffer.full():
        pass
    worker.check_health(60.0)
    worker.stop()
    worker._thread.join(timeout=60)
    assert not worker._thread.is_alive()
    assert worker.rollout_buffer.qsize() == 3
    assert len(taken) == 1


def test_a_failure_of_the_rollout_reaches_the_trainer(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, WorkerStopped

    def failing() -> Iterator[Any]:
        yield from groups()
        raise OSError("the cluster is gone")

    worker = TrlRolloutWorker(failing)
    worker.start()
    worker._thread.join()
    with pytest.raises(WorkerStopped, match="the rollout has failed: the cluster is gone"):
        worker.check_health(60.0)
    waiting = threading.Event()
    silent = TrlRolloutWorker(lambda: iter(waiting.wait, True))
    silent.start()
    with pytest.raises(WorkerStopped, match="no group for"):
        silent.check_health(-1.0)
    waiting.set()


def test_weights_are_published_before_the_engines_are_told(trl, tmp_path):
    from safetensors.torch import load_file

    from pipelines.any_trainer.trl_async import TrlWeightTransfer

    told: list[tuple[PolicyVersion, str]] = []
    transfer = TrlWeightTransfer(str(tmp_path), MODEL, lambda version, uri: told.append((version, uri)))
    state = load_file(MODEL / "model.safetensors")
    store = WeightStore(str(tmp_path))
    transfer.init_weight_transfer()
    for number in (1, 2):
        transfer.pause()
        transfer.send_weights(iter({name: tensor + number for name, tensor in state.items()}.items()))
        assert [version.number for version in store.versions("trainer")] == list(range(1, number + 1))
        assert len(told) == number - 1
        transfer.resume()
    assert told == [(version, store.manifest_uri(version)) for version in store.versions("trainer")]
    transfer.destroy()
    manifest = store.manifest(PolicyVersion("trainer", 2))
    assert manifest is not None and manifest.nbytes == (MODEL / "model.safetensors").stat().st_size


class PlainAttention:
    """What TRL takes of FlashAttention 3, which needs a GPU: each sequence behind its own keys, causal from the end."""

    @staticmethod
    def flash_attn_varlen_func(query, key, value, starts, key_starts, longest, longest_key, **options):
        parts = []
        for begin, end, key_begin, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            q, k, v = (
                one.transpose(0, 1) for one in (query[begin:end], key[key_begin:key_end], value[key_begin:key_end])
            )
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True
            )
            parts.append(mixed.transpose(0, 1))
        return torch.cat(parts)


@pytest.mark.cluster
def test_trls_asynchronous_trainer_trains_on_rollouts_whose_engines_follow_it(trl, tmp_path, monkeypatch):
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    from pipelines.any_trainer.following_engines import FollowingEngines
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, TrlWeightTransfer

    monkeypatch.setattr(packing, "_flash_attn", lambda: PlainAttention)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    tasks = [Task(name, f"Task {name}.") for name in "abcd"]
    store = str(tmp_path / "weights")
    published: list[dict[str, Any]] = []
    with (
        warnings.catch_warnings(),
        shared_cluster_sync() as client,
        Rollout(client, env=solve, model=MODEL, engines=emulated(str(MODEL)), out=tmp_path / "run.zarr") as rollout,
    ):
        warnings.simplefilter("ignore")
        engines = FollowingEngines(rollout, tasks, store)

        def go_over(version: PolicyVersion, uri: str) -> None:
            engines.go_over(version, uri)
            published.append({name: one.detach().clone() for name, one in trainer.model.named_parameters()})

        trainer = AsyncGRPOTrainer(
            model=str(MODEL),
            train_dataset=Dataset.from_list(trl_prompts("abcd")),
            rollout_worker=TrlRolloutWorker(lambda: engines.groups(samples=4, tasks_at_once=2), most_waiting=4),
            weight_transfer=TrlWeightTransfer(store, MODEL, go_over),
            args=AsyncGRPOConfig(
                output_dir=str(tmp_path / "trl"),
                per_device_train_batch_size=4,
                gradient_accumulation_steps=1,
                max_steps=4,
                max_staleness=2,
                weight_sync_steps=1,
                token_budget=0,
                dtype="float32",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
            ),
        )
        trainer.train()
    assert trainer.state.global_step == 4
    # The engines have sampled by several of the versions; the newest one in the store is what the trainer has.
    sampled = {int(v) for one in RunReader(tmp_path / "run.zarr") for b in one.branches for v in b.policy_version}
    assert {1, 2} <= sampled <= {-1, 1, 2, 3, 4, 5}, "the first ones before any rollout"
    (newest,) = WeightStore(store).versions("trainer")
    assert newest.number == len(published) == 5
    stored = {one.name: one for path in tmp_path.rglob("bucket-*") for one in read_tensors(path)}
    for name, values in published[-1].items():
        assert bytes(stored[name].data) == values.numpy().tobytes()
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


async def solve(task: Task, ctx: Any) -> float:
    ctx.append("user", task.prompt)
    step = await ctx.generate(max_tokens=8)
    return float(sum(step.token_ids) % 2)
