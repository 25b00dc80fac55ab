"""``diff_jobs``: the difference between the steps of two recorded jobs, and its causes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
from graph_predictor.recorded.facts import recorded_facts
from step_views.diff.causes import Aligned, Causes, CauseTimes, Ratio, add_causes, add_left_over, parts_of
from step_views.diff.changes import place_changes
from step_views.diff.places import Places, find_places, hunk_causes
from step_views.diff.result import Difference, DifferenceKind
from step_views.diff.step_times import AT_ONCE, RESOURCES, RankSteps
from step_views.diff.step_tree import StepTree, Vocabulary, align_trees
from step_views.reports.breakdown import replayed_steps
from tracer.arrays import Bool, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY
from tracer.job import Job

MOST_STEPS = 1_000
"""Steps of a rank that are compared: each takes about a millisecond."""
LEAST_ALIGNED = 0.5
"""Two programs are different if they share less than this part of their operations (in order, by name). A model with
twice the layers still shares two thirds. Of the tried pairs of different programs, small BERT and DLRM steps share
most, 46%, because of their loaders and optimizers."""


def diff_jobs(a: Job, b: Job, *, step: str | None = None, step_b: str | None = None,
              one_machine: bool | None = None, profiled: bool = False) -> Difference:
    """Return the causes of the difference between the steps of A and of B.

    Both jobs are replayed exactly (``replay`` with residuals). Times along the critical path of a typical step are
    compared at each place of the aligned operations. The typical step is the mean of the steps near the median length.
    With several ranks the mean rank is compared.

    Args:
        a: the job before.
        b: the job after.
        step: only this step: its name, or its number within a rank (from 0; negative from the end).
        step_b: the step of B, if it is another one.
        one_machine: whether both ran on one kind of machine; by default, whether the traces name the same device.
        profiled: whether to compare steps under the profiler. By default, steps without it are compared if both
            captures timed such steps.

    Raises:
        ForetraceError: a job has nothing to compare, or the two are different programs.
    """
    _check_steps(a, b)
    replayed = [_replayed(job, name, profiled) for job, name in ((a, "A"), (b, "B"))]
    unlike = [name for name, each in zip("AB", replayed, strict=True) if each.profiled]
    if len(unlike) == 1:
        replayed = [_replayed(job, name, True) for job, name in ((a, "A"), (b, "B"))]
    chosen = [_chosen(each, wanted, name) for each, wanted, name in zip(
        replayed, (step, step if step_b is None else step_b), "AB", strict=True)]
    named = [step is not None, step is not None or step_b is not None]
    recorded = [None if asked else recorded_facts(job.graphs) for job, asked in zip((a, b), named, strict=True)]
    notes = [f"{name}: {note}" for name, job, each, facts in zip("AB", (a, b), replayed, recorded, strict=True)
             for note in dict.fromkeys([*job.notes, *each.notes, *_doubts(each),
                                        *([] if facts is None else facts.notes())])]
    if len(unlike) == 1:
        notes.append(f"{unlike[0]} does not say what its step takes without the profiler: both are compared under it.")
    typical = [{one for steps in each.values() for one in steps if one.counts or asked}
               for each, asked in zip(chosen, named, strict=True)]
    ranks = _common_ranks(replayed, chosen, notes)
    vocabulary = Vocabulary()
    causes: Causes = {}
    before = after = aligned = operations = 0
    ratios = []
    compared = []
    for left, right in ranks:
        sides = [_Side(each, position, vocabulary, steps[position], ordinary)
                 for each, position, steps, ordinary in zip(replayed, (left, right), chosen, typical, strict=True)]
        compared.append((sides, align_trees(sides[0].tree, sides[1].tree)))
        operations += len(sides[0].tree) + len(sides[1].tree)
        aligned += 2 * int((compared[-1][1] >= 0).sum())
    share = aligned / operations if operations else 1.0
    if share < LEAST_ALIGNED:
        raise ForetraceError(f"A and B record different programs: only {share:.0%} of their operations could be "
                             f"aligned (by name, in order), and {LEAST_ALIGNED:.0%} are needed; compare two versions "
                             "of one program.")
    if one_machine is None:
        one_machine = _devices(a) == _devices(b)
    for sides, pair in compared:
        ratios.append(_add_rank(causes, sides, pair, vocabulary, one_machine=one_machine))
        before += sides[0].step_ns
        after += sides[1].step_ns
    parts = parts_of(causes, len(ranks), one_machine=one_machine)
    mean = round(before / len(ranks))
    return Difference(
        before_ns=mean, after_ns=mean + round((after - before) / len(ranks)), parts=parts, aligned=share,
        host_ratio=_mean_ratio([host for host, _ in ratios]), device_ratio=_mean_ratio([each for _, each in ratios]),
        steps_before=sum(len(sides[0].steps) for sides, _ in compared),
        steps_after=sum(len(sides[1].steps) for sides, _ in compared), notes=notes,
        profiled=replayed[0].profiled, ranks=len(ranks), recorded_a=recorded[0], recorded_b=recorded[1])


def _replayed(job: Job, name: str, profiled: bool) -> Replay:
    if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs):
        raise ForetraceError(f"{name} was traced by shapes alone and has no times, so that there is no difference to "
                             "explain; compare two recordings (foretrace capture).")
    if not any(len(graph.ops) or len(graph.kernels) for graph in job.graphs):
        raise ForetraceError(f"{name} is empty: it has neither operations nor device work; record it again (foretrace "
                             "capture).")
    try:
        return replay(job.graphs, residuals=True, profiled=profiled)
    except ForetraceError as error:
        raise ForetraceError(f"{name}: {error}") from error


def _check_steps(a: Job, b: Job) -> None:
    """Raise if a job has too many steps, if only one has steps, or if their steps are cycles of different numbers of
    recorded steps."""
    for name, job in zip("AB", (a, b), strict=True):
        if (most := max(len(graph.steps) for graph in job.graphs)) > MOST_STEPS:
            raise ForetraceError(f"{name} has {most:,} steps, and at most {MOST_STEPS:,} a rank are compared, each by "
                                 "its own critical path; record fewer steps.")
    cycles = [max((graph.meta.cycle for graph in job.graphs), default=1) for job in (a, b)]
    if cycles[0] != cycles[1]:
        raise ForetraceError(f"A step of A is {cycles[0]} of its recorded steps and one of B {cycles[1]}, as their "
                             "loops alternate unlike each other: they cannot be compared; record two whole cycles of "
                             "both, or say how many steps are one with --cycle.")
    stepped = [any(len(graph.steps) for graph in job.graphs) for job in (a, b)]
    if stepped[0] != stepped[1] and all(any(len(g.ops) or len(g.kernels) for g in job.graphs) for job in (a, b)):
        lacking, other = ("B", "A") if stepped[0] else ("A", "B")
        raise ForetraceError(f"{lacking} has no steps and {other} has: a whole window and a step cannot be compared; "
                             "call prof.step() after each iteration, or record it with foretrace capture.")


def _doubts(result: Replay) -> list[str]:
    if result.reproducible:
        return []
    return [f"No rule explains {result.unexplained_share:.1%} of a window's GPU timeline: what kernels waited for "
            "there, and so the critical path, is uncertain."]


def _chosen(result: Replay, wanted: str | None, name: str) -> dict[int, list[ReplayedStep]]:
    """Return for each rank, by its position in the job, the steps to compare."""
    try:
        steps = replayed_steps(result.steps, wanted)
    except ForetraceError as error:
        raise ForetraceError(f"{name}: {error}") from error
    positions = {(graph.meta.rank if graph.meta.rank >= 0 else i): i for i, graph in enumerate(result.graphs)}
    found: dict[int, list[ReplayedStep]] = {}
    for each in steps:
        found.setdefault(positions[each.rank], []).append(each)
    return found


def _common_ranks(results: list[Replay], chosen: list[dict[int, list[ReplayedStep]]],
                  notes: list[str]) -> list[tuple[int, int]]:
    """Return the positions in A and in B of the ranks to compare."""
    by_rank = [{(result.graphs[at].meta.rank if result.graphs[at].meta.rank >= 0 else at): at for at in each}
               for result, each in zip(results, chosen, strict=True)]
    common = [(by_rank[0][rank], by_rank[1][rank]) for rank in sorted(by_rank[0].keys() & by_rank[1].keys())]
    if not common and len(by_rank[0]) == len(by_rank[1]) == 1:
        common = [(next(iter(by_rank[0].values())), next(iter(by_rank[1].values())))]
    if not common:
        raise ForetraceError(f"A and B have no rank in common (A has {_listed(by_rank[0])}, B has "
                             f"{_listed(by_rank[1])}): give traces of the same ranks.")
    if len(common) < max(len(each) for each in by_rank):
        notes.append(f"Compared are the ranks both have: {len(common)} of A's {len(by_rank[0])} and B's "
                     f"{len(by_rank[1])}.")
    return common


def _listed(ranks: dict[int, int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return f"{shown} …" if len(ranks) > 8 else shown


def _devices(job: Job) -> set[str]:
    return {graph.meta.device for graph in job.graphs}


def _mean_ratio(ratios: list[Ratio]) -> float | None:
    known = [np.log(ratio.value) for ratio in ratios if ratio.known]
    return float(np.exp(np.mean(known))) if known else None


class _Side:
    """One rank of one job: its steps, and the step of median length, with which the others are aligned."""

    def __init__(self, result: Replay, position: int, vocabulary: Vocabulary, steps: list[ReplayedStep],
                 ordinary: set[ReplayedStep]) -> None:
        self.vocabulary = vocabulary
        self.rank = RankSteps(result, position, vocabulary)
        asked = set(steps)
        length = {step: step.measured_ns if result.profiled else step.replayed_ns for step in steps}
        self.steps = [step for step in steps if step in ordinary]
        self.apart = [step for step in steps if step not in ordinary]
        self.median = sorted(self.steps, key=lambda step: length[step])[(len(self.steps) - 1) // 2]
        self.others = [step for step in result.steps if step.rank == self.median.rank and step not in asked]
        self.tree: StepTree = self.rank.tree(self.median)
        self.step_ns = round(sum(length[step] for step in self.steps) / len(self.steps))

    def typical(self, places: Places, place: Int64) -> tuple[CauseTimes, CauseTimes]:
        """Return the mean times of the typical steps, and steady times: each place's lower median over all steps."""
        trees = []
        for step in [*self.steps, *self.apart, *self.others]:
            tree, of_node = self.tree, place
            if step is not self.median:
                tree = self.rank.tree(step)
                partner = align_trees(tree, self.tree)
                of_node = np.append(place, places.irregular)[partner]  # -1, without a partner, takes the last entry
            trees.append((tree, of_node))
        rows = self.rank.of_rows(trees, places)
        asked = [*self.steps, *self.apart]
        size, number = RESOURCES * (places.irregular + 1), len(self.steps)
        somewhere, path, own = _side_by_side(size, (
            self.rank.times(step, *tree, places, rows) for step, tree in zip(asked, trees, strict=False)))
        mean_path, mean_own = (_rounded(each[:number].sum(axis=0), number) for each in (path, own))
        own.sort(axis=0)
        middle = (len(asked) - 1) // 2
        steady_path = np.zeros_like(path[0])
        for entry in range(0, len(steady_path), AT_ONCE):
            some = slice(entry, entry + AT_ONCE)
            steady_path[some] = np.partition(path[:, some], middle, axis=0)[middle]
        steady_own = np.maximum(own[middle], steady_path)
        path -= steady_path
        np.abs(path, out=path)
        path.sort(axis=0)

        def everywhere(found: Int64) -> Int64:
            every = np.zeros(size, np.int64)
            every[somewhere] = found
            return every

        spread = everywhere(path[len(asked) // 2])
        return (CauseTimes(everywhere(mean_path), everywhere(mean_own), spread),
                CauseTimes(everywhere(steady_path), everywhere(steady_own), spread))


def _side_by_side(size: int, times: Iterable[tuple[Int64, Int64]]) -> tuple[Bool, Int64, Int64]:
    """Return which entries of the steps' times, [size] each, are nonzero in any step, and these entries of all steps
    [steps, entries]. Most resources take no time at a place."""
    kept, somewhere = [], np.zeros(size, np.bool_)
    for path, own in times:
        at = np.flatnonzero((path != 0) | (own != 0))
        somewhere[at] = True
        kept.append((at, path[at], own[at]))
    entry = np.cumsum(somewhere) - 1
    paths, owns = np.zeros((2, len(kept), int(somewhere.sum())), np.int64)
    while kept:  # freed one by one: for millions of operations, both copies would take gigabytes
        at, path, own = kept.pop()
        paths[len(kept), entry[at]], owns[len(kept), entry[at]] = path, own
    return somewhere, paths, owns


def _rounded(sums: Int64, number: int) -> Int64:
    """Return the means in whole ns such that they add up to the rounded mean of the sum."""
    reached = np.rint(np.cumsum(sums) / number).astype(np.int64)
    return np.diff(reached, prepend=0)


def _add_rank(causes: Causes, sides: list[_Side], pair: Int64, vocabulary: Vocabulary, *,
              one_machine: bool) -> tuple[Ratio, Ratio]:
    """Add the difference of one rank."""
    one, other = sides
    places = find_places(one.tree, other.tree, pair)
    graphs = (one.rank.graph, other.rank.graph)
    before, steady_before = one.typical(places, places.place_a)
    after, steady_after = other.typical(places, places.place_b)
    seen = [_kernels(side, nodes) for side, nodes in ((one, places.left), (other, places.right))]
    hunks = hunk_causes(places, one.tree, other.tree, graphs, vocabulary)
    aligned = Aligned(
        one.tree, other.tree, places, hunks,
        place_changes(places, hunks, (one.tree, other.tree), graphs, vocabulary), vocabulary,
        before, after, steady_before, steady_after, seen[0][0] == seen[1][0], (seen[0][1], seen[1][1]),
        any(len(graph.kernels) for graph in graphs), one_machine)
    ratios = add_causes(causes, aligned)
    unlike = (other.step_ns - one.step_ns) - int(after.path.sum() - before.path.sum())
    add_left_over(causes, DifferenceKind.REPLAY, "recorded less replayed step time", unlike)
    return ratios


def _kernels(side: _Side, nodes: Int64) -> tuple[Int64, list[str]]:
    """Return for each node a hash of its kernels' names, and the name of the longest kernel ("" for none)."""
    rank, tree = side.rank, side.tree
    kernels = rank.graph.kernels
    rows = rank.kernels(rank.row(side.median))
    node_of = np.full(len(rank.graph.ops) + 1, NONE, np.int64)
    has_op = tree.op >= 0
    node_of[tree.op[has_op]] = np.flatnonzero(has_op)
    of_kernel = node_of[rank.nearest[kernels.op]] if len(kernels) else np.zeros(0, np.int64)
    of_kernel[tree.kernel[~has_op]] = np.flatnonzero(~has_op)
    rows = rows[of_kernel[rows] >= 0]
    node, name = of_kernel[rows], rank.codes[kernels.name[rows]]
    digest = np.zeros(len(tree), np.int64)
    with np.errstate(over="ignore"):
        mixed = (name + 1) * np.int64(0x9E3779B97F4A7C1)
        np.add.at(digest, node, mixed ^ (mixed >> 29))
    longest = np.zeros(len(tree), np.int64)
    order = np.argsort(rank.kernel_ns[rows], kind="stable")
    longest[node[order]] = name[order]
    texts = side.vocabulary.texts
    return digest[nodes], [texts[code] for code in longest[nodes].tolist()]
