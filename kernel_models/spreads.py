"""Assumptions behind intervals: every assumed half width in one place, with its evidence.

A half width is half of an 80% interval of the logarithm of a time (0.7: a factor of 2 either way). "Added" half widths
add to the price's own. Fitted models, collectives and repeated steps have measured ones, kept elsewhere.
"""

from __future__ import annotations

END = 1.2815515655446004
"""Standard deviations between the mean of a normal distribution and an end of its 80% interval."""

# --- kernels -------------------------------------------------------------------------------------------------------

MEASURED_KERNELS = 0.01
"""Half width of a measured kernel time. Between steps of one run sums differ by 0.002 (V100) to 0.005 (A100), by 0.05
where batches differ (recommendation on 8×A100). Another run on the same machine may have other clocks."""
FIXED_COST = 0.5
"""Half width of a kernel's fixed cost, which tables of measurements do not show, since their calls are long.

Ends of the middle 80% of measured over predicted, for calls below three kernel floors in traces. V100 DLRM: e^-0.42 and
e^0.19. A100: e^-0.29 and e^0.40, e^-0.51 and e^0.69. B200: e^-0.60 and e^0.45. Source: benchmarks/datasheet_traces.py.
"""
LACKING_TYPE = 0.7
"""Added half width for products of types that a device lacks, or that no measurement has (fp4): a factor of two, as
between the rates of two neighbouring types. Set, not measured."""
ASSUMED_SIZES = 0.7
"""Added half width for an inference server's operator whose cache, sequences or experts were assumed because no
argument holds them: a factor of two. Set, not measured: a cache may have any length."""
UNMEASURED_CACHE = 0.2
"""Added half width for attention over a cache, for the share of keys older than the step: no table has such calls.
Flash-Decoding's published times (benchmarks/inference_kernels.py) err by up to 20%."""
PLACEHOLDER_DEVICE = 1.5
"""Added half width for a device with placeholder figures that has not been calibrated. Set, not measured."""
PUBLISHED_CPU = 0.7
"""Added half width for a CPU by its data sheet: a factor of two. Its clock depends on instructions and cooling, and the
default efficiencies are one thread's of one other processor. Set, not measured."""
OTHER_DEVICE = 1.5
"""Factor on the standard deviation of a family's time in a step, for a device without steps in the fit of corrections.
A GPU left wholly out of the fit (RTX 3090 and 4090 in turn) errs by 1.4 and 1.6 times as much as a fitted one
(benchmarks/zoo.py fit)."""
OTHER_LAYOUT = 0.25
"""Added half width for a call priced from a measured call of another layout.

NVIDIA's "Matrix Multiplication Background User's Guide" shows nn, nt, tn and tt of large products within a fifth."""
TYPICAL_WORK = 0.5
"""Added half width for work of unknown sizes, scaled as its family's typical work. Series of 3×3 and 1×1 convolutions
differ by up to 0.43 between V100 and A100 (1 ms kernels, fp32 against TF32). Layers vary more than two examples."""
REPLACED_ON_CPU = 0.3
"""Half width of replaced work on a CPU: the formulas know little of its caches and threads. Set, not measured."""
RESIZED_ON_CPU = 0.15
"""Half width of a CPU's operations at another size: formulas know little of its caches, threads and fresh pages of
memory. On the tuning programs of benchmarks/foreign_sizes.py 80% of the steps' errors lie within 0.11; a capture on a
busy machine errs by more."""
RESIZED_WITH_DATA = 0.2
"""Half width of kernels that are assumed to scale with their data (fixed costs, cache sizes). Set, not measured."""
COMPILED_KERNELS = 0.1
"""Least half width of every kernel of compiled code: the compiler chooses other kernels for products, and which values
it fuses is assumed from sizes. With the intervals of replaced work, intervals of compiled over eager steps cover 83% of
231 steps of image models, from held-out families (RTX 4090, inference; benchmarks/compiled.py)."""

STATE_SPACE_KERNELS = 0.5
"""Added half width for all kernels of a state-space mixer's recurrence: they are written in Triton and priced by their
products and bytes. Set, not measured."""
HOST_ROWS = 1.1
"""Added half width for look-ups of tables in the host's memory, cached on the device or not: a factor of 3. Set, not
measured; TorchRec's planner assumes both kernels to be ten times slower than the bandwidths they read at."""

# --- host ----------------------------------------------------------------------------------------------------------

UNKNOWN_HOST = 1.1
"""Half width of the host time of an unmeasured host (a factor of 3), on top of differences between known hosts'
programs. Set before a check on ten hosts, each predicted by the shipped model fitted without it. Nine lie within; they
take 0.8 to 3.7 times the predicted time (``benchmarks/host_prior.py``)."""
OTHER_HOST = 0.3
"""Half width of host time without a matching operation in another host's recording. Quartiles of two hosts' ratios by
operation lie 0.2 from their middle (V100 and 8×A100, H100 and MI300X), 0.8 where one host is seven times slower
(2×A100). Sums over many operations vary less."""
OTHER_PROGRAM = 0.65
"""Half width of a program's host time predicted from one other program of its host; from n, divided by the root of n.
More than three programs show their own scatter. From programs of ``traces/host``: 80% of others lie within 0.67 by one,
within 0.35 by three."""
OTHER_HOSTS_PROGRAM = 0.11
"""Standard deviation of the log host time of a program predicted from other hosts' programs and one factor of its host.
From 109 programs on a Xeon, predicted by an EPYC's (``benchmarks/host_few.py``)."""
SMALL_PROGRAMS = 0.35
"""Added half width of host time predicted from the small programs of ``foretrace calibrate --host``: they resemble each
other more than they resemble the program. Set before a check on 27 other programs; 93% of them then lie in the interval
(``benchmarks/host_model.py --host``)."""
COMPILED_HOST = 0.7
"""Half width of the host time that remains in forward and backward of compiled code. Set, not measured."""
USUAL_STEPS = 0.03
"""Usual standard deviation of the log of a step's host time; it counts as evidence as one difference between steps.
Pairs of steps of the recordings in ``benchmarks/interval_coverage.py`` after their first two hold the mean of the four
that follow in 79% of the cases (mean of runs)."""
HOST_AT_CAPTURED = 0.07
"""Half width of the mean host time of one capture, as a prediction of another run at its size. Processes that run the
same steps on a CPU differ by a standard deviation of 0.04 to 0.09; with the quickest of three rounds by half of that. A
capture and the predicted step are two processes."""
TWO_PHASES = 0.1
"""Standard deviation of the difference between two phases of one process, as a share of the step. Set, not measured."""
SHARED_CORES = 0.15
"""Added half width for host time of ranks that share a CPU's cores, caches and memory, predicted from one process.
Independent copies of one program take 1.03 times their time alone next to one other copy. Next to three they take 1.05
times what their share of the cores predicts. Collectives and hooks add the rest. Set, not measured: 13 of 17 real steps
are then in the interval (``benchmarks/gloo_steps.py``)."""
PROFILER_EVENT = 0.3
"""Half width of the profiler's cost of an operation, from recorded operations that only call others: 80% of 27 programs
lie within 0.25 on one CPU (``benchmarks/profiler_cost.py``)."""
PROFILER_CALL = 0.7
"""Half width of the profiler's cost of a call of the device's runtime (a factor of two). Set, not measured."""

# --- collectives ---------------------------------------------------------------------------------------------------

TRANSFER_ALONE = 0.2
"""Half width of a collective's transfer time, from the recording of one rank of several. Relative to the recordings of
all eight ranks of a job of H100, 80% of 288 lie between 1.00 and 1.32 (benchmarks/jobs.py)."""
CONTENTION = 0.6
"""Half width of the change (log) of a kernel's time when it starts or stops overlapping a collective. Predictions from
other ranks' instances of a kernel are off by 5.5% in the median and 11% in the mean, where kernels change by 20%
(benchmarks/contention.py, eight H100)."""
COLLECTIVES_SHARED = 0.5
"""Share of the variance of a model's error that two clusters, or two formulas of one cluster, have in common, like
kernels on two devices. Set, not measured."""
BUS_BANDWIDTH = 0.2
"""Half width of collectives by formulas that one measured busbw corrected. Figures of the same number of nodes of
Hugging Face's cluster lie within 0.04 to 0.14 of each other (80%; 0.42 for all-reduces of 16 in its slower state);
other sizes and groups add to that. Chosen from these figures."""
RING_COLLECTIVES = 0.7
"""Half width of collectives by a ring over the device's links at a share of the data sheet's rate. With a topology
``kernel_models.collectives`` predicts better. Set, not measured."""
