"""Fitting a device's profile: a model for each family and software stack, chosen on the fit split alone.

    all rows ──hash of the shape group──▶ held-out fifth ──────────────────────────────┐
        └──▶ fit split ──cross-validation by shape group──▶ choice, intervals ──fit──▶ judged once, errors stored
                                                                            └──refit on all rows──▶ the stored model

Rows that a table itself marks as held out are never fitted to, not even at the end.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np

from kernel_models.datasets.samples import HELD_OUT_SHARE, DataError, Samples, joined, share_of
from kernel_models.device import DeviceSpec, device
from kernel_models.heuristics.efficiency import fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.boosted import Intervals
from kernel_models.learned.boosting import Boosting, Member
from kernel_models.learned.fit import FOLDS, Problem
from kernel_models.learned.gaussian import LEAST_CALLS, MOST_CALLS, fit_gaussian
from kernel_models.op_call import Family, KernelModel
from kernel_models.profile import DeviceProfile, ProfileEntry
from kernel_models.scores import Errors, errors_of
from kernel_models.threads import in_threads
from tracer.arrays import Float64
from tracer.versions import installed_version

LEAST_ROWS = 60
"""Fewest distinct calls to learn from: trees of ten rows a leaf could not distinguish fewer, so formulas price them."""
SELECTION_ROWS = 30_000
"""Most calls used for cross-validation, in whole shape groups."""
FULL_ROWS = 60_000
"""Above this number of calls there are fewer trees, each adding more, so that a fit's time stays about the same. Only
two of the folds are cross-validated then, since each fold leaves out thousands of calls."""
TWO_FOLDS_ROWS = 10_000
"""Above this number of calls in more than ``FEW_GROUPS`` groups two folds suffice: each leaves out thousands."""
REFIT_ROWS = 100_000
"""Above this number of calls the held-out fifth is not fitted to in the end: it adds little and doubles the time."""
FEW_GROUPS = 10
"""Up to this number of shape groups (such as models), each group is a fold of its own."""
HEURISTIC_ROWS = 1_000
"""Most calls to which formulas are fitted. These numbers are chosen so that a fit takes a minute or two."""

BOOSTING: dict[Family, tuple[Boosting, ...]] = {
    Family.GEMM: (Boosting(300, 0.13, 63, 0.2, 10, members=(Member(), Member(neighbours=True))),),
    Family.ATTENTION: (Boosting(500, 0.1, 31, 0.3, 10),),
}
"""Candidate settings by family. They were chosen by cross-validation over the (n, k) sites of one set only, the fit
split of the H200's matrix products. The choice was among 15 to 127 leaves, 0.1 to 0.4 of the features, 5 to 30 rows a
leaf, one to three seeds, squared and absolute error. Half of the trees see neighbouring weights: chosen on two folds
each of four stacks' fit splits (H200, H100 and A100). Each fit chooses how many trees help and the weights of both
halves. Attention has the same settings, except half the leaves and more of the features."""
OTHERS = (Boosting(200, 0.15, 31, 0.5, 5), Boosting(120, 0.15, 8, 0.5, 5))
SMALL, _FEW = Boosting(120, 0.15, 8, 0.5, 4), 3_000
"""Settings also tried where there are fewer than ``_FEW`` calls."""
_CHOSEN, _JUDGED = 0.25, 0.6
"""Shares of a fit's time, for 28,000 products: until its model is chosen, and until the model is judged."""
Progress = Callable[[str, float], None]
"""Called with a fit's name and the share of it that is done, 0 to 1; by several threads at a time."""


def _unseen(name: str, done: float) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Options:
    """Options of a fit.

    Attributes:
        refit: Whether the stored models are fitted to the held-out rows too, once these have judged the models.
        process_up_to: Most calls for which a Gaussian process replaces trees: from few calls, as a calibration has, it
            learns more in less time; 0 for never.
        formulas: Whether a family with a learned model also has fitted formulas, for calls that it does not cover.
        until: Time on the monotonic clock after which a fit ends with what it has; its facts say "ended_early" then.
    """

    refit: bool = True
    process_up_to: int = 0
    formulas: bool = False
    until: float = math.inf

    @classmethod
    def of_one_machine(cls, *, refit: bool = False) -> Options:
        """Return options for one machine's measurements, some hundred calls a family: Gaussian processes, formulas."""
        return cls(refit=refit, process_up_to=MOST_CALLS, formulas=True)


def fit_profile(
    samples: Sequence[Samples], spec: DeviceSpec | None = None, options: Options | None = None,
    progress: Progress = _unseen, notes: Sequence[str] = (),
) -> DeviceProfile:
    """Fit a profile to samples of one device.

    Args:
        samples: Measured calls.
        spec: The device; samples of other devices are left out. Without it all samples must be of one device.
        options: See ``Options``.
        progress: Called with the share of each fit that is done; fits run in threads, one per core.
        notes: Sentences on data that could not be used, kept in the provenance.

    Raises:
        DataError: There is nothing to fit, or the samples are of several devices.
    """
    options = options or Options()
    names = sorted({one.device for one in samples if len(one)})
    if spec is None:
        if len(names) != 1:
            raise DataError(f"The data are of several devices ({', '.join(names)}); name one with --device." if names
                            else "There is no measured call to fit to.")
        spec = device(names[0])
    mine = joined(one for one in samples if one.device == spec.name)
    if not mine:
        raise DataError(f"The data hold nothing measured on {spec.name}; they are of "
                        f"{', '.join(names) or 'no device'}.")
    entries = [entry for found in in_threads([partial(fit_entries, one, spec, options, progress) for one in mine])
               for entry in found]
    others = [name for name in names if name != spec.name]
    return DeviceProfile(spec, entries, _provenance(mine, options, notes, others))


def fit_entries(
    samples: Samples, spec: DeviceSpec, options: Options | None = None, progress: Progress = _unseen,
) -> list[ProfileEntry]:
    """Return the model of one family and stack, and if asked the formulas for calls that it does not cover."""
    options = options or Options()
    best = fit_entry(samples, spec, options, progress)
    return [best] if best.kind == "roofline" or not options.formulas else [best, formula_entry(samples, spec)]


def formula_entry(samples: Samples, spec: DeviceSpec) -> ProfileEntry:
    """Return a family's formulas with efficiencies fitted to the rows that are not held out."""
    fit = samples.taken(~samples.split())
    return ProfileEntry("roofline", _formulas(fit, spec), fit.software, len(fit), {"data": fit.source})


def fit_entry(
    samples: Samples, spec: DeviceSpec, options: Options | None = None, progress: Progress = _unseen,
) -> ProfileEntry:
    """Choose, judge and fit the model of one family and software stack; ``samples`` are aggregated."""
    options = options or Options()
    name = f"{samples.family.value}, {samples.software or 'unnamed software'}: {len(samples):,} calls"
    progress(name, 0.0)
    entry = _fitted_entry(samples, spec, options, partial(progress, name))
    progress(name, 1.0)
    return entry


def _fitted_entry(
    samples: Samples, spec: DeviceSpec, options: Options, done: Callable[[float], None],
) -> ProfileEntry:
    held = samples.split()
    fit = samples.taken(~held) if (~held).any() else samples
    if LEAST_CALLS <= len(fit) <= options.process_up_to:
        return _fit_process(fit, samples.taken(held), spec, options.until)
    chosen, candidates, intervals = _choose(fit, spec, options.until)
    refitted = options.refit and samples.held_out is None and len(samples) <= REFIT_ROWS and bool(held.any())
    done(_CHOSEN)
    name = "roofline" if chosen is None else _text(chosen)
    facts: dict[str, Any] = {"data": samples.source, "candidates": candidates, "fit_rows": len(fit), "chosen": name,
                             "cross_validation": candidates[name], **_ended(options.until)}
    if chosen is not None:
        facts["members"] = [asdict(member) for member in chosen.members]
    model = _fitted(fit, spec, chosen, intervals)
    if held.any() and (~held).any():
        facts["held_out"] = _judged(model, samples.taken(held))
    if refitted:
        done(_JUDGED)
        model = _fitted(samples, spec, chosen, intervals)
    rows = len(samples) if refitted else len(fit)
    return ProfileEntry("roofline" if chosen is None else "boosted", model, samples.software, rows, facts)


def _ended(until: float) -> dict[str, Any]:
    """Return the facts of a fit that ended early because its time was over."""
    return {"ended_early": True} if time.monotonic() > until else {}


def _fit_process(fit: Samples, held: Samples, spec: DeviceSpec, until: float) -> ProfileEntry:
    """Return the Gaussian process, or the formulas where these have smaller errors on rows left out of the fit."""
    model, out = fit_gaussian(fit, spec, until)
    heuristic, learned = _heuristic_errors(fit, spec), errors_of(out, fit.measured_us)
    best: KernelModel = model if learned.mape < heuristic.mape else model.formula
    kind = "gaussian" if best is model else "roofline"
    facts: dict[str, Any] = {"data": fit.source, "fit_rows": len(fit), "chosen": kind,
                             "candidates": {"roofline": heuristic.to_json(), "gaussian": learned.to_json()}}
    facts |= {"cross_validation": facts["candidates"][kind], **_ended(until)}
    if len(held):
        facts["held_out"] = _judged(best, held)
    return ProfileEntry(kind, best, fit.software, len(fit), facts)


def scaled_to(how: Boosting, rows: int) -> Boosting:
    """Return boosting settings for a number of rows: above ``FULL_ROWS`` fewer trees, each adding more."""
    return how if rows <= FULL_ROWS else how.scaled(max(FULL_ROWS / rows, 0.5))


def candidates_of(family: Family, rows: int) -> tuple[Boosting, ...]:
    """Return the boosting settings to try for a family."""
    found = BOOSTING.get(family, OTHERS)
    return (*found, SMALL) if rows < _FEW and SMALL not in found else found


def _choose(fit: Samples, spec: DeviceSpec, until: float) -> tuple[
        Boosting | None, dict[str, Any], Intervals | None]:
    """Return the best candidate by cross-validated MAPE (``None``: the formulas), the errors of all, and intervals.

    After the time ``until`` no further candidate is tried.
    """
    some = _thinned(fit, SELECTION_ROWS)
    problem = each_left_out(Problem.of(some, spec), some.labels())
    folds = _folds(len(fit), some.labels())
    heuristic = _heuristic_errors(fit, spec)
    tried: dict[str, Any] = {"roofline": heuristic.to_json()}
    if len(fit) < LEAST_ROWS or len(set(problem.fold.tolist())) < 2:
        return None, tried, None
    best: tuple[float, Boosting, Float64, np.ndarray] | None = None
    for how in candidates_of(fit.family, len(fit)):
        if time.monotonic() > until:
            break
        predicted, done, members = problem.out_of_fold(how.scaled(0.5), folds)
        if not done.any():
            continue
        errors = errors_of(predicted[done], problem.measured_us[done])
        tried[_text(how)] = errors.to_json()
        if best is None or errors.mape < best[0]:
            best = errors.mape, replace(how, members=members), predicted[done], problem.measured_us[done]
    if best is None or heuristic.mape < best[0]:
        return None, tried, None
    return best[1], tried, Intervals.of(best[2], best[3])


def _folds(rows: int, labels: Sequence[str]) -> int:
    """Return how many folds to cross-validate: two where each leaves out thousands of calls of many groups."""
    groups = len(set(labels))
    if rows > FULL_ROWS or (rows > TWO_FOLDS_ROWS and groups > FEW_GROUPS):
        return 2
    return max(FOLDS, groups) if groups <= FEW_GROUPS else FOLDS


def _fitted(samples: Samples, spec: DeviceSpec, chosen: Boosting | None, intervals: Intervals | None) -> KernelModel:
    if chosen is None or intervals is None:
        return _formulas(samples, spec)
    return Problem.of(samples, spec).model(scaled_to(chosen, len(samples)), intervals)


def _formulas(samples: Samples, spec: DeviceSpec) -> RooflineModel:
    some = _thinned(samples, HEURISTIC_ROWS)
    return RooflineModel(samples.family, spec,
                         fit_efficiencies(some.calls, some.measured_us, spec, source=samples.source))


def each_left_out(problem: Problem, labels: Sequence[str]) -> Problem:
    """Return the problem with each shape group as a fold, if there are few groups; else the problem unchanged."""
    groups, fold = np.unique(np.array(labels), return_inverse=True)
    return replace(problem, fold=fold) if len(groups) <= FEW_GROUPS else problem


def _heuristic_errors(fit: Samples, spec: DeviceSpec) -> Errors:
    """Return cross-validated errors over two halves of the groups, which suffice for a few parameters."""
    some = _thinned(fit, HEURISTIC_ROWS)
    half = np.array([share_of(f"half {label}") < 0.5 for label in some.labels()])
    if half.all() or not half.any():
        half = np.arange(len(some)) % 2 == 0
    predicted = np.empty(len(some))
    for rows in (half, ~half):
        if rows.any():
            learn = some.taken(~rows)
            # With a single call nothing is left to fit to: the default efficiencies price the call.
            model = RooflineModel(fit.family, spec, fit_efficiencies(learn.calls, learn.measured_us, spec)
                                  if len(learn) else None)
            predicted[rows] = model.predict(some.taken(rows).calls).time_us
    return errors_of(predicted, some.measured_us)


def _judged(model: KernelModel, held: Samples) -> dict[str, Any]:
    """Return errors on held-out calls that the model covers, and how many calls it does not cover."""
    covered = np.asarray(model.covers(held.calls), bool)
    if not covered.any():
        return {"n": 0, "not_covered": len(held)}
    kept = held.taken(covered)
    times = model.predict(kept.calls)
    return {**errors_of(times.time_us, kept.measured_us, times.low_us, times.high_us).to_json(),
            "not_covered": int((~covered).sum())}


def _thinned(samples: Samples, most: int) -> Samples:
    """Return about ``most`` rows: whole shape groups, chosen by their hash; single rows where groups are too few."""
    if len(samples) <= most:
        return samples
    labels = samples.labels()
    groups = len(set(labels))
    share = most / len(samples)
    chosen = np.array([share_of(f"thin {label}") < share for label in labels])
    if groups < 50 or not chosen.any():
        chosen = np.zeros(len(samples), bool)
        chosen[np.random.default_rng(0).permutation(len(samples))[:most]] = True
    return samples.taken(chosen)


def _text(how: Boosting) -> str:
    return f"boosted {how.iterations}×{how.leaves} leaves" + (" and neighbours" if how.neighbours else "")


def _provenance(
    samples: Sequence[Samples], options: Options, notes: Sequence[str], others: Sequence[str]
) -> dict[str, Any]:
    told = [*notes, *([f"Measurements of other devices were left out: {', '.join(others)}."] if others else [])]
    return {
        **({"notes": list(dict.fromkeys(told))} if told else {}), **stamp(),
        "data": sorted({one.source for one in samples}),
        "split": f"{HELD_OUT_SHARE:.0%} of shape groups held out by the SHA-256 of their label, or as the data mark "
                 f"it; choices by {FOLDS}-fold cross-validation over shape groups of the rest, or each group left out "
                 f"in turn where there are at most {FEW_GROUPS}, two folds of more than {TWO_FOLDS_ROWS:,} calls in "
                 f"more groups, and of more than {FULL_ROWS:,} calls"
                 + (f"; stored models of up to {REFIT_ROWS:,} calls refitted to all rows but those the data mark"
                    if options.refit else ""),
    }


def stamp() -> dict[str, Any]:
    """Return the date and the software versions of a fit."""
    return {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "software": {name: installed_version(name) or "not installed" for name in ("foretrace", "numpy", "numba")}
            | {"python": platform.python_version()}}
