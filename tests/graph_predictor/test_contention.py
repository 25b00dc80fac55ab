"""Kernels and collectives that slow each other down: planted slow-downs are found again, and edits use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace.edits import TakeOutProfiler
from graph_predictor.comm.contention import Overlapping, OverlappingKernels, contention, fitted
from graph_predictor.edits.overlap import HideCollectives
from graph_predictor.edits.scale import ScaleHost
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.steady_state import slowed
from graph_predictor.simulation.build import build_program
from graph_predictor.synthesis.baseline import baseline_of
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import KernelKind
from tracer.job import read_job

COMPUTE, COLLECTIVE = int(KernelKind.COMPUTE), int(KernelKind.COLLECTIVE)


def planted(transfer: float, waiting: float, kernels: int = 8) -> tuple[Int64, Bool, Float64, Overlapping, Bool]:
    """Instances of some kernels, alone and beside collectives, that lose so much (factors) at full overlap."""
    random = np.random.default_rng(0)
    names, logs, shares = [], [], []
    for kernel in range(kernels):
        for beside_transfer, beside_waiting in [(0.0, 0.0)] * 5 + [(1.0, 0.0)] * 3 + [(0.0, 0.9)] * 3:
            names.append(kernel)
            shares.append((beside_transfer, beside_waiting))
            logs.append(np.log(20_000 * (kernel + 1)) + random.normal(0, 0.002)
                        + beside_transfer * np.log(transfer) + beside_waiting * np.log(waiting))
    of = np.array(shares)
    own = np.ones(len(names), np.bool_)
    return np.array(names), own, np.array(logs), Overlapping(of[:, 0], of[:, 1], np.zeros(len(names))), own


def test_kernels_that_take_no_time_are_not_slowed_down() -> None:
    """Of collectives that an edit makes free a note said that they take nan% more."""
    whole, none = np.zeros(2, np.int64), np.zeros(2)
    times = KernelTimes(none, whole, whole, none, none, ())
    assert slowed(times, np.array([0.2, 0.0]), fitted(*planted(1.5, 1.1))).notes == ()
    some = slowed(replace(times, ns=np.array([0.0, 9.0])), np.array([0.2, 0.2]), fitted(*planted(1.5, 1.1)))
    assert "1 of them take +22.1%" in some.notes[0]


def test_planted_slow_downs_are_found_and_nothing_is_faster_beside_another() -> None:
    found = fitted(*planted(1.5, 1.1))
    assert found.transfer.factor == pytest.approx(1.5, rel=0.01) and found.transfer.kernels == 8
    assert found.waiting.factor == pytest.approx(1.1, rel=0.01) and found.waiting.instances == 24
    assert not found.computing.known
    faster = fitted(*planted(0.8, 1.0))
    assert faster.transfer.factor == 1.0 and (faster.of_transfer >= 0).all()


def test_few_kernels_say_nothing_of_others() -> None:
    names, own, logs, shares, used = planted(1.5, 1.0, kernels=3)
    wider = Overlapping(*(np.append(values, 0.0) for values in (shares.transfer, shares.waiting, shares.computing)))
    found = fitted(np.append(names, 3), np.append(own, True), np.append(logs, 10.0), wider, np.append(used, True))
    assert not found.transfer.known
    assert found.of_transfer[-1] == 0.0 and found.of_transfer[0] == pytest.approx(np.log(1.5), abs=0.01)


def test_shares_beside_waiting_and_transfer() -> None:
    # Rank 0: a kernel over 0–100, a collective over 40–120 whose ranks have met at 80. Rank 1: nothing beside its own.
    kinds = np.array([COMPUTE, COLLECTIVE, COLLECTIVE], np.int8)
    job = OverlappingKernels.of(np.array([0, 2, 3]), kinds, np.array([-1, 0, 0]))
    found = job.shares(np.array([0, 40, 80]), np.array([100, 120, 120]), np.array([0, 40, 40]))
    assert found.waiting[0] == pytest.approx(0.4) and found.transfer[0] == pytest.approx(0.2)
    # Half of the transfer lies beside the kernel, and that is so of the collective on every rank.
    assert found.computing.tolist() == [0.0, 0.5, 0.5]
    none = OverlappingKernels.of(np.array([0, 2]), kinds[[0, 0]], np.array([-1, -1]))
    found = none.shares(np.array([0, 5]), np.array([9, 9]), np.zeros(2, np.int64))
    assert not found.transfer.any() and not found.computing.any()


def test_a_recorded_job_of_eight_gpus(real_trace: Callable[[str], Path]) -> None:
    job = read_job(real_trace("nanogpt-8xH100"))
    found = contention(build_program(job.graphs))
    assert found.transfer.kernels >= 20 and 1.15 < found.transfer.factor < 1.4
    assert found.waiting.factor < 1.05 < found.transfer.factor
    baseline = baseline_of(job)
    unedited, faster = baseline.predict(), baseline.predict([ScaleHost(0.5), HideCollectives()])
    assert not any("beside collectives" in note for note in unedited.notes)
    assert any("beside collectives" in note for note in faster.notes)
    # Kernels that no longer lie beside collectives take less.
    assert faster.gpu_active_us < unedited.gpu_active_us
    # Hosts run ahead of the devices: the program's 14 unprofiled runs took 32.965 ms a step in the median.
    alone = baseline.predict([TakeOutProfiler()])
    assert alone.bound == "compute" and alone.step_time_us == pytest.approx(32_965, rel=0.03)
    assert alone.interval_us[0] < 32_965 < alone.interval_us[1]
