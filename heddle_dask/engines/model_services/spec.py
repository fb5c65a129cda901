"""A model service, described, and the contract of a back end: one copy of it, on one chunk of GPUs of one host.

A copy is loaded from its copy in host memory (or from its files), answers requests while it is resident, and is
evicted; nothing is written back. Its process is started once, and outlives evictions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from heddle_dask.core.errors import BadInput, HeddleError, check_count, check_keys, check_seconds
from heddle_dask.core.resources import ModelService

Input = str | Sequence[int]
"""A text, which the service's own tokenizer turns into tokens, or token ids."""


Reply = dict[str, str]
"""``content``, the text of a reply to a chat, and ``finish_reason``: ``"stop"``, or ``"length"`` if it was cut."""


class ServiceFailed(HeddleError):
    """A copy could not be loaded, or did not answer. The message is one line."""


class ServiceRefused(HeddleError):
    """The service will never accept this request; the message says why."""


class ModelServer(Protocol):
    """Answers requests to one copy. A pickled one does so in any process of its host."""

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        """One number for each input: the output of a classifier with one label, before any activation."""

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """The logprob of each token from position `start` (at least 1) on, given all tokens before it."""

    async def judge(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> Reply:
        """The reply to a chat, rendered by the model's own template."""


class ModelBackEnd(Protocol):
    """One copy of a service. Orders of one copy never overlap; requests do, while it is resident."""

    @property
    def process_id(self) -> int:
        """Pid of its process; 0 when none runs."""

    async def load(self, *, cold: bool, keep: bool) -> None:
        """Make the copy resident; starts its process where none runs.

        Parameters
        ----------
        cold
            There is no copy in host memory: load from the files.
        keep
            Keep a copy in host memory, from which the next load restores it.

        Raises
        ------
        ServiceFailed
            Nothing of it is resident then.
        """

    async def evict(self) -> None:
        """Free the memory of its device; waits for requests that run.

        Raises
        ------
        ServiceFailed
            Its process has died: the memory is free all the same.
        """

    async def drop_copy(self) -> None:
        """Free the copy in host memory; a resident copy stays."""

    @property
    def server(self) -> ModelServer:
        """What answers while it is resident.

        Raises
        ------
        ServiceFailed
            It is not.
        """

    async def resident_bytes(self) -> int:
        """Bytes of weights on the device now, where the back end knows them; 0 when it is not resident."""

    async def ended(self) -> str:
        """Wait for the end of its process; returns the cause in one line."""

    async def stop(self) -> None:
        """End its process and free all that it has."""


BackEnd = Literal["cpu", "vllm"]
CPU_BACK_END: BackEnd = "cpu"
Answers = Literal["score", "logprobs", "judge"]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A model that answers requests of programs and rewards: a reward model, a judge or a teacher.

    Attributes
    ----------
    name
        As programs name it: ``ctx.score("reward-model", …)``.
    model
        Model directory on the hosts: ``config.json``, ``*.safetensors`` and a tokenizer.
    backend
        ``"vllm"``: vLLM with sleep and wake-up, on GPUs. ``"cpu"``: a process that holds the weights in host memory and
        copies them into the memory slots of a worker without GPUs.
    gpus
        Numbers of GPUs (of memory slots) on which it can be resident: powers of two.
    batch
        Requests that one resident copy serves at the same time.
    max_tokens
        Longest input in tokens; longer ones are refused.
    dtype
        Type of the weights; ``"auto"``: as the model's configuration says.
    load_s
        Seconds to restore it from host memory at each size of `gpus`, if known; empty: learned.
    extra_args
        Appended to the command line of vLLM.
    """

    name: str
    model: str | Path
    backend: BackEnd = "vllm"
    gpus: Sequence[int] = (1,)
    batch: int = 16
    max_tokens: int = 4096
    dtype: str = "auto"
    load_s: Sequence[float] = ()
    extra_args: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadInput(f"service: name is {self.name!r}: use a text such as 'reward-model'")
        where = f"service {self.name}"
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise BadInput(f"{where}: model is {self.model!r}: use the path of a model directory")
        object.__setattr__(self, "model", str(Path(self.model).expanduser().absolute()))
        if self.backend not in get_args(BackEnd):
            raise BadInput(f"{where}: backend is {self.backend!r}: use {' or '.join(get_args(BackEnd))}")
        object.__setattr__(self, "gpus", _sizes(where, self.gpus))
        for name in ("batch", "max_tokens"):
            check_count(f"{where}: {name}", getattr(self, name))
        for seconds in self.load_s:
            check_seconds(f"{where}: load_s", seconds)
        object.__setattr__(self, "load_s", tuple(map(float, self.load_s)))
        if self.load_s and len(self.load_s) != len(self.gpus):
            raise BadInput(f"{where}: load_s has {len(self.load_s)} values for {len(self.gpus)} sizes: give one each")
        object.__setattr__(self, "extra_args", tuple(self.extra_args))

    def check_model(self) -> None:
        """Refuse a model directory that is missing or has no weights."""
        path = Path(self.model)
        if not path.is_dir():
            raise BadInput(f"service {self.name}: model directory {path} does not exist")
        for wanted in ("config.json", "*.safetensors"):
            if not any(path.glob(wanted)):
                raise BadInput(f"service {self.name}: model directory {path} has no {wanted}")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on disk: those of the copy in host memory. 0 when there is no model."""
        return sum(file.stat().st_size for file in Path(self.model).glob("*.safetensors"))

    @property
    def answers(self) -> frozenset[Answers]:
        """What it can be asked: a classifier scores, a causal language model gives logprobs and verdicts."""
        path = Path(self.model) / "config.json"
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("architectures") or [""]
        except (OSError, ValueError, AttributeError) as error:
            raise BadInput(f"service {self.name}: {path} cannot be read: {error}") from None
        scores = any(word in str(named[0]) for word in ("Classification", "Reward"))
        return frozenset({"score"} if scores else {"logprobs", "judge"})

    def declared(self) -> ModelService:
        """What the controller is told."""
        return ModelService(
            self.name,
            tuple(self.gpus),
            "gpu",
            tuple(self.load_s),
            host_bytes=self.weight_bytes,
            batch=self.batch,
        )

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes an equal spec."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ServiceSpec:
        """Read a spec from parsed JSON or TOML."""
        check_keys("service", mapping, [each.name for each in fields(cls)], required=2)
        return cls(**mapping)


def _sizes(where: str, given: object) -> tuple[int, ...]:
    """Numbers of GPUs in ascending order; chunks of a host are powers of two."""
    sizes = (given,) if isinstance(given, int) else given
    wanted = f"{where}: gpus is {given!r}: use powers of two such as (1, 2, 4)"
    if isinstance(sizes, str) or not isinstance(sizes, Sequence | set | frozenset) or not sizes:
        raise BadInput(wanted)
    for size in sizes:
        if type(size) is not int or size < 1 or size & (size - 1):
            raise BadInput(wanted)
    return tuple(sorted(set(sizes)))
