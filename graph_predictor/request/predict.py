"""``predict``: the step time of one configuration, with the options of the command ``foretrace predict``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graph_predictor.edits.registry import Value
from graph_predictor.prediction.predictor import checked_edits
from graph_predictor.request.study import Configuration, Study, is_script
from kernel_models.device import DeviceSpec, find_device
from kernel_models.profile import DeviceProfile, load_profile
from tracer.job import AnyJob, Job, assemble_job, graphs_of, read_job

if TYPE_CHECKING:
    from graph_predictor.prediction.result import Prediction
    from graph_predictor.prediction.scenario import Edit


def predict(source: AnyJob | str, edits: Sequence[Edit] = (), *, device: str | None = None,
            from_device: str | DeviceSpec | None = None,
            profile: str | DeviceProfile | Sequence[str | DeviceProfile] = (), host_from: str | None = None,
            topology: str | None = None, comm_profile: str | None = None, comm_backend: str | None = None,
            comm_choices: str | None = None, from_topology: str | None = None, parallel: str | None = None,
            sizes: Mapping[str, object] | None = None, code: str | None = None, selected: float | None = None,
            also: Sequence[str] = (), step: str | int | range | None = None, price_per_hour: float | None = None,
            profiled: bool = False, **options: Value) -> Prediction:
    """Predict the step time of a configuration that was never run.

    Arguments have the names and texts of the options of ``foretrace predict``, an edit's among them:
    ``predict("runs/a", device="h200-sxm", sizes={"batch": 64}, cuda_graphs=True)``.

    Args:
        source: a job (``foretrace.read``), the path of a recording, or SCRIPT.py:FUNCTION.
        edits: objects of ``foretrace.edits``, applied after the options.
        device, topology, parallel: the device, cluster and plan to predict for.
        from_device, from_topology: the device and cluster of the recording, if it does not state them.
        profile: fitted models of devices, or their files.
        host_from: the capture whose host is used.
        comm_profile, comm_backend, comm_choices: measured collectives.
        sizes: ``--set``: other sizes by name; "32:64" if the recording does not state the old one.
        code, selected, also: how other sizes are predicted, see the command's options.
        step: the recorded step to repeat; by default the last equal ones.
        price_per_hour: price of one device, for the cost of a step.
        profiled: predict the step under the profiler.
        options: edits by the name of their option.

    Raises:
        ForetraceError: the source cannot be read, there is no such option, or the configuration cannot be predicted.
    """
    extra = checked_edits(edits)
    script = source if isinstance(source, str) and is_script([source]) else None
    job = None if script is not None else job_of(source)
    given = [profile] if isinstance(profile, (str, DeviceProfile)) else profile
    known = [load_profile(each) if isinstance(each, str) else each for each in given]
    recorded_on = find_device(from_device) if isinstance(from_device, str) else from_device
    wanted = Configuration(
        device=device, parallel=parallel, topology=topology, from_topology=from_topology, comm_profile=comm_profile,
        comm_backend=comm_backend, comm_choices=comm_choices, host_from=host_from,
        sizes=tuple(f"{name}={value}" for name, value in (sizes or {}).items()), also=tuple(also), code=code,
        selected=selected, edits={name.replace("_", "-"): value for name, value in options.items()})
    study = Study(job, step, recorded_on=recorded_on, profiles=known, code=script, device=device, profiled=profiled)
    study.check_profiles([wanted])
    prepared = study.prepared(wanted)
    return replace(prepared, edits=[*prepared.edits, *extra]).predict(price_per_hour=price_per_hour)


def job_of(source: AnyJob | str | os.PathLike[str]) -> Job:
    """Return a job, read from a path if necessary. Raises ``ForetraceError`` if it is no job and no readable path."""
    if isinstance(source, str | os.PathLike):
        return read_job(source)
    return source if isinstance(source, Job) else assemble_job(list(graphs_of(source)))
