"""One broadcast of a version of weights: the trainer is rank 0, the processes of engines are the others.

Imported by the trainer and in vLLM's workers only: it needs torch. On GPUs the pieces travel by NCCL, on CPUs by gloo.
Nothing waits without end: a rank that does not come, or stops, ends the broadcast for all.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Final, Self

import numpy as np
import torch
import torch.distributed

from heddle_dask.core.errors import HeddleError
from heddle_dask.weights.manifest import WeightBucket, WeightManifest, WeightsRefused
from heddle_dask.weights.tensor_files import RawTensor, file_parts, tensors_in

PIECE_BYTES: Final = 1 << 26
"""Sent at once: the memory that a broadcast takes on a GPU."""
PATIENCE_S: Final = 60.0
"""Longest wait for all ranks, and for one piece."""

_TORCH_TYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# torch types only a part of it.
_c10d: Any = torch.distributed
# NCCL's own watchdog would end the process: here its patience must outlast ours.
_WATCHDOG = timedelta(hours=1)
_POLL_S = 0.001
_END = "end"


class BroadcastFailed(HeddleError):
    """A rank did not come, is gone, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one broadcast meet.

    Attributes
    ----------
    size
        All ranks, the trainer's included.
    backend
        ``"nccl"`` or ``"gloo"``.
    join_s, piece_s
        Longest wait for all ranks, and for one piece.
    """

    host: str
    port: int
    size: int
    backend: str
    join_s: float = PATIENCE_S
    piece_s: float = PATIENCE_S

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def meeting_place(host: str, join_s: float) -> Any:
    """What the ranks find one another by, at a free port of this address."""
    listening = socket.create_server((host, 0), family=_family(host))
    port = listening.getsockname()[1]
    # Without the file descriptor it would listen at every address of the machine.
    return _c10d.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=join_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class BroadcastGroup:
    """The ranks of one broadcast, from the point of view of one of them. Blocks until all are there.

    Parameters
    ----------
    place
        `meeting_place`, at rank 0; the others connect to it.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, place: Any = None) -> None:
        self._meeting = meeting
        self._rank = rank
        self._patience = timedelta(seconds=meeting.piece_s)
        self._device = device if meeting.backend == "nccl" else torch.device("cpu")
        with _told(f"not all {meeting.size} ranks came to {meeting.host}:{meeting.port}"):
            joining = timedelta(seconds=meeting.join_s)
            self._place = place or _c10d.TCPStore(meeting.host, meeting.port, timeout=joining, wait_for_workers=False)
            self._place.set(f"rank-{rank}", "")
            self._place.wait([f"rank-{each}" for each in range(meeting.size)], joining)
            self._group = self._joined()

    def _joined(self) -> Any:
        meeting, rank, place = self._meeting, self._rank, _c10d.PrefixStore("weights", self._place)
        if meeting.backend == "nccl":
            torch.cuda.set_device(self._device)
            # A stream of its own: what the engine or the trainer computes meanwhile is not waited for.
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
            nccl = _c10d.ProcessGroupNCCL.Options()
            nccl._timeout = _WATCHDOG
            return _c10d.ProcessGroupNCCL(place, rank, meeting.size, nccl)
        gloo = _c10d.ProcessGroupGloo._Options()
        gloo._timeout = timedelta(seconds=meeting.join_s)
        # The address by which this machine reaches the trainer; gloo's own choice is that of its host name.
        hostname = meeting.host if rank == 0 else _address_towards(meeting.host, meeting.port)
        gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=hostname)]
        return _c10d.ProcessGroupGloo(place, rank, meeting.size, gloo)

    def send(self, piece: torch.Tensor) -> None:
        """Rank 0 sends bytes to all others."""
        self._carry(piece.to(self._device))

    def receive(self, piece: torch.Tensor) -> None:
        """The other ranks receive as many bytes as there is room for in `piece`."""
        if self._device.type == "cpu":
            self._carry(piece)
            return
        received = torch.empty_like(piece, device=self._device)
        self._carry(received)
        piece.copy_(received)

    def tell(self, verified: bool) -> None:
        """Say at the end whether what came is verified, and stay until the others do not need this rank any more."""
        # By what they met by: a rank that has left the group would break a collective that is still under way.
        with suppress(RuntimeError):  # rank 0 is gone: what is here is verified or refused all the same
            self._place.set(f"verdict-{self._rank}", "1" if verified else "0")
            self._place.wait([_END], self._patience)

    def verdicts(self) -> int:
        """Rank 0 waits for all others; returns how many have verified what came."""
        names = [f"verdict-{each}" for each in range(1, self._meeting.size)]
        try:
            with _told("a rank is gone"):
                self._place.wait(names, self._patience)
                return sum(self._place.get(name) == b"1" for name in names)
        finally:
            self._place.set(_END, "")

    def close(self) -> None:
        """Leave; ranks that still wait for this one fail."""
        self._group.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _carry(self, piece: torch.Tensor) -> None:
        with _told("a rank is gone"):
            self._wait(self._group.broadcast(piece, 0))

    def _wait(self, work: Any) -> None:
        if self._device.type == "cpu":
            work.wait(self._patience)
            return
        give_up_s = time.monotonic() + self._meeting.piece_s
        while not work.is_completed():
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"no answer within {self._meeting.piece_s:g} s")
            time.sleep(_POLL_S)
        work.wait()


def send_weights(
    group: BroadcastGroup, manifest: WeightManifest, tensors: Iterable[RawTensor], piece_bytes: int
) -> int:
    """Send all buckets of a version from rank 0; returns the number of ranks that verified them.

    Parameters
    ----------
    tensors
        In the order of the manifest.
    """
    left = iter(tensors)
    for bucket in manifest.buckets:
        parts = file_parts(list(islice(left, len(bucket.tensors))))
        for piece in _pieces(parts, piece_bytes):
            group.send(torch.from_numpy(piece))
    return group.verdicts()


def receive_weights(group: BroadcastGroup, manifest: WeightManifest, piece_bytes: int) -> dict[str, torch.Tensor]:
    """Receive and verify all buckets of a version, into memory of the host; the tensors by name.

    Raises
    ------
    WeightsRefused
        What came has other digests, or other tensors, than the manifest says.
    BroadcastFailed
    """
    tensors: dict[str, torch.Tensor] = {}
    refused: WeightsRefused | None = None
    for bucket in manifest.buckets:
        data = torch.empty(bucket.nbytes, dtype=torch.uint8)
        for start in range(0, bucket.nbytes, piece_bytes):
            group.receive(data[start : start + piece_bytes])
        try:
            tensors |= _verified(data, bucket)
        except WeightsRefused as error:
            refused = refused or error  # the other ranks must not miss this one
    group.tell(refused is None)
    if refused is not None:
        raise refused
    return tensors


def _verified(data: torch.Tensor, bucket: WeightBucket) -> dict[str, torch.Tensor]:
    content = data.numpy()
    if hashlib.blake2b(content.data, digest_size=32).hexdigest() != bucket.digest:
        raise WeightsRefused(f"bucket {bucket.file} came corrupt: its digest is not that of the manifest")
    stored = tensors_in(content.data, bucket.file)
    if {one.facts for one in stored} != set(bucket.tensors):
        raise WeightsRefused(f"bucket {bucket.file} has other tensors than the manifest says")
    return {
        one.facts.name: data[one.start : one.stop].view(_TORCH_TYPES[one.facts.dtype]).view(one.facts.shape)
        for one in stored
    }


def _pieces(parts: Iterable[bytes | memoryview], piece_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
    """The bytes of all parts, in arrays of one size but for the last; each is overwritten by the next."""
    piece = np.empty(piece_bytes, np.uint8)
    used = 0
    for part in parts:
        rest = np.frombuffer(part, np.uint8)
        while rest.size:
            taken = min(rest.size, piece_bytes - used)
            piece[used : used + taken] = rest[:taken]
            used, rest = used + taken, rest[taken:]
            if used == piece_bytes:
                yield piece
                used = 0
    if used:
        yield piece[:used]


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        told = " ".join(str(error).split())[:200]
        raise BroadcastFailed(f"the broadcast of weights ended: {what} ({told})") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def _address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches another one; nothing is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class Reception:
    """The receiving of one version; begins at once.

    Parameters
    ----------
    before
        The reception before this one. It is let end: a rank that left would end the broadcast for all others.
    """

    def __init__(
        self, manifest: str, meeting: Meeting, rank: int, device: torch.device, before: Reception | None
    ) -> None:
        self._manifest = WeightManifest.from_json(manifest)
        self._meeting = meeting
        self._rank = rank
        self._device = device
        self._before = before
        self._cause = ""
        self._tensors: dict[str, torch.Tensor] | None = None
        self._thread = threading.Thread(target=self._receive, name="heddle-weights", daemon=True)
        self._thread.start()

    @property
    def label(self) -> str:
        """The version, as engines are labelled."""
        return str(self._manifest.version)

    def status(self) -> Mapping[str, Any]:
        """Of which version, whether it has ended, and why it failed (empty: it did not)."""
        return {"version": self.label, "ended": not self._thread.is_alive(), "cause": self._cause}

    def take(self) -> dict[str, torch.Tensor]:
        """The tensors by name, verified, in the host's memory; only once."""
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            raise ValueError(f"weights {self.label} are not received: {self._cause or 'taken, or under way'}")
        return tensors

    def join(self) -> None:
        """Wait until it has ended: the limits of the broadcast bound it."""
        self._thread.join()

    def _receive(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.join()
            del before  # with its tensors
        try:
            with BroadcastGroup(self._meeting, self._rank, self._device) as group:
                self._tensors = receive_weights(group, self._manifest, PIECE_BYTES)
        except (HeddleError, RuntimeError, MemoryError) as error:
            self._cause = " ".join(str(error).split())[:300] or type(error).__name__
