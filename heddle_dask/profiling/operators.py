"""Measures the large operators of a model on one GPU with torch alone, and makes the table for the cost model.

An iteration consists of linear layers (by token count) and attention (by batch and context), each measured for one
layer and multiplied by the number of layers, and the output head. At a TP degree above 1 one GPU's share of every
operator is measured. Other parts (norms, gaps, all-reduces, sampling) are not measured: `fit_table` adds them
by the formula's constants. Weights and KV of several layers take turns, so that they are not read from a cache that
would be too small for a real model.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch.nn import functional

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import check_degree
from heddle_dask.cost.measured import DecodePoint, MeasuredTable, TokensPoint
from heddle_dask.cost.model_config import shape_of_config

CHUNK_TOKENS = 2048
# Upper bound of a GPU's last-level cache; the weights that take turns must exceed it.
_CACHE_BYTES = 128e6


@dataclass(frozen=True, slots=True)
class OperatorsPlan:
    """The measurements: batches and contexts per sequence of decoding, prompt lengths, repeats of each operator."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int
    most_resident_tokens: int = 400_000


def operators_plan(slots: int = 256, max_context_tokens: int = 32_768, repeats: int = 20) -> OperatorsPlan:
    """Batches up to `slots` and contexts up to the limit, in geometric steps; prompts up to an iteration's chunk."""
    prompt = min(max_context_tokens, CHUNK_TOKENS)
    return OperatorsPlan(
        _up_to(slots, (1, 8, 16, 32, 64, 128, 256)),
        _up_to(max_context_tokens, (512, 2048, 8192, 32_768)),
        _up_to(prompt, (128, 512)),
        repeats,
    )


def _up_to(most: int, steps: Sequence[int]) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)


class Operators:
    """One GPU's share of the operators of a model, with random weights and inputs."""

    def __init__(self, config: Mapping[str, Any], degree: int, device: str, repeats: int) -> None:
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._repeats = repeats
        shape = shape_of_config(config)
        check_degree(shape, degree)
        self.layers = shape.layers
        self._hidden = shape.hidden_size
        self._head_dim = int(config.get("head_dim") or shape.hidden_size // shape.heads)
        self._heads = shape.heads // degree
        self._kv_heads = max(1, shape.kv_heads // degree)
        self._experts, self._per_token = shape.experts, shape.experts_per_token
        self._shape = shape
        size = int(config["moe_intermediate_size" if shape.experts else "intermediate_size"])
        self._inner = max(1, size // degree)
        self._vocabulary = int(config["vocab_size"]) // degree

    def linear_s(self, tokens: int) -> float:
        attention = self._heads * self._head_dim
        wide = attention + 2 * self._kv_heads * self._head_dim
        layers = [(self._hidden, wide), (attention, self._hidden)]
        seconds = 0.0
        if self._experts:
            seconds += self._experts_s(tokens)
        else:
            layers += [(self._hidden, 2 * self._inner), (self._inner, self._hidden)]
        return seconds + sum(self._matrix_s(tokens, inside, outside) for inside, outside in layers)

    def head_s(self, tokens: int) -> float:
        return self._matrix_s(tokens, self._hidden, self._vocabulary)

    def decode_attention_s(self, batch: int, context: int) -> float:
        """Seconds of one layer's attention of `batch` new tokens, each to `context` earlier ones."""
        query = self._random(batch, self._heads, 1, self._head_dim)
        sizes = (batch, self._kv_heads, context, self._head_dim)
        copies = self._copies(2 * batch * self._kv_heads * context * self._head_dim)
        kv = [(self._random(*sizes), self._random(*sizes)) for _ in range(copies)]

        def attend(turn: int) -> torch.Tensor:
            keys, values = kv[turn % len(kv)]
            return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        return self._seconds(attend)

    def prefill_attention_s(self, tokens: int) -> float:
        query = self._random(1, self._heads, tokens, self._head_dim)
        keys, values = (self._random(1, self._kv_heads, tokens, self._head_dim) for _ in range(2))
        return self._seconds(
            lambda turn: functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        )

    def prefill_s(self, tokens: int) -> float:
        layer_s = self.linear_s(tokens) + self.prefill_attention_s(tokens)
        return self.layers * layer_s + self.head_s(1)

    def _experts_s(self, tokens: int) -> float:
        # The expected number of experts, each with the same number of tokens: as many bytes and operations as routing
        # with equally likely experts; one batched product each way.
        visited = max(1, round(self._shape.distinct_experts(tokens)))
        each = -(-tokens * self._per_token // visited)
        inputs = self._random(visited, each, self._hidden)
        inner = self._random(visited, each, self._inner)
        up = self._random(visited, self._hidden, 2 * self._inner)
        down = self._random(visited, self._inner, self._hidden)
        return self._seconds(lambda turn: torch.bmm(inputs, up)) + self._seconds(lambda turn: torch.bmm(inner, down))

    def _matrix_s(self, tokens: int, inside: int, outside: int) -> float:
        inputs = self._random(tokens, inside)
        weights = [self._random(outside, inside) for _ in range(self._copies(inside * outside))]
        return self._seconds(lambda turn: functional.linear(inputs, weights[turn % len(weights)]))

    def _copies(self, elements: int) -> int:
        """Number of tensors that must take turns to exceed the cache; at most the number of layers."""
        if self._device.type != "cuda":
            return 1
        return min(self.layers, 1 + int(_CACHE_BYTES // (elements * self._dtype.itemsize)))

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self._device, dtype=self._dtype)

    def _seconds(self, operator: Callable[[int], torch.Tensor]) -> float:
        for turn in range(3):
            operator(turn)
        if self._device.type != "cuda":
            return statistics.median(_timed(operator, turn) for turn in range(self._repeats))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self._repeats)]
        # Delay the device, so that the host is ahead and no kernel launch is between two events.
        torch.cuda._sleep(50_000_000)
        for turn, (begin, end) in enumerate(events):
            begin.record()
            operator(turn)
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def _timed(operator: Callable[[int], torch.Tensor], turn: int) -> float:
    began_s = time.perf_counter()
    operator(turn)
    return time.perf_counter() - began_s


def check_device(device: str) -> None:
    """Refuse a device on which torch cannot run."""
    if device == "cpu":
        return
    gpus = torch.cuda.device_count()
    known = ["cuda", *(f"cuda:{number}" for number in range(gpus))] if gpus else []
    if device not in known:
        have = f"{', '.join(known)} or cpu" if known else "cpu, which tries the program: torch finds no GPU here"
        raise BadInput(f"--torch-device {device}: use {have}")


def _decode_points(operators: Operators, plan: OperatorsPlan) -> Iterator[DecodePoint]:
    for batch in plan.batches:
        beside_s = operators.layers * operators.linear_s(batch) + operators.head_s(batch)
        for context in plan.contexts:
            if batch * context <= plan.most_resident_tokens:
                attention_s = operators.layers * operators.decode_attention_s(batch, context)
                yield DecodePoint(batch, batch * context, beside_s + attention_s)


def measure_operators(
    name: str,
    config: Mapping[str, Any],
    degree: int,
    device: str,
    plan: OperatorsPlan,
    *,
    described: str | None = None,
    seed: int = 0,
) -> MeasuredTable:
    """The table of a model's operators on one GPU.

    Parameters
    ----------
    config
        Parsed config.json of the model; no weights are needed.
    device
        Device of torch: ``"cuda"``, ``"cuda:1"``, or ``"cpu"`` for a dry run.
    described
        Name of the device in the table; None: torch's name.
    """
    check_device(device)
    torch.manual_seed(seed)
    # Events and streams belong to the current device.
    here = torch.cuda.device(device) if device != "cpu" else contextlib.nullcontext()
    with torch.inference_mode(), here:
        operators = Operators(config, degree, device, plan.repeats)
        decode = tuple(_decode_points(operators, plan))
        prefill = tuple(TokensPoint(tokens, operators.prefill_s(tokens)) for tokens in plan.prompts)
    return MeasuredTable(
        model=name,
        shape=shape_of_config(config),
        degree=degree,
        device=described or (torch.cuda.get_device_name(device) if device != "cpu" else "CPU"),
        engine=f"operators, torch {torch.__version__}",
        date=datetime.now(UTC).date().isoformat(),
        slots=max(plan.batches),
        chunk_tokens=CHUNK_TOKENS,
        decode=decode,
        prefill=prefill,
        kind="operators",
        conditions=f"median of {plan.repeats} repeats of each operator of one layer, one GPU's share",
    )
