"""The jobs in directories, globs, lists and URLs: the files of one job's ranks together.

::

    runs/a/rank0/context.json …          a capture                              ──▶ job runs/a.
    runs/b/rank0.json.gz, rank1.json.gz  names that differ in the rank alone    ──▶ job runs/b/rank0.json.gz.
    runs/c/host_41.json, host_42.json    their heads name ranks 0 and 1 of 2    ──▶ job runs/c/host_41.json.
    runs/d/x.json.gz, y.json.gz          neither                                ──▶ jobs runs/d/x.json.gz, …/y.json.gz
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracer.capture_layout import CONTEXT, SIDE_FILES, find_parts
from tracer.errors import TraceError
from tracer.files import SUFFIXES, FileKind, first_bytes, kind_of
from tracer.graph import NONE
from tracer.input_file import why_unopened
from tracer.lazy import fsspec
from tracer.ranks import rank_in_name

FORMAT = 2
"""Version of the rows. A change of it makes the next survey read all jobs again."""
_TRACE = re.compile(rb'"ph"|"traceEvents"|"schemaVersion"|"deviceProperties"|SQLite format 3')
"""What stands in the first bytes of a recording, and in those of few other files."""
_RANK = re.compile(r"(rank|worker|trainer|node)([-_.]?)[0-9]+", re.IGNORECASE)
_LONG_NUMBER = re.compile(r"[0-9]{6,}")
"""A time or a process's number, which each rank has another of."""
_RANK_FOLDER = re.compile(r"rank[-_]?([0-9]{1,8})$")
_IN_HEAD = {name: re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"' + name.encode() + rb'"\s*:\s*([0-9]{1,8})')
            for name in ("rank", "world_size")}


class Entry(NamedTuple):
    """A file: its path, bytes, and the time of its last change as the file system gives it."""

    path: str
    size: int
    changed: str


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job's files.

    Attributes:
        name: a capture's directory, or the first of its files.
        paths: what ``tracer.read_job`` is given.
        key: a digest of the files' paths, sizes and times of change; equal where nothing changed.
        files, size: number of its files, and their bytes.
    """

    name: str
    paths: tuple[str, ...]
    key: str
    files: int
    size: int


@dataclass
class Discovery:
    """What was found.

    Attributes:
        jobs: in order of name.
        unreadable: a sentence for each path that could not be looked at.
        left_out: a sentence for what is no recording.
    """

    jobs: list[FoundJob] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    """Directories of this machine all of whose files were looked at."""


def find_jobs(paths: Iterable[str]) -> Discovery:
    """Find the jobs in files, directory trees, globs and fsspec URLs of these; each file counts once.

    Links to directories are followed once. What cannot be looked at is named in ``Discovery`` and nothing is raised.
    """
    found = Discovery()
    folders: dict[str, dict[str, Entry]] = defaultdict(dict)
    captures: dict[str, None] = {}
    for path in paths:
        for entry in _remote(path, found) if "://" in path else _local(path, found, captures):
            folders[entry.path.rpartition("/")[0]][entry.path] = entry
    for folder in captures:
        try:
            found.jobs.append(_capture(folder))
        except OSError as error:
            found.unreadable.append(_unlisted(folder, error))
    for place, members in sorted(_together(folders).items()):
        found.jobs += _of_folder(place, members, found)
    found.jobs.sort(key=lambda job: job.name)
    return found


def _unlisted(path: str, error: OSError) -> str:
    return f"{path} could not be listed ({error.strerror or error}); check the path and its permissions."


def _local(path: str, found: Discovery, captures: dict[str, None]) -> Iterator[Entry]:
    """Yield files of a path on this machine; directories of captures are noted."""
    path = os.path.normpath(path) if path else path
    if "\0" in path:
        found.unreadable.append(f"{path!r} cannot be looked at (it holds a null character); check the path.")
    elif not os.path.lexists(path) and any(sign in path for sign in "*?["):
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            found.unreadable.append(f"No file matches {path}; check the pattern.")
        for match in matches:
            yield from _local(match, found, captures)
    elif os.path.isdir(path):
        yield from _tree(path, found, captures)
    else:
        try:
            yield _entry(path, os.stat(path))
        except OSError as error:
            found.unreadable.append(f"{path or 'The empty path'} cannot be looked at ({error.strerror or error}); "
                                    "check the path and its permissions.")


def _tree(root: str, found: Discovery, captures: dict[str, None]) -> Iterator[Entry]:
    """Yield the files of a directory and of those in it."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            own = os.stat(folder)
            if (own.st_dev, own.st_ino) in found.seen:
                if os.path.islink(folder):
                    found.left_out.append(f"{folder} is a link to a directory that was looked at already; it was not "
                                          "followed.")
                continue
            found.seen.add((own.st_dev, own.st_ino))
            found.listed.add(folder)
            with os.scandir(folder) as entries:
                members = sorted(entries, key=lambda entry: entry.name)
            if any(each.name == CONTEXT or _RANK_FOLDER.match(each.name) for each in members) and (
                    parts := find_parts(folder)):
                captures[folder] = None
                own_folders = {os.fspath(part.path) for part in parts}
                members = [] if folder in own_folders else [each for each in members if each.path not in own_folders]
        except OSError as error:
            found.unreadable.append(_unlisted(folder, error))
            continue
        for each in members:
            if each.name.startswith("."):
                continue
            try:
                if each.is_dir():
                    waiting.append(each.path)
                elif each.name.endswith(SUFFIXES) and each.name not in SIDE_FILES:
                    if each.is_file():
                        yield _entry(each.path, each.stat())
                    elif each.is_symlink():
                        found.left_out.append(f"{each.path} is a link to what is no file; it was left out.")
            except OSError as error:  # of a link to itself is_dir raises too
                found.unreadable.append(_unlisted(each.path, error))


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(path, found.st_size, str(found.st_mtime_ns))


def _remote(url: str, found: Discovery) -> Iterator[Entry]:
    """Yield files of a URL's tree or glob."""
    try:
        system, path = fsspec.core.url_to_fs(url)
        if system.isfile(path):
            infos = {path: system.info(path)}
        elif any(sign in path for sign in "*?["):
            infos = system.glob(path, detail=True)
        else:
            infos = system.find(path, detail=True)
    except Exception as error:  # a back end's own types: unknown protocol, missing package, no rights
        found.unreadable.append(why_unopened(url, error))
        return
    if not infos:
        found.unreadable.append(f"Nothing is at {url}; check the address.")
    for name, info in sorted(infos.items()):
        if info.get("type") == "file" and name.endswith(SUFFIXES) and name.rpartition("/")[2] not in SIDE_FILES:
            yield Entry(system.unstrip_protocol(name), int(info.get("size") or 0), _changed(info))


def _changed(info: dict[str, Any]) -> str:
    """Return what a file system says of a file's last change, or of its content."""
    names = ("ETag", "etag", "mtime", "LastModified", "created")
    return str(next((info[name] for name in names if info.get(name)), ""))


def _job(name: str, paths: Sequence[str], entries: Sequence[Entry]) -> FoundJob:
    said = "\n".join([str(FORMAT), *("\t".join((each.path, str(each.size), each.changed))
                                     for each in sorted(entries))])
    digest = hashlib.blake2b(said.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return FoundJob(name, tuple(paths), digest, len(entries), sum(each.size for each in entries))


def _capture(folder: str) -> FoundJob:
    """Return the job that ``tracer.capture`` wrote into a directory."""
    files: list[str] = []
    for part in find_parts(folder):
        files += map(os.fspath, (*part.windows, *([part.execution_trace] if part.execution_trace else ())))
        files += [path for name in SIDE_FILES if os.path.exists(path := os.path.join(part.path, name))]
    return _job(folder, [folder], [_entry(file, os.stat(file)) for file in files])


def _together(folders: dict[str, dict[str, Entry]]) -> dict[str, dict[str, list[Entry]]]:
    """Return files by directory and by directory of a rank within it, where they lie in such; else by ""."""
    found: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for folder, members in folders.items():
        above, _, name = folder.rpartition("/")
        place, within = (above, name) if _RANK_FOLDER.match(name) else (folder, "")
        found[place][within] += members.values()
    return found


class _Member(NamedTuple):
    entry: Entry
    kind: FileKind
    rank: int
    group: tuple[str, ...]
    """Equal for ranks of one job."""


def _of_folder(place: str, members: dict[str, list[Entry]], found: Discovery) -> Iterator[FoundJob]:
    """Yield the jobs of one directory, and name what is none."""
    traces, others, foreign = list[_Member](), list[_Member](), list[str]()
    for within, entries in members.items():
        for entry in entries:
            member = _looked_at(entry, within)
            if member is None:
                foreign.append(entry.path)
            else:
                (others if member.kind is FileKind.EXECUTION_TRACE else traces).append(member)
    jobs: dict[tuple[str, ...], list[_Member]] = defaultdict(list)
    times: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    for member in sorted(traces, key=lambda each: each.entry.path):
        # Of a rank that is there several times, the n-th file belongs to the n-th one of the others.
        of_rank = member.group, member.rank
        times[of_rank] += 1
        key = *member.group, f"{times[of_rank]:09}"
        jobs[key].append(member)
    for other in others:
        stem = other.group[-1].partition(".")[0]
        mine = [own for key, own in jobs.items() if len(jobs) == 1 or key[-2].partition(".")[0] == stem]
        if len(mine) == 1:
            mine[0].append(other)
        else:
            foreign.append(other.entry.path)
    whole = len(jobs) == 1 and not foreign and list(members) == [""] and place in found.listed
    for own in jobs.values():
        entries = [each.entry for each in own]
        # Its first file keeps a job's name when another job comes into the directory.
        yield _job(entries[0].path, [place] if whole and len(own) > 1 else [each.path for each in entries], entries)
    if foreign:
        which = f"{foreign[0]} is" if len(foreign) == 1 else f"{len(foreign):,} files in {place or '.'} (such as " \
            f"{foreign[0].rpartition('/')[2]}) are"
        found.left_out.append(f"{which} no profiler's trace with times; left out.")


def _looked_at(entry: Entry, within: str) -> _Member | None:
    """Return what a file is; ``None`` of one that is no recording."""
    name = entry.path.rpartition("/")[2]
    try:
        stored, head, _ = first_bytes(entry.path)
        kind = kind_of(entry.path, stored, head)
        cut = not stored or not head or (name.endswith(".gz") and head is stored)  # damaged: reading it says how
        sure = kind is not FileKind.TRACE or cut or _TRACE.search(head)
    except (TraceError, OSError):  # reading it says why
        head, kind, sure = b"", FileKind.TRACE, True
    if not sure:
        return None
    rank = rank_in_name(name)
    if rank == NONE and within:
        rank = int(_RANK_FOLDER.match(within).group(1))  # type: ignore[union-attr]
    if rank != NONE:
        return _Member(entry, kind, rank, ("named", _LONG_NUMBER.sub("#", _RANK.sub(r"\1\2#", name))))
    said = {key: pattern.search(head) for key, pattern in _IN_HEAD.items()}
    if all(said.values()):
        own, world = (int(match.group(1)) for match in said.values() if match)
        if world > 1:
            return _Member(entry, kind, own, ("head", str(world)))
    return _Member(entry, kind, NONE, ("alone", name))

