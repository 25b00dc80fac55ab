"""Nothing of others is read without end, written through, or removed."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from disk_support import small_disk
from kineto_support import op, write

from tracer.campaign.plan import CampaignError
from tracer.campaign.results import INDEX, MARK, SCRATCH, Results
from tracer.capture.output import PartWriter
from tracer.capture_layout import find_parts
from tracer.errors import CaptureError, ForetraceError
from tracer.input_file import NotAFile, open_input, read_input
from tracer.job import read_job
from tracer.output_file import LOCK, Busy, DirectoryLock, whole_file
from tracer.table_input import read_parquet


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(NotAFile, match="pipe or a device"):
            open_input(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_input(tmp_path)
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_input(tmp_path / "link") == b"content"
    for given in ("", ["trace.json", ""]):
        with pytest.raises(ForetraceError, match="name of a trace is empty"):
            read_job(given)


def _capture(folder: Path, name: str, what: str) -> Path:
    """A capture with a trace of one operation, but a file of another kind under a name; its part."""
    part = folder / "cap" / "rank0"
    part.mkdir(parents=True)
    write(part, [op("aten::add", 1, 5)], "kineto.json.gz")
    (part / "context.json").write_text('{"complete": true}')
    (folder / "secret").write_bytes(b"root:hunter2\xff:0:0\n" * 20)
    (part / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(part / name)
    elif what == "directory":
        (part / name).mkdir()
    else:
        (part / name).symlink_to({"device": "/dev/zero", "secret": folder / "secret", "nothing": "gone"}[what])
    return part


@pytest.mark.parametrize(("name", "what", "says"), [
    ("kineto.json.gz", "pipe", r"rank0/kineto\.json\.gz is a pipe or a device"),
    ("kineto.json.gz", "device", "is a link to a pipe or a device"), ("kineto.json.gz", "secret", "kineto"),
    ("graph.foretrace", "pipe", "is a pipe or a device"),
    ("graph.foretrace", "device", "is a link to a pipe or a device"),
    ("graph.foretrace", "secret", "graph")])
def test_a_capture_without_its_only_trace_says_what_lies_there_and_quotes_nothing(
        name: str, what: str, says: str, tmp_path: Path) -> None:
    part = _capture(tmp_path, name, what)
    if name == "graph.foretrace":
        (part / "kineto.json.gz").unlink()
    with pytest.raises(ForetraceError, match=says) as refused:
        read_job(tmp_path / "cap")
    assert "hunter2" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["graph.foretrace", "graph-1.foretrace", "context.json", "collectives.json",
                                  "et.json.gz"])
@pytest.mark.parametrize("what", ["pipe", "device", "secret", "nothing", "directory"])
def test_a_capture_is_of_use_without_what_is_no_file_of_its_own(name: str, what: str, tmp_path: Path) -> None:
    _capture(tmp_path, name, what)
    job = read_job(tmp_path / "cap")
    said = " ".join([*job.notes, *(note for graph in job.graphs for note in graph.meta.loss.notes)])
    assert len(job.graphs[0].ops) == 1
    assert "hunter2" not in said and len(said) < 1000
    # A second window that is a link to a file is looked at only when it is asked for.
    assert name in said or (name, what) == ("graph-1.foretrace", "secret")


@pytest.mark.parametrize(("columns", "rows"), [
    ({"m": 16, "device": "cpu"}, 5_000_000), ({"device": "x" * 50_000}, 2_000)])
def test_a_table_of_few_bytes_is_no_table_of_very_many_cells(columns: dict[str, object], rows: int,
                                                             tmp_path: Path) -> None:
    few, many = (pyarrow.table({name: pyarrow.repeat(value, count) for name, value in columns.items()})
                 for count in (3, rows))
    for table, wrong in ((few, False), (many, True)):
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet", compression="zstd")
        with open_input(tmp_path / "t.parquet") as stream:
            if wrong:
                with pytest.raises(pyarrow.ArrowException, match="rows"):
                    read_parquet(stream)
            else:
                assert read_parquet(stream).equals(few)


@pytest.mark.parametrize("disk", ["/tmp", "/dev/shm"])
def test_an_output_replaces_a_file_but_not_through_a_link(disk: str) -> None:
    if not os.access(disk, os.W_OK):
        pytest.skip(f"there is no {disk}")
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        victim, link = Path(folder) / "victim", Path(folder) / "out.json"
        victim.write_text("keep")
        link.symlink_to(victim)
        with pytest.raises(ForetraceError, match="is a link") as error, whole_file(link) as stream:
            stream.write(b"new")
        assert "what was there is unchanged" in str(error.value)
        assert victim.read_text() == "keep" and link.is_symlink()
        victim.chmod(0o600)
        with pytest.raises(KeyboardInterrupt), whole_file(victim) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt
        assert victim.read_text() == "keep"
        with whole_file(victim) as stream:
            stream.write(b"new")
        assert victim.read_text() == "new" and stat.S_IMODE(victim.stat().st_mode) == 0o600
        assert sorted(os.listdir(folder)) == ["out.json", "victim"]
    with whole_file("/dev/null") as stream:  # standard output is no link of others
        stream.write(b"gone")


def test_what_a_killed_run_left_is_removed_by_the_next_one_of_the_same_file(tmp_path: Path) -> None:
    def killed(name: str) -> Path:
        child = os.fork()
        if not child:
            with whole_file(tmp_path / name):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        [left] = tmp_path.glob(f".{name}.*.tmp")
        return left

    other, left = killed("other"), killed("out")
    host, _, rest = left.name.removeprefix(".out.").partition("-")
    elsewhere = [tmp_path / f".out.{int(host, 16) ^ 1:08x}-{rest[:-5]}{digit}.tmp" for digit in "01"]
    running = tmp_path / f".out.{host}-{os.getpid()}-{rest.partition('-')[2]}"
    for path in (*elsewhere, running):
        path.touch()
    os.utime(elsewhere[0], (0, 0))
    (tmp_path / ".out.mine.tmp").touch()
    with whole_file(tmp_path / "out") as stream:
        stream.write(b"whole")
    assert {*tmp_path.iterdir()} == {tmp_path / "out", tmp_path / ".out.mine.tmp", other, running, elsewhere[1]}


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), lambda path: path.symlink_to("victim"),
                                  os.mkfifo])
def test_a_lock_of_others_is_left(make: object, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    make(tmp_path / LOCK)  # type: ignore[operator]
    with pytest.raises(OSError):
        DirectoryLock(tmp_path)
    assert victim.read_text() == "keep" and os.path.lexists(tmp_path / LOCK)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b", "file:///tmp/run"])
def test_a_url_is_no_directory_to_lock(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="it is a URL"):
        DirectoryLock(Path(url))
    with pytest.raises(CampaignError, match=r"cannot be written to .* \(it is a URL, and this is"):
        Results(url).open("calibration", "", resume=False, rehearsal=False)
    assert not os.listdir(tmp_path)


def test_a_lock_is_gone_afterwards_and_so_is_its_directory_if_nothing_was_written(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and issubclass(Busy, Exception)
    (tmp_path / "a" / "kept").touch()
    lock.release()
    assert os.listdir(tmp_path / "a") == ["kept"]
    (tmp_path / "a" / "mine").mkdir()
    DirectoryLock(tmp_path / "a" / "mine").release()
    assert (tmp_path / "a" / "mine").is_dir() and os.listdir(tmp_path / "a" / "mine") == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        DirectoryLock(tmp_path / "file" / "below")


def test_a_directory_that_another_process_removes_meanwhile_is_made_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = tmp_path / "a", os.open
    removed: list[bool] = []

    def open_late(path: Any, *arguments: Any) -> int:
        if not removed:
            removed.append(True)
            folder.rmdir()
        return opened(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("tracer.output_file.os.open", open_late)
        lock = DirectoryLock(folder)
    assert removed and (folder / LOCK).is_file()
    lock.release()
    assert not folder.exists()


def _open(folder: Path, *, resume: bool = False, rehearsal: bool = False) -> Results:
    results = Results(folder)
    results.open("plan", "", resume=resume, rehearsal=rehearsal)
    return results


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("other", ["notes.txt", None, INDEX])
def test_a_refused_campaign_touches_nothing(other: str | None, tmp_path: Path) -> None:
    (tmp_path / SCRATCH).mkdir()
    (tmp_path / SCRATCH / "precious").write_text("work")
    (tmp_path / LOCK).write_text("not foretrace's")
    if other is not None:
        (tmp_path / other).write_text('{"name": "a campaign of another kind"}')
    before = _content(tmp_path)
    for resume in (False, True):
        with pytest.raises(CampaignError):
            _open(tmp_path, resume=resume)
        assert _content(tmp_path) == before


def test_a_campaign_refused_for_its_options_keeps_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / SCRATCH / "item").mkdir(parents=True)
    (tmp_path / SCRATCH / MARK).touch()
    (tmp_path / LOCK).touch()
    _open(tmp_path).close()  # killed before it wrote anything: taken up
    assert os.listdir(tmp_path) == []
    results = _open(tmp_path)
    results.save([])
    (results.scratch / "half").write_text("left by a kill")
    assert results._lock is not None
    results._lock.release()
    before = _content(tmp_path)
    for resume, rehearsal in ((False, False), (True, True)):
        with pytest.raises(CampaignError):
            _open(tmp_path, resume=resume, rehearsal=rehearsal)
        assert _content(tmp_path) == before
    _open(tmp_path, resume=True).close()  # ours: a run that goes on clears it
    assert sorted(_content(tmp_path)) == [INDEX, "items.jsonl"]


def test_a_capture_replaces_neither_through_links_nor_what_no_capture_wrote(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "context.json").write_text('{"complete": true}')
    out = tmp_path / "runs"
    out.mkdir()
    (out / "rank0").symlink_to(victim)
    with pytest.raises(CaptureError, match="is a link"):
        PartWriter(out, 0, replace=True)
    (out / "rank0").unlink()
    (out / "rank0").mkdir()
    mine = out / "rank0" / "context.json"
    mine.write_text('{"my": "own file"}')
    (out / "rank0" / ".scratch-mine").mkdir()
    with pytest.raises(CaptureError, match="which no capture of foretrace wrote"):
        PartWriter(out, 0, replace=True)
    assert mine.read_text() == '{"my": "own file"}' and (out / "rank0" / ".scratch-mine").is_dir()
    mine.unlink()
    (out / "rank1").symlink_to(victim)  # of a larger job, which this one would replace
    assert [part.rank for part in find_parts(out)] == [1]
    part = PartWriter(out, 0, replace=True)
    part.write_json("context.json", {"complete": False})
    part.close()
    assert os.listdir(victim) == ["context.json"] and not os.path.lexists(out / "rank1")


def test_a_full_disk_names_the_file_and_what_was_left(tmp_path: Path) -> None:
    with small_disk(tmp_path, "100k") as disk:
        target = disk / "out.json"
        for before, left in ((None, "nothing of it was left"), (b"old", "what was there is unchanged")):
            if before is not None:
                target.write_bytes(before)
            with pytest.raises(ForetraceError) as error, whole_file(target) as stream:
                stream.write(bytes(1 << 20))
            said = str(error.value)
            assert str(target) in said and "No space left" in said and "free there" in said and left in said
            assert os.listdir(disk) == ([] if before is None else ["out.json"])
