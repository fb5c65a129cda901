"""The files of one session: its journal and store, or none where trajectories are kept in memory only."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from heddle_dask.live.driver.files.resume import unfinished
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.records.journal_lines import JournalRecord
from heddle_dask.records.trajectory import TrajectoryRecord

if TYPE_CHECKING:
    from heddle_dask.live.driver.files.run_writer import RunWriter

BATCH_FACTS = (
    *("environment", "model", "tokenizer", "weights", "sampling", "limits", "chat_template_kwargs"),
    *("engine", "strategy", "overrides", "samples", "seed", "rewards", "services", "service_models"),
    *("task_list", "sandbox", "heddle_dask"),
)
"""What of a session's metadata is stored for each of its batches: another session may append with other values."""


GROUP_LINES = frozenset({"group-opened", "group-closed", "groups-evicted", "task-quarantined"})
"""Kinds of journal records about the groups of a stream; they are kept as long as the journal."""


class RunFiles:
    def __init__(
        self,
        output: Output | None,  # None: there are no files, and every method does nothing
        # Metadata of the session, asked for when the files are opened.
        describe: Callable[[], Mapping[str, Any]],
        # Takes one line for each thing that the user should know.
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.writer: RunWriter | None = None  # None before `open`, and where there are no files
        self._note = note
        self._output = output
        self._describe = describe
        self._early_lines: list[Any] = []
        self._continued = False

    @property
    def replaces_a_run(self) -> bool:
        """Whether `open` destroys an older run: then it comes last, when everything else has succeeded."""
        return self._output is not None and self._output.mode == "overwrite"

    def open(self) -> None:
        """Open journal and store; control lines that came before are written first.

        Raises
        ------
        BadInput
            As `RunWriter`.
        """
        if self._output is None:
            return
        description = {**self._describe(), **self._output.metadata}
        # zarr is loaded by those that read or write a store.
        from heddle_dask.live.driver.files.run_writer import RunWriter

        accepts = self._output.accept_changes
        self.writer = RunWriter(self._output.path, self._output.mode, description, accepts=accepts)
        for change in self.writer.accepted:
            self._note(f"note: {self._output.path} goes on, though it was made with {change}")
        self.writer.journal("session", description)
        if self._early_lines:
            self.keep_lines(self._early_lines)
            self._early_lines = []

    def journal(self, kind: str, body: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.journal(kind, body)

    def keep_lines(self, lines: list[Any]) -> None:
        """Journal lines of the control channel, or hold them until the journal is open."""
        if self.writer is not None:
            self.writer.journal("control", {"lines": lines})
        elif self._output is not None:
            self._early_lines += lines

    def begin_batch(self) -> int | None:
        """Number of the batch that begins, over all sessions that wrote here; None where there are no files.

        A resumed run first continues its last batch.
        """
        if self.writer is None:
            return None
        description = {**self._describe(), **(self._output.metadata if self._output is not None else {})}
        facts = {name: description[name] for name in BATCH_FACTS if name in description}
        continues = self._resumes and not self._continued and self.writer.batches
        self._continued = True
        return self.writer.continue_batch(facts) if continues else self.writer.begin_batch(facts)

    def unfinished(self, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
        """The attempts still to make: of a resumed run those that the store lacks, else all."""
        if self.writer is None or not self._resumes:
            return attempts
        return unfinished(attempts, self.writer, self._note)

    def group_lines(self) -> list[JournalRecord]:
        """What earlier sessions of a resumed run journalled about groups, in order; else nothing."""
        if self.writer is None or not self._resumes:
            return []
        return list(self.writer.lines(GROUP_LINES))

    def stored_records(self, names: Collection[str]) -> list[TrajectoryRecord]:
        """Those of these trajectories that the store of a resumed run has, in its order."""
        if self.writer is None or not self._resumes or not names:
            return []
        from heddle_dask.records.reader import RunReader

        reader = RunReader(self.writer.out)
        ids = reader.column("trajectories/id").tolist()
        return [reader.trajectory(row) for row, name in enumerate(ids) if str(name) in names]

    @property
    def stored(self) -> int:
        """Trajectories in the store; 0 where there are no files."""
        return 0 if self.writer is None else self.writer.stored

    def engines_answer(self, facts: Mapping[str, Any]) -> None:
        """Record what the session has learned from its engines.

        Raises
        ------
        BadInput
            As `RunWriter.learned`.
        """
        if self.writer is not None:
            self.writer.learned(facts)

    async def store(self) -> None:
        """Bring everything finished into the store."""
        if self.writer is not None:
            await self.writer.store()

    def discard_if_new(self) -> None:
        """Remove files that this session made, before a trajectory has begun: the same rollout may be run again."""
        if self.writer is not None and self._output is not None and self._output.mode == "create":
            self.writer.discard()
            self.writer = None

    async def close(self) -> None:
        if self.writer is not None:
            await self.writer.close()

    @property
    def _resumes(self) -> bool:
        return self._output is not None and self._output.mode == "resume"


def software_versions() -> dict[str, str]:
    """Versions of what makes a run, for its metadata."""
    return {
        "heddle_dask": version("heddle-dask"),
        "distributed": version("distributed"),
        "python": platform.python_version(),
    }
