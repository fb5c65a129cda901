"""What a request for GPUs means: the pool and the sizes of its model service, and whole chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from heddle_dask.core.gpu_chunks import chunk_size
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.pools import ModelService
from heddle_dask.core.resources import GPUS, Amounts, ResourceDemand


def on_chunks(request: ActionRequest, services: Mapping[str, ModelService]) -> tuple[ActionRequest, str]:
    """The request with amounts of GPUs that are sizes of chunks, and the pool of its service; or why it is refused.

    A request of a service without GPUs may use each size of the service. Beside another elastic resource, the number of
    GPUs is the smallest one.

    Returns
    -------
    The request, and one line that says why it can never run; empty: it may.
    """
    asked = request.demand[GPUS]
    wanted = _sizes(asked) if asked.most else set()
    pool = request.pool
    if request.service:
        service = services.get(request.service)
        if service is None:
            known = ", ".join(sorted(services)) or "none"
            return request, f"model service '{request.service}' is not declared (declared: {known})"
        supported = {chunk_size(gpus) for gpus in service.gpus}
        pool, sizes = service.pool, sorted(supported & wanted if wanted else supported)
        if not sizes:
            listed = ", ".join(map(str, sorted(supported)))
            return request, f"model service '{service.name}' runs on {listed} GPUs, not on {asked.least}"
    elif wanted:
        sizes = [size for size in sorted(wanted) if size in asked] or sorted(wanted)[:1]
    else:
        return request, ""
    if request.demand.elastic not in (None, GPUS):
        sizes = sizes[:1]
    amounts: dict[str, Amounts | int] = {name: each for name, each in request.demand if name != GPUS}
    amounts[GPUS] = Amounts(sizes[0], sizes[-1], tuple(sizes) if len(sizes) > 1 else ())
    return replace(request, pool=pool, demand=ResourceDemand.of(amounts)), ""


def _sizes(asked: Amounts) -> set[int]:
    """The chunks of these amounts; of a range, however wide, without counting through it."""
    if asked.only:
        return {chunk_size(gpus) for gpus in asked.only}
    sizes = {chunk_size(asked.least)}
    while (largest := max(sizes)) < asked.most:
        sizes.add(2 * largest)
    return sizes
