"""``Study``: predictions of many configurations of one source.

::

    source ──> recorded Baseline ──(plan, sizes: traced again, once each)──> Baseline ──(other edits)──> Prediction

What the configurations of one source share (a trace under a plan, a host, a cluster) is made once.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar

from graph_predictor.comm import clusters, mixing
from graph_predictor.edits import topology as topology_edit
from graph_predictor.edits.device import Device
from graph_predictor.edits.host_from import HostFrom
from graph_predictor.edits.registry import Value, chosen, made
from graph_predictor.edits.straggler import Straggler
from graph_predictor.prediction.host_steps import host_by_name
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.repeat import Shared
from graph_predictor.prediction.result import lacking_memory
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request import parallel_ranks
from graph_predictor.sizes import captures as size_captures
from graph_predictor.sizes import scaling
from graph_predictor.sizes.drift import drift_between
from graph_predictor.sizes.retrace import (
    are_sizes,
    captured_sizes,
    nearest,
    noted_sizes,
    parse_also,
    parse_sets,
    parse_settings,
    retrace,
    samples_of,
    trace_again,
    way_again,
    why_not,
)
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models import profile as fitted_profile
from kernel_models.collectives.price import CollectiveModel, topology_of
from kernel_models.collectives.topology import Topology, find_topology
from kernel_models.device import find_device, shape_device
from kernel_models.host.model import HostModel, host_names, is_host_file
from tracer import shape_only
from tracer.capture_layout import are_unlike_clocks
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY
from tracer.job import Job, assemble_job, read_job
from tracer.lookup_data.indices import LAW
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only import apart
from tracer.shape_only.errors import ShapeOnlyError, UnknownSizeError
from tracer.user_code import SUFFIXES, find_importable

if TYPE_CHECKING:
    from graph_predictor.prediction.result import Prediction
    from graph_predictor.prediction.scenario import Edit
    from kernel_models.device import DeviceSpec
    from kernel_models.profile import DeviceProfile
    from tracer.shape_only.devices import TracedDevice

DEFAULT_DEVICE = "h200-sxm"
"""The device that a script is traced for by default."""
LAW_SETTING = "skew"
"""Setting of the suite's recommendation models: the exponent of the Zipf law of looked-up rows."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Changes of a source; the options of ``foretrace predict`` have the same names and the same texts.

    Attributes:
        device, parallel, topology, from_topology: None for that of the source.
        host_from: path of the capture whose host is used.
        comm_profile: path of measured collectives; comm_backend: the backend they are of, such as "gloo".
        comm_choices: path of several backends' measured collectives, or "auto"; the fastest backend does each.
        sizes: texts of ``--set``.
        also: further captures at other sizes; the nearest one is scaled.
        code: the program, as SCRIPT.py:FUNCTION.
        selected: if a program is traced, the share of elements that masks made of data select.
        edits: values by the name of the edit's option, such as ``{"clock": 1.5, "cuda-graphs": True}``.
    """

    device: str | None = None
    parallel: str | None = None
    topology: str | None = None
    from_topology: str | None = None
    comm_profile: str | None = None
    comm_backend: str | None = None
    comm_choices: str | None = None
    host_from: str | None = None
    sizes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    code: str | None = None
    selected: float | None = None
    edits: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", chosen(self.edits))

    def with_values(self, **values: object) -> Configuration:
        """Return the configuration with other values of some attributes."""
        return replace(self, **values)  # type: ignore[arg-type]

    def differences(self) -> dict[str, object]:
        """Return the attributes that change the source, as plain values."""
        plain = Configuration()
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
                if value != getattr(plain, name)}


def read_source(source: Sequence[str], window: int = 0, device: str | None = None, *, selected: float | None = None,
                read: Callable[[list[str], int], Job] | None = None) -> Job:
    """Return the job of traces, or of a step traced by shapes from SCRIPT.py:FUNCTION.

    Args:
        source: paths, or one SCRIPT.py:FUNCTION.
        window: number of a capture's window, from 0.
        device: name of the device to trace a script for.
        selected: for a script, the share of elements that masks made of data select.
        read: reads paths; by default ``tracer.read_job``.

    Raises:
        ForetraceError: the source cannot be read or traced.
    """
    if is_script(source):
        return assemble_job([shape_only.trace_script(source[0], shape_device(find_device(device or DEFAULT_DEVICE)),
                                                     selected=selected)])
    return read_job(list(source), window=window) if read is None else read(list(source), window)


def is_script(source: Sequence[str], step_region: str | None = None) -> bool:
    """Return whether a source names a function of a script.

    Raises:
        ForetraceError: it names a script without a function, or ``step_region`` is given for a script.
    """
    path, colon, function = source[0].rpartition(":")
    if len(source) == 1 and source[0].endswith(SUFFIXES):
        raise ForetraceError(f"{source[0]} is a script: name its function that builds the step, "
                             f"{source[0]}:FUNCTION.")
    found = len(source) == 1 and bool(colon) and function.isidentifier() and (
        path.endswith(SUFFIXES) or (not os.path.exists(source[0]) and find_importable(path) is not None))
    if found and step_region is not None:
        raise ForetraceError(f"{source[0]} is traced by shapes as one step, and --step-region names the steps of a "
                             "recording; leave it out.")
    return found


@dataclass(frozen=True)
class Prepared:
    """A configuration ready to be predicted: a baseline to start from, and the remaining edits.

    If ``must_fit``, too little device memory is an error; for the source itself it is a warning.
    ``collectives`` is the requested cluster, if any.
    """

    start: Baseline
    edits: list[Edit]
    must_fit: bool = False
    collectives: CollectiveModel | None = None

    def mixture(self) -> mixing.Mixture | None:
        """Return which backend does which of the step's collectives; ``None`` if one backend does all."""
        if self.collectives is None or not self.collectives.mixed:
            return None
        scenario = self.start.scenario
        return mixing.mixture_of_step(scenario.built, scenario.cycle.kernel, scenario.cycle.steps, self.collectives)

    def predict(self, *, price_per_hour: float | None = None, path: bool = True,
                evidence: bool = False) -> Prediction:
        """Predict the step time. For arguments and errors see ``Baseline.predict``."""
        if self.must_fit and not self.edits and (lacking := lacking_memory(self.start.scenario)) is not None:
            raise EditError(lacking)
        return self.start.predict(self.edits, price_per_hour=price_per_hour, path=path, evidence=evidence)


class Study:
    """A source, and predictions from it.

    Args:
        job: recorded, or traced by shapes; None for ``code``, which is then traced when it is first needed.
        step: the step to repeat, by name or number, or a range of numbers; by default the last equal ones.
        recorded_on: the device it was recorded on, if the trace does not state it.
        profiles: fitted models of devices.
        code: the SCRIPT.py:FUNCTION of a job traced by shapes.
        device: without a job, name of the device to trace ``code`` for.
        read: reads further captures; by default ``tracer.read_job``.
        profiled: predict the step under the profiler, see ``Baseline``.

    Raises:
        ForetraceError: there is nothing to predict from.
    """

    def __init__(self, job: Job | None, step: str | int | range | None = None, *, recorded_on: DeviceSpec | None = None,
                 profiles: Sequence[DeviceProfile] = (), code: str | None = None,
                 device: str | None = None, read: Callable[[list[str]], Job] = read_job,
                 profiled: bool = False) -> None:
        self._job, self._code_device = job, device or DEFAULT_DEVICE
        self.shape_only = job is None or any(graph.meta.era == SHAPE_ONLY for graph in job.graphs)
        self._step, self._recorded_on, self._code, self._read = step, recorded_on, code, read
        self._profiled = profiled
        self._profiles = {one.device.name: one for one in profiles}
        self._recorded = None if self.shape_only else self._plain(self.job)
        if self.shape_only and step is not None:
            baseline_of(self.job, step, device=recorded_on)  # raises once for all configurations if the step is unknown
        self._shared = Shared()

    @property
    def job(self) -> Job:
        """Return the source. A script is traced at the first call, in its own process (as for each of its sizes)."""
        if self._job is None:
            assert self._code is not None
            self._job = assemble_job([apart.trace_apart(self._code, shape_device(find_device(self._code_device)))])
        return self._job

    def predict(self, configuration: Configuration, *, price_per_hour: float | None = None,
                path: bool = True) -> Prediction:
        """Predict the step time of a configuration; for ``path`` see ``Baseline.predict``.

        Raises:
            ForetraceError: the configuration cannot be predicted; the message gives the reason.
        """
        return self.prepared(configuration).predict(price_per_hour=price_per_hour, path=path)

    def prepared(self, configuration: Configuration, alone: str | None = None) -> Prepared:
        """Return the baseline and remaining edits of a configuration. Raises as ``predict``.

        Args:
            configuration: the changes to prepare.
            alone: with ``comm_choices``, the backend that does all collectives instead.
        """
        wanted = self._with_law(configuration)
        if wanted.also and wanted.parallel is not None:
            raise EditError("Several captures are of their own ranks; leave --also or --parallel out.")
        if (wanted.also or wanted.code is not None) and not wanted.sizes:
            raise EditError("--also and --code are for other sizes; name one with --set, such as --set batch=64.")
        collectives = self._cluster(wanted, alone)
        if wanted.selected is not None and wanted.code is None and self._code is None:
            raise EditError("--selected says what masks select where a program is traced: leave --selected out, as "
                            "rows that a recording has are scaled as they are; or name the program with --code.")
        if self.shape_only:
            start, edits = self._made(wanted, collectives)
        else:
            start, edits = self._measured(wanted, alone)
        edits += made(wanted.edits)
        if collectives is not None and start.ran:
            recorded = None if wanted.from_topology is None else find_topology(wanted.from_topology)
            reference = None if wanted.comm_choices is None else collectives.by_one()
            edits.append(topology_edit.OnTopology(collectives, recorded, reference))
        return Prepared(start, edits, wanted != Configuration(), collectives)

    def _with_law(self, wanted: Configuration) -> Configuration:
        """Return the configuration with ``skew`` of a suite workload, which is no size, turned into an edit."""
        workload = None if self._job is None else self._job.graphs[0].meta.workload
        laws = [text.strip().partition("=")[2] for text in wanted.sizes if text.strip().startswith(f"{LAW_SETTING}=")]
        if not laws or not workload or LAW_SETTING not in workload.get("settings", {}):
            return wanted
        if len(laws) > 1 or "indices" in wanted.edits:
            raise EditError(f"--set {LAW_SETTING}= says by which law rows are looked up, and so does another option; "
                            "give one of them.")
        others = tuple(text for text in wanted.sizes if not text.strip().startswith(f"{LAW_SETTING}="))
        return wanted.with_values(sizes=others, edits={**wanted.edits, "indices": f"{LAW}{laws[0].rpartition(':')[2]}"})

    def check_named(self, wanted: Sequence[Configuration]) -> None:
        """Raise ``ForetraceError`` before any prediction if a device, cluster or plan is unknown, a profile is of
        another device, or a host cannot be read."""
        for device in dict.fromkeys(one.device for one in wanted if one.device is not None):
            find_device(device)
        for topology in dict.fromkeys(one.topology for one in wanted if one.topology is not None):
            find_topology(topology)
        for plan in dict.fromkeys(one.parallel for one in wanted if one.parallel is not None):
            ParallelPlan.parse(plan)
        self.check_profiles(wanted)
        if self.shape_only:
            for text in dict.fromkeys(one.host_from for one in wanted if one.host_from is not None):
                self._once("host model", self._host, text)

    def check_profiles(self, wanted: Iterable[Configuration]) -> None:
        """Raise ``ProfileError`` if a fitted model is neither of the recorded device nor of a requested one."""
        if not self._profiles:
            return
        names = dict.fromkeys(name for one in wanted for name in self._devices(one.device))
        if unused := [profile for name, profile in self._profiles.items() if name not in names]:
            raise fitted_profile.unused_error(unused, names)

    def _devices(self, wanted: str | None) -> list[str]:
        """Return the names of the devices whose models a prediction needs; empty if they are unknown."""
        target = None if wanted is None else find_device(wanted)
        if self._recorded is not None:
            known = [self._recorded.scenario.devices.source, target]
        else:
            traced = self._code_device if self._job is None else self._job.graphs[0].meta.device
            known = [self._recorded_on or target or find_device(traced)]
        return [spec.name for spec in known if spec is not None]

    def _plain(self, job: Job) -> Baseline:
        known = self._recorded_on
        models = None if known is None else self._profiles.get(known.name)
        found = baseline_of(job, self._step, device=known, models=models, profiled=self._profiled)
        found.with_models(self._profiles)
        source = found.scenario.devices.source
        profile = None if source is None else self._profiles.get(source.name)
        if profile is not None and (note := _other_clock(profile, job)):
            found.scenario = found.scenario.with_note(note)
        return found

    # -- a source that never ran --------------------------------------------------------------------------------------

    def _made(self, wanted: Configuration, collectives: CollectiveModel | None) -> tuple[Baseline, list[Edit]]:
        """Return a baseline made for the requested device, host and plan, and the edits left for its sizes."""
        spec = self._recorded_on or (None if wanted.device is None else find_device(wanted.device))
        host = None if wanted.host_from is None else self._once("host model", self._host, wanted.host_from)
        sizes = wanted.sizes
        edits: list[Edit] = []
        made: Job | None = None
        workload = None if self._job is None else self._job.graphs[0].meta.workload
        if wanted.also:
            raise EditError("--also is for recorded steps, and this one never ran; leave it out.")
        old, new = parse_settings(sizes)
        again = bool(workload or self._code)
        if wanted.code is not None:
            raise EditError("The step was traced by shapes already; trace it again with foretrace trace, or name "
                            "SCRIPT.py:FUNCTION as the source, and leave --code out.")
        if wanted.parallel is not None or (again and (sizes or wanted.selected is not None)):
            name = (self._job.graphs[0].meta.device if spec is None and self._job is not None
                    else shape_device(spec or find_device(self._code_device)))
            try:
                made = self._once("traced", self._traced, wanted.parallel, new, name, tuple(_straggling(wanted)),
                                  wanted.selected)
                sizes = ()
            except UnknownSizeError:
                # Old sizes given by the user (OLD:NEW) mean that the traced dimensions can be scaled instead.
                if wanted.parallel is not None or set(old) != set(new) or not are_sizes(new):
                    raise
        if sizes:
            edits.append(scaling.Sizes.parse(list(sizes)))
        start = baseline_of(made or self.job, device=spec, models=self._models_of_traced(spec), host=host,
                            collectives=collectives)
        return start.with_models(self._profiles), edits

    def _models_of_traced(self, spec: DeviceSpec | None) -> DeviceProfile | None:
        """Return the fitted models of the device that a step is made for: ``spec``, or the device it was traced for."""
        if not self._profiles:
            return None
        traced = self._code_device if self._job is None else self._job.graphs[0].meta.device
        return self._profiles.get((spec or find_device(traced)).name)

    def _traced(self, parallel: str | None, sizes: dict[str, int | str], device: str | TracedDevice,
                also: tuple[int, ...], selected: float | None = None) -> Job:
        graph = None if self._job is None else self._job.graphs[0]
        if parallel is None:
            return assemble_job([trace_again(graph, sizes, device, self._code, selected)])
        if graph is None or not graph.meta.workload:
            raise EditError("Only a workload of the suite can be traced again under a plan; trace your own script "
                            "under it with foretrace trace SCRIPT.py:FUNCTION --world-size N.")
        return parallel_ranks.traced(ParallelPlan.parse(parallel), graph.meta.workload, device, sizes=sizes, also=also)

    # -- a recorded source --------------------------------------------------------------------------------------------

    def _measured(self, wanted: Configuration, alone: str | None) -> tuple[Baseline, list[Edit]]:
        edits: list[Edit] = []
        if wanted.parallel is not None:
            ranks = tuple(_straggling(wanted))
            key = (wanted.parallel, wanted.sizes, wanted.topology, wanted.comm_profile, wanted.device,
                   wanted.comm_backend, wanted.comm_choices, alone, ranks)
            start = self._shared.once("ranks", key, lambda: self._on_ranks(wanted, alone, ranks))
        else:
            start, edits = self._sized(wanted)
        if wanted.device is not None:
            spec = find_device(wanted.device)
            if wanted.parallel is not None:  # its collectives must not hide that a CPU's step has no kernels
                self._shared.once("device", (spec,), lambda: Device(spec).apply(self._known().scenario))
            edits.append(Device(spec, self._profiles.get(spec.name)))
        if wanted.host_from is not None:
            if (what := _no_capture(wanted.host_from)) is not None:
                raise EditError(f"A recorded step cannot take its host from {wanted.host_from}, {what}: give "
                                "--host-from one capture of the same model, made on that host.")
            edits.append(HostFrom(self._once("host", self._other, wanted.host_from).graphs, wanted.host_from))
        return start, edits

    def _on_ranks(self, wanted: Configuration, alone: str | None, also: tuple[int, ...]) -> Baseline:
        plan = ParallelPlan.parse(wanted.parallel or "")
        _, new = parse_settings(wanted.sizes)
        workload = self.job.graphs[0].meta.workload
        if new and not workload:
            raise EditError("A step that cannot be traced again is not spread over ranks at other sizes too; leave "
                            "--set or --parallel out.")
        found = parallel_ranks.on_ranks(self._known(), plan, self._cluster(wanted, alone), sizes=new, also=also)
        settings = {**workload.get("settings", {}), **parallel_ranks.settings_under(plan, new)}
        samples, was = samples_of(settings), samples_of(workload.get("settings", {}))
        if samples is not None and was:
            found.scenario = found.scenario.with_samples(samples / was, workload["settings"]["batch"])
        # Ranks of a tensor- or pipeline-parallel group work on the same samples.
        return found if samples is None else found.with_items(samples * plan.dp / plan.world_size)

    def _sized(self, wanted: Configuration) -> tuple[Baseline, list[Edit]]:
        """Return other sizes by the best way available: the program traced again, or the nearest capture scaled."""
        recorded = self._known()
        if not wanted.sizes:
            return recorded, []
        old, new = parse_settings(wanted.sizes)
        reason = why_not(recorded, wanted.code)
        if reason is None and (wanted.code is not None or not wanted.also):
            try:
                start = self._shared.once("retraced", (new, old, wanted.code, wanted.selected), lambda: retrace(
                    recorded, new, old, code=wanted.code, selected=wanted.selected))
            except ShapeOnlyError as error:
                if isinstance(error, UnknownSizeError) or wanted.code is None:
                    raise
                return self._scaled_instead(wanted, error)
            return start, []
        if wanted.code is not None:
            raise EditError(f"{reason}; leave --code out.")
        if wanted.also:
            start, edit = self._once("nearest", self._nearest, wanted.also, parse_sets(wanted.sizes)[1], old)
            return start, [edit]
        graph = recorded.built.graphs[0]
        noted, again = noted_sizes(graph), self._once("way again", self._way_again, tuple(new))
        because = f"{reason}; the sizes of one capture were scaled instead." if graph.meta.workload and reason else ""
        try:
            edit = scaling.Sizes.parse(list(wanted.sizes), noted, because)
        except EditError as error:
            raise EditError(f"{error} {again}".strip()) from error
        return recorded, [replace(edit, again=again)]

    def _way_again(self, names: tuple[str, ...]) -> str:
        return way_again(self._known().built.graphs[0], names)

    def _scaled_instead(self, wanted: Configuration, error: ShapeOnlyError) -> tuple[Baseline, list[Edit]]:
        """Predict other sizes of a program that cannot be traced, by scaling its captures. Raises ``EditError`` if the
        recorded sizes are not named, or the captures cannot be scaled either."""
        old, new = parse_sets(wanted.sizes)
        known = {**noted_sizes(self._known().built.graphs[0]), **old}
        lacking = [name for name in new if name not in known]
        if lacking:
            named = " ".join(f"--set {name}=RECORDED:{new[name]}" for name in lacking)
            raise EditError(f"{error} Or name the recorded size too, so that the capture can be scaled instead: "
                            f"{named}.") from error
        start, edits = self._sized(wanted.with_values(code=None, selected=None))
        edits = [replace(edit, again="") if isinstance(edit, scaling.Sizes) else edit for edit in edits]
        try:
            for edit in edits:
                edit.apply(start.scenario)
        except EditError as other:
            raise EditError(f"{error} The capture cannot be scaled instead: {other}") from error
        note = f"The program could not be traced again, so that the capture was scaled: {error}"
        return start, [replace(edit, because=f"{edit.because} {note}".strip()) if isinstance(edit, scaling.Sizes)
                       else edit for edit in edits]

    def _nearest(self, also: tuple[str, ...], new: dict[str, int], old: dict[str, int]) -> tuple[Baseline, Edit]:
        """Return the capture with sizes nearest to the requested ones, and the change of its sizes."""
        others = [parse_also(text) for text in also]
        captures = [self._known(), *(self._once("capture", self._capture, path) for path, _ in others)]
        graphs = [one.built.graphs[0] for one in captures]
        sizes = captured_sizes(graphs, [old, *(sizes for _, sizes in others)], new)
        wanted = {**sizes[0], **new}
        chosen = nearest(sizes, wanted)
        for (path, _), graph, own in zip(others, graphs[1:], sizes[1:], strict=True):
            if not graph.meta.workload:  # a workload of the suite records its sizes itself
                size_captures.check_sizes((graphs[0], graph), (sizes[0], own), path)
        at = [", ".join(f"{name}={size}" for name, size in one.items()) for one in sizes]
        changes = tuple((name, size, wanted[name]) for name, size in sizes[chosen].items() if size != wanted[name])
        what = "is nearest and was scaled" if changes else "has the wanted size and is used as it is"
        because = f"Of the captures at {' and '.join(at)} the one at {at[chosen]} {what}."
        drift = drift_between(captures[0].scenario, captures[chosen].scenario) if chosen and changes else None
        return captures[chosen], scaling.Sizes(changes, because, drift, self._way_again(tuple(new)))

    def _capture(self, path: str) -> Baseline:
        known, job = self._known(), self._other(path)
        was, cycle = (graphs[0].meta.cycle for graphs in (known.built.graphs, job.graphs))
        if cycle != was:
            raise EditError(f"A step of {path} is {cycle} of its recorded steps and one of the source's is {was}: give "
                            "--also captures of as many, or say how many steps are one with --cycle.")
        device = known.scenario.devices.source
        return baseline_of(job, device=device, profiled=self._profiled).with_models(self._profiles)

    def _known(self) -> Baseline:
        assert self._recorded is not None
        return self._recorded

    # -- shared -------------------------------------------------------------------------------------------------------

    def _cluster(self, wanted: Configuration, alone: str | None = None) -> CollectiveModel | None:
        """Return the named cluster, limited to the backend ``alone`` if given; for a plan on another device, that
        device's usual cluster; else ``None``."""
        if (wanted.topology, wanted.comm_profile, wanted.comm_choices) != (None, None, None):
            found = self._once("cluster", self._named_cluster, wanted.topology, wanted.comm_profile,
                               wanted.comm_backend, wanted.comm_choices, wanted.device, wanted.parallel)
            return found if alone is None else found.by_one(None if found.profile is None else alone)
        if wanted.comm_backend is not None:
            raise EditError(f"Nothing says on which cluster {wanted.comm_backend} would run; name it with --topology, "
                            "or give its measurements with --comm-profile.")
        if wanted.parallel is None or wanted.device is None:
            return None
        ranks = ParallelPlan.parse(wanted.parallel).world_size
        try:
            return CollectiveModel(topology_of(find_device(wanted.device), ranks))
        except PlanError:  # no known node has the device: the device's own links are used
            return None

    def _named_cluster(self, topology: str | None, profile: str | None, backend: str | None, choices: str | None,
                       device: str | None, parallel: str | None) -> CollectiveModel:
        """Return the cluster that a configuration names; if it names none, usual nodes of its device for its ranks."""
        def usual() -> Topology:
            graphs = self.job.graphs
            recorded = None if self._recorded is None else self._recorded.scenario.devices.source
            known = self._recorded_on or recorded
            if known is None and not device and not graphs[0].meta.device:
                raise EditError("The trace does not say on which device it was recorded, and so not on which cluster; "
                                "name the cluster with --topology, or the device with --from-device.")
            spec = find_device(device or graphs[0].meta.device) if device or known is None else known
            ranks = max(len(graphs), *(graph.meta.world_size for graph in graphs))
            return topology_of(spec, ParallelPlan.parse(parallel).world_size if parallel else ranks)

        return clusters.cluster_of(topology, profile, backend, choices, usual)

    def _host(self, text: str) -> HostModel:
        return host_by_name(text, self._other)

    def _other(self, path: str) -> Job:
        return self._read([path])

    def _once(self, name: str, make: Callable[..., T], *arguments: object) -> T:
        """Return ``make(*arguments)``. The last few results, and errors, are kept for equal arguments."""
        return self._shared.once(name, arguments, lambda: make(*arguments))


def _straggling(wanted: Configuration) -> list[int]:
    """Return the straggler ranks: no other rank represents them."""
    return [edit.rank for edit in made(wanted.edits) if isinstance(edit, Straggler)]


def _no_capture(host: str) -> str | None:
    """Return a phrase on a host's text that does not name one capture; ``None`` if it may name one."""
    if "," in host:
        return "which names several captures"
    kind = "a shipped host" if host in host_names() else (
        "a file of foretrace calibrate --host" if is_host_file(host) else None)
    return None if kind is None else f"{kind} with only the usual cost of each operation"


def _other_clock(profile: DeviceProfile, job: Job) -> str:
    """Return how a profile's clock differs from a recording's, as a sentence; empty if it does not."""
    recorded = [graph.meta.clock_mhz for graph in job.graphs if graph.meta.clock_mhz > 0]
    measured = profile.provenance.get("clock_mhz")
    if not recorded or not measured or not are_unlike_clocks(clock := statistics.median(recorded), measured):
        return ""
    return (f"The profile of {profile.device.name} was measured at {measured:,.0f} MHz and the step recorded at "
            f"{clock:,.0f} MHz, {clock / measured:.2f} times that: kernels that the step has not run are predicted at "
            "the profile's clock.")
