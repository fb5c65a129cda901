"""Images are read in every form, unpacked once, and cannot write outside of their folder."""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from worlds.image_files import ImageFiles, Member, layer, member

from heddle_dask.environments.input_identity import root_digest
from heddle_dask.sandbox.images import cache, layers
from heddle_dask.sandbox.images.archive import BadImage
from heddle_dask.sandbox.images.cache import HeldImage, image_digest

PASSWD = b"root:x:0:0::/root:/bin/sh\nagent:x:1234:77::/home/me:/bin/sh\n"
LINK, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def image(*layers_of_members: list[Member], **settings: Any) -> ImageFiles:
    return ImageFiles([layer(each) for each in layers_of_members], settings)


TWO = image(
    [member("etc/passwd", PASSWD), member("app/old", b"1"), member("app/run", b"#!", mode=0o4755)],
    [member("app/.wh.old"), member("app/new", b"2")],
    Env=["A=1", "B=x=y"],
    User="agent",
    WorkingDir="/app",
)
FORMS: dict[str, Callable[[ImageFiles, Path], Path]] = {
    "docker": lambda files, path: files.docker_tar(path),
    "docker 25": lambda files, path: files.newer_docker_tar(path),
    "layout": lambda files, path: files.layout(path),
    "layout in a tar": lambda files, path: files.layout_tar(path),
}


def unpacked(files: ImageFiles, tmp_path: Path) -> Path:
    """The root of an image that is unpacked in a folder of its own."""
    (tmp_path / "cache").mkdir(exist_ok=True)
    held = HeldImage.of(str(files.docker_tar(tmp_path / "image.tar")), base=tmp_path / "cache")
    held.release()
    return Path(held.image.root)


def files_below(root: Path) -> list[str]:
    found = [str(each.relative_to(root)) for each in sorted(root.rglob("*")) if not each.is_dir() or each.is_symlink()]
    return [each for each in found if each != "etc/hosts"]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_image(form: str, tmp_path: Path) -> None:
    source = FORMS[form](TWO, tmp_path / "image")
    held = HeldImage.of(str(source), base=tmp_path)
    found = held.image
    assert found.digest == image_digest(str(source)) == image_digest(str(TWO.docker_tar(tmp_path / "docker.tar")))
    assert (found.uid, found.gid, found.home, found.directory) == (1234, 77, "/home/me", "/app")
    assert found.environment == (("A", "1"), ("B", "x=y"))
    root = Path(found.root)
    assert files_below(root) == ["app/new", "app/run", "etc/passwd"]
    assert (root / "app/run").stat().st_mode & 0o7777 == 0o755 and (root / "app/run").stat().st_mtime == 1e9
    assert "localhost" in (root / "etc/hosts").read_text() and (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    # The second time nothing is unpacked, and the file is not read where the digest is known.
    held.release()
    before = root.stat().st_ino
    for known in ("", found.digest):
        HeldImage.of(str(source) if not known else "/gone", known, base=tmp_path).release()
    assert root.stat().st_ino == before


def test_a_folder_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "bin" / "tool").write_text("x")
    (tmp_path / "root" / "dev").symlink_to("/etc")
    found = HeldImage.of(str(tmp_path / "root"), base=tmp_path).image
    assert (Path(found.root) / "bin" / "tool").read_text() == "x" and found.directory == "/"
    assert not (Path(found.root) / "dev").is_symlink() and (tmp_path / "root" / "dev").is_symlink()
    (tmp_path / "root" / "bin" / "tool").write_text("y")
    assert image_digest(str(tmp_path / "root")) != found.digest
    with pytest.raises(BadImage, match="another one than where the run was started"):
        HeldImage.of(str(tmp_path / "root"), f"sha256:{'0' * 64}", base=tmp_path)
    with pytest.raises(BadImage, match="it is not on"):
        HeldImage.of(str(tmp_path / "missing"), base=tmp_path)


def test_what_a_layer_deletes_and_replaces(tmp_path: Path) -> None:
    lower = [
        member("opaque/a", b"1"),
        member("opaque/deep/b", b"1"),
        member("file", b"1"),
        member("folder/x", b"1"),
        member("kept/x", b"1"),
        member("run", kind=LINK, link="/var/run"),
        member("first", b"same"),
        member("second", kind=HARD, link="first"),
        member("null", kind=tarfile.CHRTYPE),
        member("pipe", kind=tarfile.FIFOTYPE),
    ]
    upper = [
        member("opaque/deep/c", b"2"),
        member("opaque/.wh..wh..opq"),
        member("file", kind=DIR),
        member("file/inner", b"2"),
        member("folder", b"now a file"),
        member("kept/y", b"2"),
        member("kept/.wh.x"),
        member("run/pid", b"2"),  # through a link that is absolute in the image
        member(".wh.missing"),
    ]
    root = unpacked(image(lower, upper), tmp_path)
    assert files_below(root) == sorted(
        ["file/inner", "first", "folder", "kept/y", "opaque/deep/c", "run", "second", "var/run/pid"]
    )
    assert (root / "first").stat().st_ino == (root / "second").stat().st_ino
    assert (root / "folder").read_text() == "now a file"


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([member("../out", b"x")], "has the path"),
        ([member("a/../../out", b"x")], "has the path"),
        ([member("in", kind=HARD, link="../../secret")], "has a link to"),
        ([member("a", kind=LINK, link="a"), member("a/b", b"x")], "lead in a circle"),
        ([member("a", b""), member("a/b", b"x")], "is no folder"),
        ([member(".wh...", b"")], "has the path"),
        ([member("/".join(["d" * 200] * 25), b"x")], "File name too long"),
        ([member(str(number), b"") for number in range(12)], "too many files"),
        ([member("big", b"x" * 5_000_000)], "larger than the room"),
    ],
)
def test_a_hostile_layer_is_refused(
    members: list[Member], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr(cache, "_MOST_FILES", 10)
    monkeypatch.setattr(cache, "_MOST_BYTES", 4_000_000)
    with pytest.raises(BadImage, match=rf"^image .*{told}"):
        unpacked(image(members), tmp_path)
    assert not (tmp_path / "out").exists()
    assert [each.name for each in (tmp_path / "cache").iterdir() if each.suffix not in (".lock", ".unpacking")] == []


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "kept").write_text("x")
    outside = str(tmp_path / "victim")
    upwards = "../" * 30 + outside[1:]
    hostile = image(
        [member("abs", kind=LINK, link=outside), member("rel", kind=LINK, link=upwards)],
        [
            member("abs/new", b"1"),
            member("rel/new", b"1"),
            member("abs/.wh.kept"),
            member("rel/.wh..wh..opq"),
            member("etc", kind=LINK, link=outside),
            member("proc", kind=LINK, link=outside),
        ],
        WorkingDir="/abs/made",
    )
    root = unpacked(hostile, tmp_path)
    assert [each.name for each in (tmp_path / "victim").iterdir()] == ["kept"]
    assert (root / outside[1:] / "new").read_text() == "1" and (root / outside[1:] / "made").is_dir()


def test_a_bomb_is_cut_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_BYTES", 4_000_000)
    bomb = ImageFiles([layer([member("zeros", bytes(50_000_000))])])
    with pytest.raises(BadImage, match="larger than the room"):
        HeldImage.of(str(bomb.layout(tmp_path / "packed")), base=tmp_path)
    long_name = tarfile.TarInfo("x" * 3_000_000)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(long_name)
    with pytest.raises(BadImage, match="a header in a layer is too long"):
        HeldImage.of(str(ImageFiles([made.getvalue()]).docker_tar(tmp_path / "x")), base=tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda form: [], "not a table"),
        (lambda form: {**form, "rootfs": {"diff_ids": ["sha256:1"]}}, "names 1 layers"),
        (lambda form: {**form, "rootfs": {"diff_ids": form["rootfs"]["diff_ids"][::-1]}}, "not the one of its digest"),
        (lambda form: {**form, "config": {"Env": "A=1"}}, "not a list"),
        (lambda form: {**form, "config": {"User": "nobody-here"}}, "is not in its /etc/passwd"),
        (lambda form: {**form, "config": {"User": "0:nobody"}}, "is not in its /etc/group"),
        (lambda form: {**form, "config": {"User": 7}}, "not a text"),
        (lambda form: {**form, "config": {"User": "99999999999"}}, "is not in its /etc/passwd"),
    ],
)
def test_a_configuration_that_is_wrong_is_told(change: Callable[[Any], Any], told: str, tmp_path: Path) -> None:
    config = json.dumps(change(json.loads(TWO.config))).encode()
    with pytest.raises(BadImage, match=told):
        HeldImage.of(str(TWO.docker_tar(tmp_path / "image.tar", config)), base=tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x1f\x8b" + b"0" * 600, "decompress it first"),
        (b"no tar" * 300, "it is no tar"),
        (layer([]), "it has no file 'index.json'"),
        (layer([member("manifest.json", b"[" * 100_000)]), "no JSON"),
        (layer([member("manifest.json", b"[{}, {}]")]), "it has 2 images"),
        (layer([member("manifest.json", kind=LINK, link="manifest.json")]), "it has no file"),
        (layer([member("index.json", b'{"manifests": [{"digest": "sha256:../../x"}]}')]), "not sha256:"),
        (layer([member(str(number)) for number in range(10_001)]), "it is no image"),
    ],
)
def test_a_file_that_is_no_image_is_told(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadImage, match=told):
        HeldImage.of(str(tmp_path / "file"), base=tmp_path)


def test_layers_of_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(change: Callable[[bytes], bytes]) -> Path:
        monkeypatch.setattr("worlds.image_files.gzip.compress", lambda content, *rest, **more: change(content))
        return TWO.layout_tar(tmp_path / "image.tar")

    def packed(content: bytes) -> bytes:
        return subprocess.run(["zstd", "-qc"], input=content, capture_output=True, check=True).stdout

    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadImage, match="install the package zstd"):
        HeldImage.of(str(source(lambda content: b"\x28\xb5\x2f\xfd" + content)), base=tmp_path)
    monkeypatch.setenv("PATH", path)
    if shutil.which("zstd") is None:
        pytest.skip("no zstd")
    for damage in (lambda content: packed(content)[:-9], lambda content: packed(content)[:90] + bytes(5000)):
        with pytest.raises(BadImage, match=r"ends too soon|not the one of its digest|end of data|empty file"):
            HeldImage.of(str(source(damage)), base=tmp_path)
    root = Path(HeldImage.of(str(source(packed)), base=tmp_path).image.root)
    assert files_below(root) == ["app/new", "app/run", "etc/passwd"]


def test_a_fifo_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadImage, match="no file that can be read"):
        HeldImage.of(str(tmp_path / "fifo"), base=tmp_path)


def test_damaged_files_end_in_one_line(tmp_path: Path) -> None:
    sources = [TWO.docker_tar(tmp_path / "a").read_bytes(), TWO.layout_tar(tmp_path / "b").read_bytes()]
    drawn = random.Random(7)
    refused = 0
    for _ in range(300):
        content = bytearray(drawn.choice(sources))
        for _ in range(drawn.randint(1, 6)):
            place = drawn.randrange(len(content)) & ~0x1FF | drawn.randrange(512)
            content[place] = drawn.choice((0, 0x80, 0xFF, ord("/"), ord("7"), drawn.randrange(256)))
        (tmp_path / "hostile").write_bytes(
            bytes(content[: drawn.choice((len(content), drawn.randrange(len(content))))])
        )
        try:
            HeldImage.of(str(tmp_path / "hostile"), base=tmp_path).release()
        except BadImage as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def _unpack_and_tell(source: str, base: str) -> int:
    if layers.RootFolder.apply is not _counted:  # a process may serve two calls
        layers.RootFolder.apply, real = _counted, layers.RootFolder.apply
        _counted.real = real  # type: ignore[attr-defined]
    _counted.count = 0  # type: ignore[attr-defined]
    HeldImage.of(source, base=Path(base)).release()
    return _counted.count  # type: ignore[attr-defined,no-any-return]


def _counted(self: Any, *given: Any) -> None:
    _counted.count += 1  # type: ignore[attr-defined]
    _counted.real(self, *given)  # type: ignore[attr-defined]


_counted.count = 0  # type: ignore[attr-defined]


def test_processes_that_begin_at_once_unpack_one_time(tmp_path: Path) -> None:
    source = TWO.docker_tar(tmp_path / "image.tar")
    digest = image_digest(str(source)).removeprefix("sha256:")
    (tmp_path / f"{digest}.new-left").mkdir()  # of a process that was killed
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as processes:
        written = list(processes.map(_unpack_and_tell, [str(source)] * 4, [str(tmp_path)] * 4))
    assert sum(written) == len(TWO.layers)
    assert list(tmp_path.glob("*.new-*")) == []


def test_threads_that_begin_at_once_all_hold_it(tmp_path: Path) -> None:
    source = str(TWO.docker_tar(tmp_path / "image.tar"))
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        with ThreadPoolExecutor(8) as threads:  # none lets it go before all have it
            held = list(threads.map(lambda _, base=tmp_path / str(number): HeldImage.of(source, base=base), range(8)))
        for each in held:
            each.release()


def test_what_a_killed_process_has_left_is_swept(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f"{name}.new-1" / "root").mkdir(parents=True)
    with open(tmp_path / "alive.unpacking", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.sweep(tmp_path)
    assert [each.name for each in tmp_path.glob("*.new-*")] == ["alive.new-1"]


def test_the_longest_unused_image_goes_when_room_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for number in range(3):
        files = image([member("number", str(number).encode())])
        held.append(HeldImage.of(str(files.docker_tar(tmp_path / f"{number}.tar")), base=tmp_path))
    roots = [Path(each.image.root) for each in held]
    os.utime(roots[2].parent, (0, 0))
    for number in (1, 2):
        held[number].release()
    frees = iter([0, 0, 0, 1 << 40])
    monkeypatch.setattr(cache, "_free_bytes", lambda directory: next(frees, 1 << 40))
    HeldImage.of(str(TWO.docker_tar(tmp_path / "image.tar")), base=tmp_path).release()
    assert [root.exists() for root in roots] == [True, False, False], "the first is in use"


def test_a_run_knows_an_image_by_its_content(tmp_path: Path) -> None:
    digests = {root_digest(str(make(TWO, tmp_path / name))) for name, make in FORMS.items()}
    # Programs that copy images write their configuration anew.
    config = json.dumps({**json.loads(TWO.config), "created": "today"}, indent=1).encode()
    digests.add(root_digest(str(TWO.docker_tar(tmp_path / "copied", config))))
    assert len(digests) == 1 and "" not in digests
    for name, value in (("Env", ["A=2", "B=x=y"]), ("User", "root"), ("WorkingDir", "/")):
        other = ImageFiles(TWO.layers, {**TWO.settings, name: value})
        assert root_digest(str(other.docker_tar(tmp_path / "other"))) not in digests
    assert root_digest(str(image([member("x")]).docker_tar(tmp_path / "other"))) not in digests
