"""What a run declares about shared resources: model services, and quotas of APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.apis.remote_model import RemoteModel
from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Needs
from heddle_dask.core.quotas import calls_of
from heddle_dask.core.resources import GPUS, ApiQuota, use_text
from heddle_dask.engines.model_services.spec import ServiceSpec
from heddle_dask.live.wire.driver_messages import DeclaredService
from heddle_dask.weights.model_directory import model_digest

Service = ServiceSpec | RemoteModel


@dataclass(frozen=True, slots=True)
class Pools:
    """Shared resources that programs of a run may name in `Needs`.

    Attributes
    ----------
    services
        Model services: those of the cluster (`ServiceSpec`: ``Needs(service=name)``, `Context.score`,
        `Context.logprobs`, `Context.judge`), and those that others run (`RemoteModel`: `Context.judge`).
    quotas
        Quotas of APIs (`ApiQuota`): ``Needs(api={name: 1})``, and of remote models of the same name.

    Raises
    ------
    BadInput
        A value of another type, two of one name, or a service whose model directory is missing.
    """

    services: Sequence[Service] = ()
    quotas: Sequence[ApiQuota] = ()

    def __post_init__(self) -> None:
        kinds: tuple[tuple[str, tuple[type, ...]], ...] = (
            ("services", (ServiceSpec, RemoteModel)),
            ("quotas", (ApiQuota,)),
        )
        for name, kind in kinds:
            use = " or ".join(f"{each.__name__}(…)" for each in kind)
            given = getattr(self, name)
            if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
                raise BadInput(f"pools: {name} is {given!r}: use a list of {use}")
            for each in given:
                if not isinstance(each, kind):
                    raise BadInput(f"pools: {name} has {each!r}: use {use}")
            names = [each.name for each in given]
            twice = sorted({each for each in names if names.count(each) > 1})
            if twice:
                raise BadInput(f"pools: two {name} have the name {twice[0]!r}: give each its own")
            object.__setattr__(self, name, tuple(given))
        for service in self.hosted:
            service.check_model()
        limited = {each.name for each in self.quotas}
        unlimited = (ApiQuota(each.name) for each in self._remote if each.name not in limited)
        object.__setattr__(self, "quotas", (*self.quotas, *unlimited))

    @property
    def hosted(self) -> tuple[ServiceSpec, ...]:
        """Those of the cluster."""
        return tuple(each for each in self.services if isinstance(each, ServiceSpec))

    @property
    def _remote(self) -> tuple[RemoteModel, ...]:
        return tuple(each for each in self.services if isinstance(each, RemoteModel))

    def service(self, name: str) -> Service:
        """The declared service of this name.

        Raises
        ------
        BadInput
            There is none.
        """
        for each in self.services:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.services) or "none"
        raise BadInput(f"service {name!r} is not declared: add it to Pools(services=…) (declared: {known})")

    def check(self, needs: Needs) -> None:
        """Refuse needs that name what was not declared.

        Raises
        ------
        BadInput
            Its service or an API is not declared, its quota never allows so many calls at once, or the service cannot
            be resident on so many GPUs.
        """
        self._check_apis(needs)
        if not needs.service:
            return
        service = self.service(needs.service)
        if isinstance(service, RemoteModel):
            raise BadInput(f"needs: service {service.name} is remote: use ctx.judge(…), or Needs(api=…) for its quota")
        asked = needs.demand()[GPUS]
        if asked.most and not any(size in asked for size in service.gpus):
            sizes = ", ".join(map(str, service.gpus))
            raise BadInput(f"needs: service {service.name} runs on {sizes} GPUs, not on {needs.gpus}")

    def check_rewards(self, environments: Sequence[object]) -> None:
        """Refuse rewards that need what was not declared: otherwise the first would fail after its whole trajectory."""
        for environment in environments:
            needs = getattr(environment, "reward_needs", None)
            if not isinstance(needs, Needs):
                continue
            asked = getattr(environment, "reward_asks", "")
            if asked and asked not in self.service(needs.service).answers:
                raise BadInput(f"reward: the model of service {needs.service} gives no {asked}")
            if not any(each.name == needs.service for each in self._remote):
                self.check(needs)

    def _check_apis(self, needs: Needs) -> None:
        quotas = {each.name: each for each in self.quotas}
        for name, amount in calls_of(needs.demand().least):
            api = name.partition("#")[0]
            if api not in quotas:
                known = ", ".join(quotas) or "none"
                raise BadInput(f"api {api!r} is not declared: add it to Pools(quotas=…) (declared: {known})")
            (most,) = (each.most_at_once for each in quotas[api].accounts() if each.name == name)
            if most is not None and amount > most:
                raise BadInput(f"needs: {use_text(name, amount)} at once; its quota allows {use_text(name, most)}")

    @property
    def declared_services(self) -> tuple[DeclaredService, ...]:
        """The services as the scheduler is told of them."""
        return tuple(DeclaredService(each.declared(), each.to_mapping()) for each in self.hosted)

    def description(self) -> dict[str, Any]:
        """JSON-able facts for the store; empty where nothing is declared."""
        if not self.services:
            return {}
        return {
            "services": [service.to_mapping() for service in self.services],
            "service_models": {service.name: model_digest(service.model) for service in self.hosted},
        }
