"""How a token must be sampled so that its logprob is that of a policy which training can change.

The trainer computes softmax(logits / temperature) over the whole vocabulary. What an engine samples from another
distribution (cut by top_p, top_k or min_p, shifted by penalties, restricted to a form) has another probability, and a
temperature of 0 has none.
"""

from __future__ import annotations

import math

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import StepRecord


def check_trainable_sampling(
    where: str,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    structured: object = None,
) -> None:
    """Refuse sampling whose tokens cannot be trained on, before a run begins.

    Parameters
    ----------
    where
        Begins the message, such as the option or the file.
    structured
        A form that the text must have (`core.sampling.StructuredOutput`); None for none.
    """
    if not temperature > 0 or math.isinf(temperature):
        raise BadInput(f"{where}: temperature is {temperature:g}: training needs one above 0")
    plain = {
        "top_p": (top_p, 1.0),
        "top_k": (top_k, 0),
        "min_p": (min_p, 0.0),
        "presence_penalty": (presence_penalty, 0.0),
        "frequency_penalty": (frequency_penalty, 0.0),
        "repetition_penalty": (repetition_penalty, 1.0),
    }
    for name, (value, neutral) in plain.items():
        if value != neutral:
            raise BadInput(
                f"{where}: {name} is {value:g}: training needs tokens sampled from the whole distribution "
                f"({name} {neutral:g})"
            )
    if structured is not None:
        raise BadInput(f"{where}: structured output: training needs tokens sampled from the whole distribution")


def check_step_is_trainable(where: str, step: StepRecord) -> None:
    """The same for a step as it was recorded; top_k -1 is none, too.

    Raises
    ------
    BadInput
    """
    if math.isnan(step.temperature):
        raise BadInput(f"{where}: its temperature was not recorded: use a run of this version")
    check_trainable_sampling(
        where,
        temperature=step.temperature,
        top_p=step.top_p,
        top_k=max(step.top_k, 0),
        min_p=step.min_p,
    )
