"""The measurements of `heddle profile`: batches, contexts, prompts."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.profiling.kv_transfer import STEP_TOKENS


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """The measurements of an engine.

    Attributes
    ----------
    batches, contexts
        Numbers of sequences, and context tokens of each; a pair that exceeds the KV capacity is left out.
    prompts
        Lengths of prompts.
    tokens
        Tokens that each sequence decodes for a point.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int = 128
    repeats: int = 5

    def contexts_to_move(self) -> tuple[int, ...]:
        """Lengths for KV transfers: those of `contexts`, shortened if a step would not fit after them."""
        longest = max(self.contexts) + self.tokens - STEP_TOKENS
        return tuple(dict.fromkeys(min(length, longest) for length in self.contexts if longest >= 1))

    def check(self, spec: EngineSpec) -> None:
        """Refuse measurements that the engine cannot run.

        Raises
        ------
        BadInput
            A batch exceeds the slots, or a length exceeds the context limit.
        """
        if max(self.batches) > spec.named_slots:
            raise BadInput(
                f"batch of {max(self.batches)} exceeds {spec.named_slots} slots: use --slots {max(self.batches)}"
            )
        longest = max(max(self.contexts) + self.tokens, max(self.prompts) + 1)
        if longest > spec.named_context_tokens:
            raise BadInput(
                f"{longest} tokens of context and answer exceed the engine's {spec.named_context_tokens}: "
                "use shorter ones"
            )


def plan_for(slots: int, max_model_len: int, *, tokens: int = 128, repeats: int = 5) -> ProfilePlan:
    """Batches: powers of two, one and a half times these, and `slots`; lengths in factors of four up to the limit.

    Raises
    ------
    BadInput
        The context limit leaves no context besides the tokens to decode.
    """
    room = max_model_len - tokens
    if room < 1:
        raise BadInput(f"{tokens} tokens to decode leave no context of {max_model_len}: use fewer")
    powers = [1 << power for power in range(slots.bit_length())]
    batches = {slots, *(each for power in powers for each in (power, 3 * power // 2) if 0 < each <= slots)}
    lengths = (*(length for length in (64, 256, 1024, 4096, 16384, 65536) if length < room), room)
    return ProfilePlan(tuple(sorted(batches)), lengths, lengths, tokens, repeats)
