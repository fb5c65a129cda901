"""Broadcasts of weights by gloo: real process groups, without engines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from worlds.weight_builders import perturbed, tensors_of

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.collective import CollectiveUri
from heddle_dask.weights.manifest import WeightManifest
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import BucketWriter, WeightStore
from heddle_dask.weights.tensor_files import RawTensor

torch = pytest.importorskip("torch")

from heddle_dask.engines.weight_broadcast import (  # noqa: E402
    BroadcastGroup,
    Meeting,
    Reception,
    meeting_place,
    receive_weights,
    send_weights,
)
from pipelines.grpo.broadcasting import Broadcaster  # noqa: E402

CPU = torch.device("cpu")
NEW = PolicyVersion("run", 3)


def free_address() -> CollectiveUri:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return CollectiveUri("127.0.0.1", probe.getsockname()[1])


class Sender:
    """A trainer's broadcaster, and what workers of engines ask it."""

    def __init__(self, folder: Path, model_dir: str, **limits: float) -> None:
        self.tensors: list[RawTensor] = perturbed(model_dir, 3)
        self.address = replace(free_address(), path=str(folder / "manifests"))
        store = WeightStore(str(self.address))
        store.write_manifest(NEW, self.tensors, model_facts(model_dir))
        manifest = store.manifest(NEW)
        assert manifest is not None and not list(folder.rglob("*.safetensors"))
        self.manifest: WeightManifest = manifest
        self.broadcaster = Broadcaster(CPU, **limits)

    async def ask(self, question: str, **body: Any) -> Any:
        asked = {"lineage": "run", "number": 3, "ranks": 1, "device": "cpu", **body}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.address.url}/{question}", json=asked) as response,
        ):
            text = await response.text()
            return json.loads(text) if response.status == 200 else text

    async def places(self, *ranks: int) -> list[Meeting]:
        """Places of engines with so many ranks in one broadcast: they wait while another one is under way."""
        (first,) = await self.place()
        asked = [asyncio.create_task(self.ask("place", ranks=each)) for each in ranks]
        while len(self.broadcaster._waiting) < len(ranks):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(expect_whole, self.receive(*first), self.tensors)
        answers = await asyncio.gather(*asked)
        taken = sorted((each["rank"], count) for each, count in zip(answers, ranks, strict=True))
        assert taken[0][0] == 1 and taken[1][0] == 1 + taken[0][1], "no two have the same rank"
        meetings = [Meeting.from_mapping(each["meeting"]) for each in answers]
        assert len(set(meetings)) == 1 and meetings[0].size == 1 + sum(ranks)
        return meetings

    async def place(self) -> list[tuple[Meeting, int]]:
        answer = await self.ask("place")
        return [(Meeting.from_mapping(answer["meeting"]), answer["rank"])]

    async def ended(self) -> str:
        """Why the broadcast under way failed."""
        assert self.broadcaster._rounds is not None
        await self.broadcaster._rounds
        return self.broadcaster.failure

    def receive(self, meeting: Meeting, rank: int, before: Reception | None = None) -> Reception:
        return Reception(self.manifest.to_json(), meeting, rank, CPU, before)


def sending(folder: Path, model_dir: str, scenario: Callable[[Sender], Awaitable[None]], **limits: float) -> None:
    async def main() -> None:
        sender = Sender(folder, model_dir, gather_s=0.0, **limits)
        await sender.broadcaster.listen(sender.address)
        sender.broadcaster.offer(sender.manifest, lambda: sender.tensors)
        try:
            await scenario(sender)
        finally:
            await sender.broadcaster.close()

    asyncio.run(asyncio.wait_for(main(), 120.0))


def expect_whole(reception: Reception, tensors: list[RawTensor]) -> None:
    reception.join()
    assert reception.status() == {"version": "run:3", "ended": True, "cause": ""}
    received = reception.take()
    assert {one.name for one in tensors} == set(received)
    for one in tensors:
        assert received[one.name].shape == one.shape
        assert received[one.name].numpy().tobytes() == one.data.tobytes()
    with pytest.raises(ValueError, match="not received"):
        reception.take()


def test_engines_that_wait_share_a_broadcast_and_later_ones_have_another(tmp_path: Path, model_dir: str) -> None:
    async def scenario(sender: Sender) -> None:
        assert WeightManifest.from_json(json.dumps(await sender.ask("manifest"))) == sender.manifest
        assert "run:2 any more, but run:3" in await sender.ask("manifest", number=2)
        meeting, _ = await sender.places(2, 1)
        receptions = [sender.receive(meeting, rank) for rank in (1, 2, 3)]
        for reception in receptions:
            await asyncio.to_thread(expect_whole, reception, sender.tensors)
        (late,) = await sender.place()
        assert late[0].size == 2 and late[0].port != meeting.port
        await asyncio.to_thread(expect_whole, sender.receive(*late, before=receptions[0]), sender.tensors)
        assert await sender.ended() == ""

    sending(tmp_path, model_dir, scenario)


def test_a_rank_that_leaves_or_never_comes_ends_the_broadcast_and_not_the_next_one(
    tmp_path: Path, model_dir: str
) -> None:
    async def scenario(sender: Sender) -> None:
        usual = sender.broadcaster._limits_s
        sender.broadcaster._limits_s = (usual[0], 2.0)
        meeting, _ = await sender.places(1, 1)
        stays = sender.receive(meeting, 1)
        await asyncio.to_thread(lambda: BroadcastGroup(meeting, 2, CPU).close())
        assert "the broadcast of weights ended" in await sender.ended()
        await asyncio.to_thread(stays.join)  # with weights that are whole, or with a cause
        assert stays.status()["cause"] or stays.take()

        sender.broadcaster._limits_s = (0.5, usual[1])
        (place,) = await sender.place()
        assert "not all 2 ranks came" in await sender.ended()
        late = sender.receive(*place)
        await asyncio.to_thread(late.join)
        assert "the broadcast of weights ended" in late.status()["cause"]

        sender.broadcaster._limits_s = usual
        (place,) = await sender.place()
        await asyncio.to_thread(expect_whole, sender.receive(*place), sender.tensors)
        assert await sender.ended() == ""

    sending(tmp_path, model_dir, scenario)


def test_buckets_travel_in_pieces(tmp_path: Path, model_dir: str) -> None:
    tensors = perturbed(model_dir, 4)
    store = WeightStore(f"collective://h:1{tmp_path}/weights")
    writer = BucketWriter(store, NEW, model_facts(model_dir), bucket_bytes=1_000_000, only_manifest=True)
    for tensor in tensors:
        writer.add(tensor)
    writer.publish()
    manifest = store.newest("run")
    assert manifest is not None and len(manifest.buckets) > 2
    place = meeting_place("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", place.port, 2, "gloo")

    def receive() -> dict[str, Any]:
        with BroadcastGroup(meeting, 1, CPU) as group:
            return receive_weights(group, manifest, 300_001)

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        with BroadcastGroup(meeting, 0, CPU, place) as group:
            assert send_weights(group, manifest, tensors, 300_001) == 1
        received = receiving.result()
    assert {name: value.numpy().tobytes() for name, value in received.items()} == {
        one.name: one.data.tobytes() for one in tensors
    }


def test_bytes_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path, model_dir: str) -> None:
    async def scenario(sender: Sender) -> None:
        sender.broadcaster.offer(sender.manifest, lambda: tensors_of(model_dir))
        (place,) = await sender.place()
        reception = sender.receive(*place)
        await asyncio.to_thread(reception.join)
        assert "came corrupt" in reception.status()["cause"]
        assert "1 of 1 ranks refused" in await sender.ended()
        with pytest.raises(ValueError, match="corrupt"):
            reception.take()

    sending(tmp_path, model_dir, scenario)


def test_an_address_that_is_in_use_or_of_another_machine_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for address in (
                CollectiveUri("127.0.0.1", taken.getsockname()[1]),
                CollectiveUri("192.0.2.1", 29600),
            ):
                with pytest.raises(BadInput, match="cannot listen"):
                    await Broadcaster(CPU).listen(address)

    asyncio.run(main())
