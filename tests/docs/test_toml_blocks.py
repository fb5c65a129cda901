"""The TOML blocks of the documentation are read by the program that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from worlds.markdown_blocks import ROOT, Block, blocks

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.task_sets.local_images import LocalImages
from heddle_dask.live.clusters.slurm.cluster_file import read_cluster_file
from heddle_dask.sim.clusters import cluster_of


def simulated_cluster(path: Path) -> None:
    """`heddle simulate --cluster FILE`, with the table that the page calls `my-engine.json`."""
    table = ROOT / "heddle_dask" / "cost" / "tables" / "tiny-agent-cpu.json"
    (path.parent / "my-engine.json").write_bytes(table.read_bytes())
    cluster_of(str(path))


# The word behind `toml` names the loader.
LOADERS: Mapping[str, Callable[[Path], object]] = {
    "cluster-file": read_cluster_file,
    "simulated-cluster": simulated_cluster,
    "images": lambda path: LocalImages(path, path.parent),
}


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.name)
def test_the_block_is_read(block: Block, tmp_path: Path) -> None:
    word = block.words[0] if block.words else ""
    assert word in LOADERS, f"say behind `toml` what it is for: {', '.join(LOADERS)}"
    path = tmp_path / "block.toml"
    path.write_text(block.text, encoding="utf-8")
    LOADERS[word](path)


@pytest.mark.parametrize("word", LOADERS)
def test_a_loader_refuses_an_unknown_key(word: str, tmp_path: Path) -> None:
    path = tmp_path / "block.toml"
    path.write_text("no-such-key = 1\n", encoding="utf-8")
    with pytest.raises(BadInput, match="no-such-key"):
        LOADERS[word](path)
