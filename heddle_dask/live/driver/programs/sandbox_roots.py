"""What the roots and images of a run's sandboxes contain, journalled when each is first used: a change is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heddle_dask.environments.input_identity import root_digest
from heddle_dask.sandbox.images.archive import BadImage
from heddle_dask.sandbox.images.cache import image_digest
from heddle_dask.sandbox.stateful.contract import SandboxSpec

ROOT_LINE = "sandbox-root"
"""Kind of the journal record of a root or an image; kept as long as the journal."""


class SandboxRoots:
    """The roots and images that a session has used."""

    def __init__(self, journal: Callable[[str, dict[str, Any]], None] = lambda kind, body: None) -> None:
        self._journal = journal
        self._digests: dict[str, asyncio.Task[str]] = {}

    async def identified(self, spec: SandboxSpec) -> SandboxSpec:
        """A sandbox is about to run: with the digest of its image, which its workers must have.

        What this machine does not have is not compared.
        """
        root = spec.image or spec.root
        if not root or spec.image_digest:
            return spec
        if root not in self._digests:
            self._digests[root] = asyncio.create_task(self._record(root, is_image=bool(spec.image)))
        digest = await asyncio.shield(self._digests[root])
        return replace(spec, image_digest=digest) if spec.image else spec

    async def _record(self, root: str, *, is_image: bool) -> str:
        try:
            digest = await asyncio.to_thread(image_digest if is_image else root_digest, root)
        except BadImage:  # the worker says so to the program
            return ""
        if digest:
            self._journal(ROOT_LINE, {"root": root, "digest": digest.removeprefix("sha256:")[:16]})
        return digest
