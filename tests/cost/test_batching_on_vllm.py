"""The batching model against real vLLM, iteration by iteration: decoding, chunked prefill, priorities, preemption.

An iteration of the model takes a second here, so its clock counts iterations. Both get the same requests, which arrive
between two iterations. What vLLM did is recorded in vllm_iterations.json; before a release vLLM does it again.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from worlds import vllm_iterations

from heddle_dask.cost.batching import ContinuousBatch
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.engines.emulated.kv_cache import KvCache, RoomForTokens, TokenJob

RECORDED = Path(__file__).with_name("vllm_iterations.json")
BLOCK_TOKENS = 32  # the smallest that vLLM takes on CPUs


@dataclass(frozen=True)
class Request:
    arrives: int
    prompt_tokens: int
    length: int
    priority: int = 0


@dataclass(frozen=True)
class Play:
    """Requests on one engine.

    Attributes
    ----------
    preempts
        How often the model puts a request back.
    """

    requests: tuple[Request, ...]
    chunk_tokens: int
    whole_prompts: bool = False
    slots: int = 8
    blocks: int = 400
    preempts: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids; no two prompts share a block."""
        draw = random.Random(5)
        return [[draw.randrange(1, 250) for _ in range(request.prompt_tokens)] for request in self.requests]


PLAYS = {
    "decode batches": Play(
        tuple(Request(arrives, 20, length) for arrives, length in ((0, 9), (0, 3), (2, 12), (2, 1), (5, 30), (17, 4))),
        chunk_tokens=512,
        slots=3,
    ),
    "chunked prefill beside decoding": Play(
        tuple(
            Request(*row)
            for row in (
                (0, 100, 10),
                (0, 50, 20),
                (3, 300, 5),
                (5, 20, 8),
                (5, 40, 8),
                (9, 200, 3),
                (9, 64, 3),
            )
        ),
        chunk_tokens=64,
    ),
    "whole prompts beside decoding": Play(
        tuple(
            Request(*row)
            for row in (
                (0, 300, 10),
                (0, 300, 20),
                (0, 20, 4),
                (3, 400, 5),
                (5, 120, 8),
                (5, 500, 8),
                (9, 200, 3),
            )
        ),
        chunk_tokens=512,
        whole_prompts=True,
    ),
    "priorities": Play(
        (
            Request(0, 200, 6, 3),
            Request(0, 40, 6, 2),
            Request(0, 90, 6, 2),
            Request(2, 30, 9, -4),
            Request(3, 150, 2, 1),
        ),
        chunk_tokens=64,
        slots=2,
    ),
    # vLLM counts blocks and the model tokens. They agree where contexts are equally long when KV runs out, and fill
    # whole blocks: 4 contexts of 3 blocks, 3 of 4, 2 of 6.
    "preemption": Play(
        (Request(0, 64, 140), Request(0, 64, 128), Request(0, 64, 80), Request(0, 64, 50)),
        chunk_tokens=512,
        blocks=1 + 12,  # vLLM keeps one for itself
        preempts=2,
    ),
}


@dataclass
class CountingBatch(ContinuousBatch[TokenJob]):
    """A batch that logs its iterations as vLLM does."""

    rows: list[list[int]] = field(default_factory=list)

    def _run(self, count: int, chunk: int, seconds: float) -> None:
        left = [job.prefill_tokens for job in self._prefilling]
        decoding = len(self._decoding)
        for _ in range(count):
            prompts, rest = 0, chunk
            for index, tokens in enumerate(left):
                taken = min(rest, tokens)
                left[index] -= taken
                rest -= taken
                prompts += taken > 0
            self.rows.append([prompts + decoding, chunk + decoding])
        super()._run(count, chunk, seconds)


def modelled(played: Play) -> dict[str, Any]:
    cost = EngineCost(fixed_s=1.0, chunk_tokens=played.chunk_tokens, whole_prompts=played.whole_prompts)
    cache = KvCache((played.blocks - 1) * BLOCK_TOKENS, BLOCK_TOKENS)
    batch = CountingBatch(cost, played.slots, RoomForTokens(cache))
    jobs = [
        TokenJob(
            request.prompt_tokens,
            request.length,
            request.priority,
            prompt=prompt,
            tokens=lambda count, number=number: [1000 + number] * count,
        )
        for number, (request, prompt) in enumerate(zip(played.requests, played.prompts(), strict=True))
    ]
    waiting = list(zip(played.requests, jobs, strict=True))
    for iteration in range(2000):
        batch.advance(float(iteration))
        # Those of one moment are there together in vLLM: the order of submission must not decide.
        for request, job in sorted(waiting, key=lambda each: each[0].priority):
            if request.arrives == iteration:
                batch.submit(job, float(iteration))
    assert all(job.state == "ended" for job in jobs)
    return {
        "iterations": batch.rows,
        "ends": [round(job.ended_s) for job in jobs],
        "preemptions": batch.preemptions,
    }


@pytest.fixture(scope="module")
def on_vllm(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    plays = [
        {
            "model": model_dir,
            "options": {
                "max_model_len": min(512, (played.blocks - 1) * BLOCK_TOKENS),
                "max_num_seqs": played.slots,
                "max_num_batched_tokens": max(played.chunk_tokens, played.slots),
                "enable_chunked_prefill": not played.whole_prompts,
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks_override": played.blocks,
                "enable_prefix_caching": True,
                "enforce_eager": True,
            },
            "requests": [
                {"arrives": r.arrives, "prompt": prompt, "length": r.length, "priority": r.priority}
                for r, prompt in zip(played.requests, played.prompts(), strict=True)
            ],
        }
        for played in PLAYS.values()
    ]
    out = tmp_path_factory.mktemp("iterations") / "out.json"
    subprocess.run(
        [sys.executable, vllm_iterations.__file__, str(out)],
        input=json.dumps(plays).encode(),
        check=True,
        cwd=Path(out).parent,
        timeout=280,
    )
    return dict(zip(PLAYS, json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("name", PLAYS)
def test_each_iteration_of_the_model_is_one_of_vllm(name: str) -> None:
    expected, found = json.loads(RECORDED.read_text())[name], modelled(PLAYS[name])
    assert found["iterations"] == expected["iterations"]
    assert found["ends"] == expected["ends"]
    assert found["preemptions"] == PLAYS[name].preempts


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
def test_vllm_has_the_recorded_iterations(on_vllm: dict[str, Any]) -> None:
    assert on_vllm == json.loads(RECORDED.read_text())
