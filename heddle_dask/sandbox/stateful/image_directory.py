"""The directory of one sandbox of an image: all of its files lie in the layer over the image."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from heddle_dask.sandbox.confinement import DiskUsage
from heddle_dask.sandbox.images.cache import IMAGE_UID, HeldImage, UnpackedImage
from heddle_dask.sandbox.images.writable_layer import CopiedLayer, OverlayLayer, WritableLayer, acting_as
from heddle_dask.sandbox.program_files import deleted_usage
from heddle_dask.sandbox.stateful.contract import SandboxFailed, SandboxGone, SandboxSpec, absolute_path
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory

_LOG = logging.getLogger(__name__)


class ImageDirectory(WorkDirectory):
    """Files of one sandbox of an image.

    Parameters
    ----------
    spec
        Of the sandbox; its image is unpacked before the directory is made (`unpack`).
    """

    def __init__(self, base: Path, name: str, spec: SandboxSpec, *, private_user: bool) -> None:
        super().__init__(base, name, private_user=private_user)
        self.uid = IMAGE_UID if private_user else None
        self._spec = spec
        self._held: HeldImage | None = None
        self._layer: WritableLayer | None = None

    @property
    def image(self) -> UnpackedImage:
        assert self._held is not None
        return self._held.image

    @property
    def layer(self) -> WritableLayer:
        if self._layer is None:
            raise SandboxGone("sandbox: its files are gone")
        return self._layer

    async def unpack(self) -> None:
        """Unpack the image if no sandbox of this machine has; after a cancellation, that goes on for the next one."""
        unpacking = asyncio.ensure_future(asyncio.to_thread(self._image))
        try:
            self._held = await asyncio.shield(unpacking)
        except asyncio.CancelledError:
            unpacking.add_done_callback(_release)
            raise

    def _image(self) -> HeldImage:
        return HeldImage.of(self._spec.image, self._spec.image_digest)

    def make(self) -> None:
        self._make_shell()
        self._hold()
        if self._spec.network:
            with contextlib.suppress(
                OSError, SandboxFailed
            ):  # this machine asks no name server, or the image has its own
                self.put("/etc/resolv.conf", Path("/etc/resolv.conf").read_bytes())

    def copy_of(self, other: WorkDirectory) -> None:
        assert isinstance(other, ImageDirectory)
        self._make_shell()
        self._copy(*(folder for name in ("upper", "copy") if (folder := other.path / name).exists()))
        self._hold()

    def _hold(self) -> None:
        self._held = self._held or self._image()
        try:
            self._layer = OverlayLayer(self.image.root, self.path, self.uid)
        except OSError as error:
            _LOG.warning("no overlay for a sandbox of an image, its files are copied: %s", error)
            self._layer = CopiedLayer(self.image.root, self.path, self.uid)

    def put(self, path: str, content: bytes) -> None:
        with acting_as(self.uid):
            super().put(path, content)

    def get(self, path: str, most_bytes: int) -> bytes:
        with acting_as(self.uid):
            return super().get(path, most_bytes)

    def _top(self) -> Path:
        return self.layer.root

    def _parts(self, path: str) -> tuple[str, ...]:
        return PurePosixPath(absolute_path(path, self.image.directory)).parts[1:]

    def enter(self) -> tuple[str, ...]:
        try:
            return self.layer.enter()
        except OSError as error:
            raise SandboxGone(f"sandbox: {error}") from error

    def usage(self, pids: Sequence[int] = ()) -> DiskUsage:
        written, deleted = self.layer.usage(), deleted_usage(pids, str(self.layer.root))
        return DiskUsage(written.used_bytes + deleted.used_bytes, written.files + deleted.files)

    def delete(self) -> None:
        layer, self._layer = self._layer, None
        if layer is not None:
            layer.close()
        if self._held is not None:
            self._held.release()
        super().delete()


def _release(unpacking: asyncio.Future[HeldImage]) -> None:
    if not unpacking.cancelled() and unpacking.exception() is None:
        unpacking.result().release()
