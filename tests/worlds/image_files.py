"""Images of containers made here: in the forms of `docker save`, new and old, and as OCI layouts."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> Member:
    """A file, or another kind of entry, of a layer."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(content)
    info.mtime = 1_000_000_000
    return info, content


def layer(members: Iterable[Member]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def layer_of(folder: Path) -> bytes:
    """A layer with all files of a folder, as of root."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for each in sorted(folder.iterdir()):
            tar.add(each, each.name)
    return made.getvalue()


@dataclass
class ImageFiles:
    """An image of these layers, uncompressed, the lowest first."""

    layers: list[bytes]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> bytes:
        digests = [f"sha256:{sha256(each).hexdigest()}" for each in self.layers]
        form = {"os": "linux", "config": self.settings, "rootfs": {"type": "layers", "diff_ids": digests}}
        return json.dumps(form).encode()

    def docker_tar(self, path: Path, config: bytes | None = None) -> Path:
        """As docker wrote it before version 25."""
        config = self.config if config is None else config
        name = f"{sha256(config).hexdigest()}.json"
        places = [f"{number}/layer.tar" for number in range(len(self.layers))]
        manifest = json.dumps([{"Config": name, "RepoTags": ["suite:1"], "Layers": places}]).encode()
        files = {**dict(zip(places, self.layers, strict=True)), name: config, "manifest.json": manifest}
        path.write_bytes(layer(member(*each) for each in files.items()))
        return path

    def newer_docker_tar(self, path: Path) -> Path:
        """As docker writes it since: an OCI layout with a ``manifest.json`` beside it."""
        blobs = self._blobs(packed=False)
        places = [f"blobs/sha256/{sha256(each).hexdigest()}" for each in self.layers]
        config = f"blobs/sha256/{sha256(self.config).hexdigest()}"
        blobs["manifest.json"] = json.dumps([{"Config": config, "RepoTags": None, "Layers": places}]).encode()
        path.write_bytes(layer(member(*each) for each in blobs.items()))
        return path

    def layout(self, folder: Path) -> Path:
        for name, content in self._blobs(packed=True).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder

    def layout_tar(self, path: Path) -> Path:
        path.write_bytes(layer(member(*each) for each in self._blobs(packed=True).items()))
        return path

    def _blobs(self, *, packed: bool) -> dict[str, bytes]:
        """An OCI layout, with an index in its index, and the provenance that builders put beside an image."""
        made: dict[str, bytes] = {}

        def blob(content: bytes, kind: str, **more: Any) -> dict[str, Any]:
            digest = sha256(content).hexdigest()
            made[f"blobs/sha256/{digest}"] = content
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content), **more}

        image = "application/vnd.oci.image."
        layers = [blob(gzip.compress(e, 1, mtime=0) if packed else e, f"{image}layer.v1.tar") for e in self.layers]
        config = blob(self.config, f"{image}config.v1+json")
        manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()
        other = blob(b"{}", f"{image}manifest.v1+json", platform={"os": "unknown", "architecture": "unknown"})
        inner = json.dumps({"manifests": [blob(manifest, f"{image}manifest.v1+json"), other]}).encode()
        made["index.json"] = json.dumps({"manifests": [blob(inner, f"{image}index.v1+json")]}).encode()
        made["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
        return made


_TOOLS = ["sh", "cat", "ls", "id", "rm", "mkdir", "touch", "sleep", "env", "head", "ln", "mv", "chmod", "tar", "seq"]
_TOOLS += ["wc", "mkfifo"]
# Of the standard library: a suite of `unittest` needs little.
_LEFT_OUT = ["test", "idlelib", "lib2to3", "ensurepip", "*-packages", "__pycache__", "config-*", "tkinter", "turtle*"]
_LEFT_OUT += ["pydoc_data", "distutils"]
_EXTENSIONS = ["lib-dynload", "*.so", "*.a", "xml*", "sqlite3", "multiprocessing"]


def small_root(
    root: Path, *, with_python: bool = True, with_extensions: bool = False, tools: Sequence[str] = ()
) -> Path:
    """A root file system with a shell, some tools, and the Python that runs this, from this machine's own files.

    Parameters
    ----------
    with_extensions
        Whether its Python has the modules of the standard library that are not written in Python, such as ctypes.
    tools
        Further programs of this machine.
    """
    for folder in ("bin", "etc", "usr", "tmp"):
        (root / folder).mkdir(parents=True)
    programs = [found for tool in (*_TOOLS, *tools) if (found := shutil.which(tool, path="/bin:/usr/bin"))]
    for program in programs:
        shutil.copy(program, root / "bin")
    if with_python:
        programs += map(str, _copy_python(root, with_extensions))
    # The C library loads this one by itself, to end a thread.
    for library in Path("/lib").glob("*-linux-gnu/libgcc_s.so.1") if with_extensions else ():
        copy = root / str(library)[1:]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    for program in programs:
        told = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for needed in re.findall(r"(/\S+) \(0x", told):
            copy = root / needed[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copy(needed, copy)
    return root


def _copy_python(root: Path, with_extensions: bool) -> list[Path]:
    """What of it needs libraries of the system."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    place = root / str(python)[1:]
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(python, place)
    for name in ("python", "python3"):
        (root / "bin" / name).symlink_to(python)
    left_out = shutil.ignore_patterns(*_LEFT_OUT, *(() if with_extensions else _EXTENSIONS))
    shutil.copytree(library, root / str(library)[1:], ignore=left_out, dirs_exist_ok=True)
    return [python, *(library.glob("lib-dynload/*.so") if with_extensions else ())]
