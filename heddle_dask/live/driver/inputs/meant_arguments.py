"""Which argument of `Rollout` was meant, where a setting was given in another place."""

from __future__ import annotations

from dataclasses import is_dataclass

PLACES = {
    "Budget": "budget=Budget(…)",
    "RetryPolicy": "budget=Budget(retries=RetryPolicy(…))",
    "Sampling": "sampling=Sampling(…)",
    "Engines": "engines=Engines(…)",
    "EngineSpec": "engines=EngineSpec(…)",
    "VllmOptions": "engines=Engines(options=VllmOptions(…))",
    "Patience": "engines=Engines(patience=Patience(…))",
    "Strategy": "strategy=Strategy(…)",
    "Pools": "pools=Pools(…)",
    "ServiceSpec": "pools=Pools(services=[ServiceSpec(…)])",
    "ApiQuota": "pools=Pools(quotas=[ApiQuota(…)])",
    "ChatModel": "model=ChatModel(…)",
    "Output": "out=Output(…)",
    "Telemetry": "out=Output(PATH, telemetry=Telemetry(…))",
}
"""Where the settings go that `Rollout` takes, by the name of their class."""


def meant(value: object) -> str:
    """The end of a refusal: where a setting of this type goes; empty for anything else."""
    place = PLACES.get(type(value).__name__)
    return f"; this one goes to {place}" if place else ""


def shown(value: object) -> str:
    """A wrong value in a message: settings are long."""
    return f"{type(value).__name__}(…)" if is_dataclass(value) and not isinstance(value, type) else repr(value)
