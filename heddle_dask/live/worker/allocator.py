"""Settings of the C library's memory allocator for workers."""

from __future__ import annotations

import ctypes

# Parameters of `mallopt` in glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# msgpack takes a buffer of 256 KiB for each message that it packs.
_MMAP_BYTES, _TRIM_BYTES = 1 << 20, 4 << 20


def keep_buffers() -> None:
    """Keep a few megabytes of freed memory; nothing where the C library is another than glibc.

    Nannies of Dask start workers with ``MALLOC_TRIM_THRESHOLD_``. Each buffer of more than 128 KiB is then mapped and
    unmapped: 13.6 in place of 0.7 us for a short message, and 28 us more in a busy worker.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
