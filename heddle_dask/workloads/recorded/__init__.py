"""The recorded traces that ship with the package, and how a trace is named.

README.md of this directory gives their sources, licences and fields.
"""

from __future__ import annotations

from pathlib import Path

from heddle_dask.core.errors import BadInput

RECORDED = ("claude_code_transcripts", "claude_code_proxy", "tau_dialogues", "intercode")
"""Names of the traces; ``NAME.jsonl.gz`` in this directory is the file of each."""


def trace_file(name_or_file: str | Path) -> Path:
    """The file of a trace, given by the name of a recorded trace or by its path.

    A name of `RECORDED` always means the recorded trace, whatever files the working directory has, so that a command
    means the same everywhere. Everything else is a path. To read a local file with such a name, give its absolute path
    or add an extension.

    Raises
    ------
    BadInput
        It is a bare word (no directory, no extension) that is neither a recorded trace nor an existing path. Other
        paths are not checked here; reading them reports the error.
    """
    name = str(name_or_file)
    if name in RECORDED:
        return Path(__file__).with_name(f"{name}.jsonl.gz")
    path = Path(name_or_file)
    if path.name == name and not path.suffix and not path.exists():
        raise BadInput(f"{name!r} is neither a file nor a recorded trace; recorded traces are {', '.join(RECORDED)}")
    return path
