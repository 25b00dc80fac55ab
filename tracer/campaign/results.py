"""A campaign's directory: an index and one line for each ended item. Each file is replaced as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from tracer.campaign.items import Item
from tracer.campaign.plan import CampaignBusyError, CampaignError
from tracer.input_file import DecodeError, from_json, read_input
from tracer.output_file import LOCK, Busy, DirectoryLock

INDEX = "campaign.json"
LINES = "items.jsonl"
SCRATCH = ".work"
MARK = ".foretrace"
"""File that marks a scratch directory made by a run, which may remove it."""
VERSION = 1  # of the format; rises when an older reader would misread it

Status = Literal["ok", "unsupported", "failed"]
Content = Literal["graph", "summary", "times", "kernels", "none"]


class ItemResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of one item: a line of ``items.jsonl``.

    Attributes:
        id, kind, name, settings, split: The item's values; in a rehearsal ``settings`` are the tiny ones.
        status: "ok"; "unsupported" if this device or torch cannot do it; "failed".
        reason: One sentence why, if not "ok".
        seconds: Time of the item, including its files.
        session: Index of its session in the campaign's index.
        file: Its file below the campaign's directory; a micro-benchmark's rows are in its family's.
        content: "graph" (one-file form), "summary" (operation and kernel table), "times" (no file), "kernels".
        unprofiled_step_ns, profiled_step_ns: Every step's time, nanoseconds.
        median_ns, spread: Median, and interquartile range over median, of the unprofiled steps; for a micro-benchmark,
            of its warm variant.
        profiler_slowdown: Median profiled over median unprofiled step.
        peak_memory: Bytes: "allocated_bytes", "reserved_bytes" of the device, "host_bytes" resident.
        parameters: Number of the model's trainable parameters.
        clocks: Clocks (MHz) and related values right after the unprofiled steps, named as by nvidia-smi.
        notes: Sentences of the capture.
    """

    id: str
    kind: Literal["workload", "kernel"]
    name: str
    settings: dict[str, Any]
    split: Literal["fit", "held-out"]
    status: Status
    reason: str = ""
    seconds: float = 0.0
    session: int = 0
    file: str = ""
    content: Content = "none"
    unprofiled_step_ns: list[int] = []
    profiled_step_ns: list[int] = []
    median_ns: int | None = None
    spread: float | None = None
    profiler_slowdown: float | None = None
    peak_memory: dict[str, int] = {}
    parameters: int | None = None
    clocks: dict[str, str] = {}
    notes: list[str] = []


def ended(item: Item, status: Status, **values: Any) -> ItemResult:
    """Return the result of an item that ended with a status."""
    return ItemResult(id=item.id, kind=item.kind, name=item.name, settings=item.settings, split=item.split,
                      status=status, **values)


class Index(msgspec.Struct, kw_only=True):
    """The content of ``campaign.json``. ``sessions`` are runs, each with machine and software as in a capture."""

    version: int = VERSION
    plan: str = ""
    description: str = ""
    rehearsal: bool = False
    sessions: list[dict[str, Any]] = []
    items: int = 0
    ok: int = 0
    unsupported: int = 0
    failed: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        for session in self.sessions:
            for part in ("hardware", "software"):
                if not isinstance(session.get(part, {}), dict):
                    raise ValueError(f"a session's {part} is no table of names and values")


class Results:
    """Reads and writes a campaign's directory. No file is ever incomplete: files are made elsewhere and renamed.

    Attributes:
        path: the directory.
        index: the content of ``campaign.json``.
        lines: the result of each item, by its id.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = Path(out)
        self.index = Index()
        self.lines: dict[str, ItemResult] = {}
        self._lock: DirectoryLock | None = None

    @classmethod
    def read(cls, out: str | os.PathLike[str]) -> Results:
        """Return a directory's results; nothing is changed.

        Raises:
            CampaignError: it is no campaign's directory, or a file is damaged or of a newer version.
        """
        results = cls(out)
        if not (results.path / INDEX).is_file():
            raise CampaignError(f"{out} holds no campaign (no {INDEX}); name the directory given to --out.")
        results._load()
        return results

    @property
    def scratch(self) -> Path:
        """Return the scratch directory, where files are made."""
        return self.path / SCRATCH

    def open(self, plan: str, description: str, *, resume: bool, rehearsal: bool) -> None:
        """Prepare the directory for a run: check it, read its results, and remove the leftovers of a killed run.

        Nothing in it is changed before it is known to be empty or a campaign's.

        Raises:
            CampaignError: it cannot be written, another run uses it, or its content belongs to another run.
        """
        try:
            if os.path.lexists(self.path):
                self._adopt(resume, rehearsal)
            self._lock = DirectoryLock(self.path)
            self._adopt(resume, rehearsal)  # as the previous holder of the lock left it
            self._clear_scratch()
            self.scratch.mkdir()
            (self.scratch / MARK).touch()
        except Busy:
            raise CampaignBusyError(f"Another campaign is writing to {self.path}; wait for it, or choose another "
                                    "directory.") from None
        except OSError as error:
            self.close()
            raise CampaignError(f"The campaign cannot be written to {self.path} ({error.strerror or error}): choose a "
                                "directory that can be written.") from error
        except BaseException:
            self.close()
            raise
        self.index.plan, self.index.description, self.index.rehearsal = plan, description, rehearsal

    def _adopt(self, resume: bool, rehearsal: bool) -> None:
        """Read the directory. Raises ``CampaignError`` if it is not for this run; nothing is changed."""
        if os.path.lexists(self.path / INDEX):
            if not resume:
                raise CampaignError(f"{self.path} already holds a campaign; add --resume to go on with it, or choose "
                                    "another directory.")
            self._load()
            if self.index.rehearsal != rehearsal:
                one, other = ("a rehearsal", "none") if self.index.rehearsal else ("no rehearsal", "one")
                raise CampaignError(f"{self.path} holds {one} and this is {other}: they do not mix, so choose another "
                                    "directory.")
            for name, line in list(self.lines.items()):
                if line.content in ("graph", "summary") and not (self.path / line.file).is_file():
                    del self.lines[name]
        else:
            self._check_empty()

    def _check_empty(self) -> None:
        """Raise ``CampaignError`` for a directory of other things, or for results without their index."""
        ours = {SCRATCH} if self._has_own_scratch() else set()
        others = sorted({path.name for path in self.path.iterdir()} - ours - {LOCK})
        if LINES in others:
            raise CampaignError(f"{self.path} holds results ({LINES}) whose {INDEX} is gone, so that what measured "
                                f"them is not known; put {INDEX} back, or choose another directory.")
        if others:
            raise CampaignError(f"{self.path} holds other files ({', '.join(others[:3])}) and no campaign; choose an "
                                "empty or a new directory.")

    def close(self) -> None:
        """Remove everything except results, and a directory without results. Safe to repeat."""
        lock, self._lock = self._lock, None
        if lock is not None:  # without it nothing here is this run's
            with suppress(OSError):
                if self._has_own_scratch():
                    self._clear_scratch()
            lock.release()

    def begin_session(self, context: dict[str, Any]) -> int:
        """Note the machine and software of this run, and return the session's number."""
        self.index.sessions.append(context)
        self.save([])
        return len(self.index.sessions) - 1

    def save(self, results: Iterable[ItemResult]) -> None:
        """Add results and write lines and index, each atomically.

        Raises:
            CampaignError: they cannot be written.
        """
        for result in results:
            self.lines[result.id] = result
        encoder = msgspec.json.Encoder()
        try:
            self._replace(LINES, b"".join(encoder.encode(line) + b"\n" for line in self.lines.values()))
            self._count()
            self._replace(INDEX, msgspec.json.format(encoder.encode(self.index), indent=1) + b"\n")
        except OSError as error:
            raise CampaignError(f"Results cannot be written to {self.path} ({error.strerror or error}): free space, "
                                "and go on with --resume.") from error

    def adopt_file(self, source: Path, folder: str, name: str) -> str:
        """Move a finished file out of the scratch directory, and return its path below the campaign's directory."""
        (self.path / folder).mkdir(exist_ok=True)
        os.replace(source, self.path / folder / name)
        return f"{folder}/{name}"

    def bytes_used(self) -> int:
        """Return the bytes of all files outside the scratch directory."""
        used = 0
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if name != SCRATCH]
            used += sum(os.stat(os.path.join(folder, name)).st_size for name in names)
        return used

    def graph_bytes(self) -> int:
        """Return the bytes of the full graphs."""
        return sum(path.stat().st_size for path in (self.path / "graphs").glob("*"))

    def _count(self) -> None:
        statuses = [line.status for line in self.lines.values()]
        self.index.items, self.index.ok = len(statuses), statuses.count("ok")
        self.index.unsupported, self.index.failed = statuses.count("unsupported"), statuses.count("failed")
        self.index.bytes = self.bytes_used()

    def _load(self) -> None:
        try:
            text = read_input(self.path / INDEX)
            found = from_json(text, dict[str, Any])
            if isinstance(found.get("version"), int) and found["version"] > VERSION:
                raise CampaignError(f"{self.path} was written by a newer foretrace (version {found['version']} of the "
                                    f"directory; this one knows {VERSION}); update foretrace.")
            if not set(Index.__struct_fields__) <= found.keys():
                raise CampaignError(f"The {INDEX} in {self.path} was not written by foretrace; choose another "
                                    "directory.")
            self.index = from_json(text, Index)
            lines = self.path / LINES
            self.lines = {}
            for text in read_input(lines).splitlines() if os.path.lexists(lines) else []:
                line = from_json(text, ItemResult)
                self.lines[line.id] = line
        except (OSError, DecodeError) as error:
            raise CampaignError(f"The campaign in {self.path} cannot be read ({error}); its {INDEX} or {LINES} was "
                                "changed or damaged.") from error

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.scratch / name
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)

    def _clear_scratch(self) -> None:
        if not self.scratch.exists():
            return
        mark = self.scratch / MARK
        for path in self.scratch.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != mark:
                path.unlink()
        mark.unlink(missing_ok=True)  # last: if the run is killed, the directory is still known to be a run's
        self.scratch.rmdir()

    def _has_own_scratch(self) -> bool:
        """Return whether the scratch directory is empty or was made by a run."""
        if self.scratch.is_symlink() or not self.scratch.is_dir():
            return False
        return (self.scratch / MARK).is_file() or not any(self.scratch.iterdir())
