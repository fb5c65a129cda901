"""Whether engines and trainer agree about tokens that the engines have just sampled.

Both compute the logprob of the same token with the same weights: what remains between them is rounding, up to some
hundredths of a nat where kernels or types differ. More means that they run different models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from heddle_dask.core.errors import HeddleError

TOLD_NATS: Final = 0.1
"""Mean difference of the logprobs of fresh tokens above which a line says so."""
END_NATS: Final = 1.0
"""The mean difference above which the training ends: importance weights are then far from 1, and little is learned."""
JUDGED_TOKENS: Final = 256
"""Fresh tokens below which a step, but for the first, ends no training: the mean of a few unlikely ones says little."""

MismatchRule = Literal["end", "tell"]

_CAUSES = (
    "likely causes are other weights or another model in the engines, quantisation, a chat template or tokens that "
    "differ, or the type that the engines compute in (--dtype)"
)


class EnginesDiffer(HeddleError):
    """Engines and trainer disagree about fresh tokens; the message is one line."""


class MismatchGuard:
    """Judges the steps of one training.

    Parameters
    ----------
    rule
        ``"end"``: a difference above `END_NATS` ends the training. ``"tell"``: it is only told.
    """

    def __init__(self, rule: MismatchRule = "end") -> None:
        self._rule = rule
        self._told = 0.0
        self._has_judged = False

    def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """A line for people, where there is something to say that was not said of an earlier step; else empty.

        Parameters
        ----------
        metrics
            Of the step (`training.trainer.TrainReport`); ``mismatch_mean`` is missing where no token was fresh, and
            ``fresh_tokens`` where the trainer does not count them.

        Raises
        ------
        EnginesDiffer
        """
        found = metrics.get("mismatch_mean", 0.0)
        says = f"step {step}: logprobs of engines and trainer differ by {found:.3g} nats per fresh token"
        is_sure = not self._has_judged or metrics.get("fresh_tokens", JUDGED_TOKENS) >= JUDGED_TOKENS
        self._has_judged |= "mismatch_mean" in metrics
        if not found <= END_NATS and is_sure and self._rule == "end":  # nan as well
            raise EnginesDiffer(f"{says}, more than {END_NATS:g}: {_CAUSES}; --mismatch tell goes on")
        if found <= max(TOLD_NATS, 2 * self._told):
            return ""
        self._told = found
        return f"{says}, more than {TOLD_NATS:g}: {_CAUSES}"
