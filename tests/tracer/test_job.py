"""Several ranks as one job: pairing, order, and refusing what does not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from kineto_support import real, small_step, write

from tracer.errors import JobError, TraceError
from tracer.job import Job, rank_in_name, read_job

BASE = 1_700_000_000_000_000_000


def rank(folder: Path, number: int, size: int = 4, base: int = BASE, name: str = "", **metadata: object) -> Path:
    return write(folder, small_step(), name or f"rank{number}.json", baseTimeNanoseconds=base,
                 distributedInfo={"rank": number, "world_size": size, "backend": "nccl"}, **metadata)


def ranks(job: Job) -> list[int]:
    return [graph.meta.rank for graph in job.graphs]


def test_a_directory_a_glob_a_list_and_a_url(tmp_path: Path) -> None:
    for number in (2, 0, 10, 1):
        rank(tmp_path, number, size=11)
    (tmp_path / ".hidden.json").write_text("{}")
    (tmp_path / "readme.txt").write_text("no trace")
    for paths in (tmp_path, str(tmp_path), f"{tmp_path}/rank*.json", sorted(tmp_path.glob("rank*.json")),
                  f"file://{tmp_path}", f"file://{tmp_path}/*.json"):
        job = read_job(paths)
        assert ranks(job) == [0, 1, 2, 10] and job.world_size == 11
        assert job.missing_ranks == [3, 4, 5, 6, 7, 8, 9]
    assert any("7 of 11 ranks were not recorded" in note for note in job.notes)
    assert job.rank(10) is job.graphs[3]
    with pytest.raises(JobError, match="Rank 5"):
        job.rank(5)


def test_a_memory_file_system(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/runs/rank0.json", rank(tmp_path, 0, size=1).read_bytes())
    for url in ("memory://runs/rank0.json", "memory://runs", "memory://runs/*.json"):
        assert len(read_job(url).graphs) == 1
    with pytest.raises(TraceError):
        read_job("memory://runs/rank7.json")


def test_ranks_come_from_names_and_one_file_needs_none(tmp_path: Path) -> None:
    for number in (0, 1):
        path = write(tmp_path, small_step(), f"worker{number}_step_7.json")
    job = read_job(tmp_path)
    assert ranks(job) == [0, 1] and sum("taken from its name" in note for note in job.notes) == 2
    assert rank_in_name("/a/rank3/host.json") == -1 and rank_in_name("sampled_rank-12.json.gz") == 12
    job = read_job(path.rename(tmp_path / "trace.json"))
    assert len(job) == 1 and job.world_size == 1 and not job.missing_ranks


def test_an_empty_member_is_left_out_and_named(tmp_path: Path) -> None:
    rank(tmp_path, 0, size=2)
    (tmp_path / "rank1.json").write_bytes(b"")
    for paths in (tmp_path, [tmp_path / "rank0.json", tmp_path / "rank1.json"]):
        job = read_job(paths)
        assert ranks(job) == [0] and job.missing_ranks == [1]
        assert any("rank1.json is empty (0 bytes)" in note for note in job.notes)
    with pytest.raises(TraceError, match="empty"):
        read_job(tmp_path / "rank1.json")


def test_a_member_that_is_no_trace_is_skipped_in_a_directory_but_not_by_name(tmp_path: Path) -> None:
    rank(tmp_path, 0, size=1)
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    assert any("config.json" in note for note in read_job(tmp_path).notes)
    with pytest.raises(TraceError, match=r"config.json"):
        read_job([tmp_path / "rank0.json", tmp_path / "config.json"])


@pytest.mark.parametrize(("paths", "says"), [
    ([], "No trace was named"), ("nowhere.json", "does not exist"), ("nowhere/*.json", "No file matches"),
    ("above/run", "no trace file"), ("above", "1 subdirectories")])
def test_nothing_to_read(paths: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "above" / "run").mkdir(parents=True)
    with pytest.raises(TraceError, match=says):
        read_job(paths)


def test_two_captures_are_not_one_job() -> None:
    captures = [str(Path(__file__).parents[2] / "traces" / name) for name in ("llama-cpu", "bert-cpu")]
    with pytest.raises(TraceError, match=r"cannot be read together with .*bert-cpu.*--also .*bert-cpu:batch=32"):
        read_job(captures)


@pytest.mark.parametrize(("first", "second", "says"), [
    ({"number": 0}, {"number": 0, "name": "other.json"}, "Rank 0 is there twice"),
    ({"number": 0}, {"number": 1, "size": 8}, "of a job with 4 ranks"),
    ({"number": 0}, {"number": 1, "base": BASE + 3600 * 10**9}, "3,600 s after"),
    ({"number": 0}, {"name": "rank5.json"}, "only 4 ranks"),
    ({"name": "a.json"}, {"name": "b.json"}, "record no rank")])
def test_files_that_are_not_one_job(tmp_path: Path, first: Any, second: Any, says: str) -> None:
    for given in (first, second):
        if "number" in given:
            rank(tmp_path, **given)
        else:
            write(tmp_path, small_step(), **given)
    with pytest.raises(JobError, match=says):
        read_job(tmp_path)


def test_windows_as_far_apart_as_in_the_recording_of_eight_ranks_are_one_job(tmp_path: Path) -> None:
    rank(tmp_path, 0)
    rank(tmp_path, 1, base=BASE + 7_500_000)
    assert ranks(read_job(tmp_path)) == [0, 1]


def test_progress_counts_all_files(tmp_path: Path) -> None:
    sizes = [rank(tmp_path, number).stat().st_size for number in range(4)]
    seen: list[tuple[int, int]] = []
    read_job(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {sum(sizes)}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == sum(sizes)


@pytest.mark.real_traces
def test_the_first_of_several_execution_traces_is_joined() -> None:
    job = read_job(real("resnet50-ddp-2xA100"))
    assert job.graphs[0].meta.et_schema.startswith("1.0.3") and job.missing_ranks == [1]
    assert any("schema-1.1.1" in note for note in job.notes)


@pytest.mark.real_traces
def test_dlrm_ranks_and_their_execution_traces() -> None:
    job = read_job(real("dlrm-8xV100-2023"))
    assert ranks(job) == list(range(8)) and job.world_size == 8 and not job.missing_ranks
    starts = [graph.meta.base_time_ns for graph in job.graphs]
    assert 0 < max(starts) - min(starts) <= 7_600_000
    for graph in job.graphs:
        assert graph.meta.et_candidates > 1600 and graph.meta.et_joined >= 0.999 * graph.meta.et_candidates
