"""A host of which a few programs were recorded: the law of other hosts' programs, times one factor, drawn towards them.

::

    law of known hosts ──────────────┐
    programs of this host ─ factor ──┤
                          ─ labels ──┴──▶ base = (n · own + law + factor) / (n + 1), logarithms, n programs have it

What operations cost relative to each other is much the same on two hosts that compute, so that many programs of others
tell more of an operation than a few of one's own do: ``benchmarks/host_few.py`` holds a Xeon's 109 programs
(``traces/host-xeon``) against the law of an EPYC's 52 (``traces/host``). Where a GPU computes it is not so: the shipped
law is of ten traces of six hosts, and one or two programs of H100's or MI300's host tell a third alone at 12 and 11%,
with that law at 30 and 24% (``benchmarks/fit_hosts.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kernel_models.host.fitting import LEAST_PROGRAMS, fit_host, label_pools
from kernel_models.host.hosts import CPU_HOST, shipped_host
from kernel_models.host.model import HostModel, Pool, drawn_together
from kernel_models.host.step_events import HostStep
from kernel_models.spreads import END, OTHER_HOSTS_PROGRAM
from tracer.arrays import Float64

ENOUGH_PROGRAMS = 10
"""So many programs of a host tell others as well as they do with other hosts' law (``benchmarks/host_few.py``)."""


def fit_few(steps: Sequence[HostStep], host: str = "", law: HostModel | None = None) -> HostModel:
    """Fit to recorded steps of one host, one of each program, with what is known of other hosts.

    Args:
        steps: of the programs, which compute on the host.
        host: how to call it.
        law: of other hosts; by default the shipped one.

    Raises:
        ForetraceError: there is no host time in them.
    """
    own = fit_host(steps, host)
    law = law or shipped_host(CPU_HOST)
    steps = [step for step in steps if len(step) and step.host_ns > 0]
    plain = _drawn(own, replace(law, counted=None), [replace(step, calls=None) for step in steps])
    counted = [step for step in steps if step.calls is not None]
    if own.counted is None or law.counted is None or len(counted) < len(steps):
        return plain
    return replace(plain, counted=_drawn(own.counted, law.counted, counted))


def _drawn(own: HostModel, law: HostModel, steps: Sequence[HostStep]) -> HostModel:
    """The law times the host's factor, drawn towards its own programs, put right by what these miss when left out."""
    count = len(steps)
    factors = np.array([_missed(law, step) for step in steps])
    model = _drawn_to(own, law, steps, factors)
    missed = np.array([_missed(_drawn_to(own, law, [*steps[:left], *steps[left + 1:]], np.delete(factors, left)),
                               steps[left]) for left in range(count)]) if count > 1 else np.zeros(1)
    # Few may agree, or miss on one side, by chance: what others do counts as much as ``LEAST_PROGRAMS`` of them.
    usual = max(OTHER_HOSTS_PROGRAM, law.spread / END)
    apart = np.sqrt((((missed - missed.mean())**2).sum() + LEAST_PROGRAMS * usual**2) / (count - 1 + LEAST_PROGRAMS))
    offset = float(missed.mean()) * count / (count + LEAST_PROGRAMS)
    return replace(model, offset=law.offset + offset, spread=END * float(apart) * float(np.sqrt(1 + 1 / count)))


def _missed(model: HostModel, step: HostStep) -> float:
    """Return the logarithm of a program's time over what a model says."""
    return float(np.log(step.host_ns / sum(float(part.sum()) for part in model.estimate(step))))


def _drawn_to(own: HostModel, law: HostModel, steps: Sequence[HostStep], factors: Float64) -> HostModel:
    """The law times the programs' factor, each operation drawn towards what they cost; ``own`` lends the name, launches
    and number of programs."""
    # One odd program, such as one whose Python does most of its work, moves the mean of five by a tenth.
    factor = float(np.median(factors))
    pools = {label: replace(pool, log_base=pool.log_base + factor) for label, pool in law.pools.items()}
    for label, mine in label_pools(steps, law.with_calls).items():
        known = law.pools.get(label)
        base = law.log_base(label)
        if base is None:
            pools[label] = mine
            continue
        drawn = drawn_together(float(mine.programs), mine.log_base, base + factor)
        pools[label] = Pool(drawn, 1, mine.programs + (known.programs if known else 1))
    slopes = {label: slope * float(np.exp(factor)) for label, slope in law.slopes.items()}
    return replace(own, pools=pools, slopes=slopes, offset=law.offset, with_calls=law.with_calls, counted=None)
