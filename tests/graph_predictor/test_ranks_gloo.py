"""Two ranks over gloo, one with a batch four times as large: the reports name it, and what it computes longer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forks import run_ranks
from recordings import recorded_until, worst_closing
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.comm.recorded_calls import with_host_collectives
from graph_predictor.comm.report import communication_report
from graph_predictor.prediction.replay import replay
from step_views.reports.ranks.report import JobReport, rank_report
from step_views.reports.ranks.times import recorded_times
from tracer.graph import NONE
from tracer.job import Job, read_job

CLOSING = 0.03
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tracer

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU()]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(256 * (4 if dist.get_rank() == 1 else 1), 256)
with tracer.capture(sys.argv[1], steps=10, warmup=3, timed=2, execution_trace="none") as capture:
    while not capture.finished:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        capture.step()
dist.barrier()
dist.destroy_process_group()
"""


def replayed(job: Job) -> JobReport:
    """What is told of a recorded job's ranks."""
    return rank_report(recorded_times(replay([with_host_collectives(graph) for graph in job.graphs], residuals=True)))


def rank_1_is_named(found: JobReport) -> None:
    """Three quarters of the other rank's products are missing: they are most of what rank 1 computes longer.

    Steps on a busy machine differ: a stalled one may put any operation among the names, make a small one as large as a
    product, or the other rank the later one.
    """
    first, second = found.ranks
    assert second.arrivals.last > first.arrivals.last
    assert first.waiting_ns > second.waiting_ns
    assert second.busy_ns > first.busy_ns
    assert found.late is not None
    assert found.late.rank == 1 and found.steps < 2 * found.late.steps <= 2 * found.steps
    more = dict(found.late.operations)
    assert list(more.values()) == sorted(more.values(), reverse=True)
    assert {"aten::mm", "aten::addmm"} & set(list(more)[:3])
    assert found.late.more_ns > max(more.get("aten::addmm", 0.0), more.get("aten::mm", 0.0)) > 0


def the_path_names_products(found: JobReport) -> None:
    """Each of the two may be less than an operation that a stall fell into; together they are most of what is
    computed."""
    spent: dict[str, int] = {}
    for part in (part for stretch in found.path for part in stretch.parts):
        spent[part.operation] = spent.get(part.operation, 0) + part.time_ns
    assert sum(spent.values()) in [max(window.length_ns for window in step) for step in found.times.windows]
    products = spent.pop("aten::mm", 0) + spent.pop("aten::addmm", 0)
    assert products > max(time for name, time in spent.items() if name.startswith("aten::"))


def traffic_has_a_straggler(job: Job) -> None:
    (row,) = communication_report([with_host_collectives(graph) for graph in job.graphs]).traffic
    # A thread that does not get the processor for long may have ended a collective too late for it to be matched.
    assert 0.8 * row.count <= row.matched * 2 <= row.count
    assert 0 < row.exposed_ns <= row.kernel_ns
    assert row.straggler is not None
    assert row.straggler[0] == 1


def as_recorded(job: Job) -> None:
    found = replayed(job)
    for row in found.ranks:
        assert row.busy_ns + row.exposed_ns + row.waiting_ns + row.bubble_ns + row.idle_ns == row.step_ns
    assert worst_closing(job) <= CLOSING
    rank_1_is_named(found)
    the_path_names_products(found)
    traffic_has_a_straggler(job)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded job. On a busy machine steps may differ by more than a batch four times as large makes, and then it is
    recorded again: what is wrong in the reports, and not in a recording, is so each time."""
    torch = pytest.importorskip("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("gloo")
    (folder / "train.py").write_text(SCRIPT)
    return recorded_until(lambda path: as_recorded(read_job(path)),
                          lambda path: run_ranks(2, folder / "train.py", path), folder)


@pytest.fixture(scope="module")
def job(path: Path) -> Job:
    return read_job(path)


def test_every_collective_has_the_range_that_did_it(job: Job) -> None:
    for graph in map(with_host_collectives, job.graphs):
        assert len(graph.collectives) == len(graph.kernels) > 0
        assert (graph.collectives.kernel >= 0).all()
        asked = graph.ops.start_ns[graph.kernels.op]
        assert (graph.kernels.start_ns >= asked).all()


def test_the_reports_name_the_rank_with_the_larger_batch_and_what_it_computes(job: Job) -> None:
    as_recorded(job)


def test_what_cannot_be_known_has_no_column(job: Job, tmp_path: Path) -> None:
    """Without the ranges of gloo's threads nothing shows when ranks met: said once, and no zeros."""
    for rank, graph in enumerate(job.graphs):
        strings = [text.replace("gloo:", "other:") for text in graph.strings]
        replace(graph, strings=strings).save(tmp_path / f"rank{rank}.foretrace")
    for command in (["ranks"], ["comm", "report"]):
        ran = CliRunner().invoke(app, [*command, str(tmp_path)])
        assert ran.exit_code == 0, ran.output
        assert "exposed" not in ran.output.replace("exposed communication are not known", "")
        assert ran.output.count("No collective left device work") == 1
    assert all((graph.collectives.kernel == NONE).all() for graph in job.graphs)


def test_the_commands_say_it(path: Path) -> None:
    ran = CliRunner().invoke(app, ["ranks", str(path)])
    assert ran.exit_code == 0, ran.output
    said = " ".join(plain(ran.output).split())
    assert re.search(r"Rank 1 computes [\d.]+ ms longer than the median rank: .*aten::(mm|addmm) [^.]*[\d.]+ ms", said)
    assert np.char.find(CliRunner().invoke(app, ["comm", "report", str(path)]).output, "1 (") >= 0
