"""The files of the chunks of a column, and what is checked of them before zarr takes memory for their content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from zarr.codecs import BytesCodec, Crc32cCodec, VLenUTF8Codec, ZstdCodec
from zarr.storage import LocalStore

from heddle_dask.core.errors import one_line_of
from heddle_dask.core.plain_files import damaged, open_plain, read_plain

# Of the text of the thousands of rows of one chunk. The second bounds what a small file may become.
_MOST_TEXT_BYTES = 1 << 30
_TEXT_BYTES, _TEXT_PER_FILE_BYTE = 64 << 20, 4096
_ZSTD_MAGIC, _ZSTD_HEADER_BYTES = b"\x28\xb5\x2f\xfd", 18
_COUNT_BYTES = _CRC_BYTES = 4
# Runs of earlier versions have no files for chunks that hold zeros only.
_MOST_ABSENT = 1024


def has_our_codecs(array: zarr.Array[Any]) -> bool:
    """Whether a column is encoded as this package does it; other codecs may unpack to any size."""
    kinds = [type(codec) for codec in array.compressors]
    return (
        not array.filters
        and type(array.serializer) in (BytesCodec, VLenUTF8Codec)
        and kinds in ([ZstdCodec], [ZstdCodec, Crc32cCodec])
    )


def has_checksums(array: zarr.Array[Any]) -> bool:
    """Whether the chunks of this column end with a checksum and are all there; those of earlier versions do not."""
    return any(isinstance(codec, Crc32cCodec) for codec in array.compressors)


def check_chunks(array: zarr.Array[Any], start: int, stop: int) -> None:
    """Refuse (`BadInput`) files of chunks that are missing, no regular files, or would take too much memory."""
    absent = 0
    for file in chunk_files(array, start, stop):
        try:
            _check_chunk(array, file)
        except FileNotFoundError:
            absent += 1
            if has_checksums(array) or absent > _MOST_ABSENT:
                raise damaged(file, "it is missing") from None
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(file, getattr(error, "strerror", None) or one_line_of(error)) from None


def chunk_files(array: zarr.Array[Any], start: int, stop: int) -> Iterator[Path]:
    """The files of the chunks that hold these rows; none for an array that is not in a directory."""
    if isinstance(array.store, LocalStore):
        (chunk_rows,) = array.chunks
        for index in range(start // chunk_rows, -(-stop // chunk_rows)):
            yield array.store.root / array.path / array.metadata.encode_chunk_key((index,))


def _check_chunk(array: zarr.Array[Any], file: Path) -> None:
    with open_plain(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        unpacked = unpacked_bytes(opened.read(_ZSTD_HEADER_BYTES))
    is_text = isinstance(array.dtype, np.dtypes.StringDType)
    most = array.chunks[0] * array.dtype.itemsize
    if is_text:
        most = min(_MOST_TEXT_BYTES, _TEXT_BYTES + _TEXT_PER_FILE_BYTE * size)
    # Zstandard adds little to what it cannot compress (ZSTD_compressBound).
    if unpacked > most or size > unpacked + unpacked // 128 + 1024:
        raise ValueError(f"it says that it unpacks to {unpacked:,} bytes")
    if is_text:
        packed = read_plain(file, size)[: -_CRC_BYTES if has_checksums(array) else None]
        # The decoder takes memory for as many texts as the first number says.
        rows = int.from_bytes(bytes(memoryview(Zstd().decode(packed))[:_COUNT_BYTES]), "little")
        if rows != array.chunks[0]:
            raise ValueError(f"it says that it holds {rows:,} texts")


def unpacked_bytes(head: bytes) -> int:
    """Length of the content of a Zstandard frame, as its first bytes say it (RFC 8878, 3.1.1); `ValueError`: not."""
    if len(head) > len(_ZSTD_MAGIC) and head.startswith(_ZSTD_MAGIC):
        flags = head[4]
        is_single = flags >> 5 & 1
        width = (is_single, 2, 4, 8)[flags >> 6]
        at = 5 + (1 - is_single) + (0, 1, 2, 4)[flags & 3]
        field = head[at : at + width]
        if width and len(field) == width:
            return int.from_bytes(field, "little") + (256 if width == 2 else 0)
    raise ValueError("it is no chunk that heddle wrote")
