"""Checks of what a capture and the commands around it need on this machine, each with its finding and advice."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import util
from pathlib import Path
from typing import Any

from tracer.capture import context
from tracer.capture.recorder import QuietStderr
from tracer.cores import usable_cores
from tracer.gpu_state import GpuState, find_gpus, why_none
from tracer.output_file import SCARCE_BYTES, free_bytes, writing_error
from tracer.versions import installed_version

ADMIN_ONLY = Path("/proc/driver/nvidia/params")
"""File in which NVIDIA's driver says who may use its performance counters (``RmProfilingAdminOnly``)."""
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
BUSY_SHARE = 0.5
"""Load per core above which timed steps also measure other work of the machine."""
LEAST_SHARED_BYTES = 1 << 30  # chosen: Docker's default of 64 MB is too little for a batch of images in each worker


class MachineVerdict(Enum):
    """The verdict of a check."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One check.

    Attributes:
        subject: What was checked.
        verdict: ``PROBLEM`` if a part of foretrace will not work, ``NOTE`` if it is less exact or slower.
        found: The finding.
        advice: What to do about it; empty if nothing is needed.
    """

    subject: str
    verdict: MachineVerdict
    found: str
    advice: str = ""


def examine(folder: Path, *, record: bool = True) -> Iterator[MachineCheck]:
    """Yield the findings of each check in turn; a check that fails itself yields a note.

    Args:
        folder: Where captures would be written.
        record: Also record a small profile with PyTorch, which shows whether device events are recorded.
    """
    checks: list[Callable[[], Iterator[MachineCheck]]] = [
        _python, _processor, _torch, _gpus, _counters, lambda: _writable(folder), _shared_memory]
    if record:
        checks.append(_profile)
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # drivers and containers raise many types
            yield MachineCheck(check.__name__.strip("_<>"), MachineVerdict.NOTE, f"could not be looked at: {error}")


def _found(subject: str, found: str, amiss: bool, advice: str, verdict: MachineVerdict = MachineVerdict.NOTE
           ) -> MachineCheck:
    """Return a check that has the verdict and advice only if something is ``amiss``."""
    return MachineCheck(subject, verdict, found, advice) if amiss else MachineCheck(subject, MachineVerdict.OK, found)


def _python() -> Iterator[MachineCheck]:
    version = installed_version("foretrace") or "not installed as a package"
    yield MachineCheck("foretrace", MachineVerdict.OK,
                       f"{version}, Python {platform.python_version()} on {platform.system()}")


def _processor() -> Iterator[MachineCheck]:
    cores = usable_cores()
    yield MachineCheck("processor", MachineVerdict.OK,
                       f"{context.cpu_model()}, {cores} core{'' if cores == 1 else 's'} usable")
    with suppress(OSError):
        load = os.getloadavg()[0]
        busy = load > BUSY_SHARE * cores
        yield _found("other work", f"load {load:.1f} on {cores} cores", busy,
                     "Timed steps measure it too: record on a quiet machine.")
    with suppress(OSError):
        governor = GOVERNOR.read_text().strip()
        saving = governor in ("powersave", "conservative")
        yield _found("processor's clock", f"governor {governor}", saving,
                     "Set it to performance while recording: cpupower frequency-set -g performance.")


def _torch() -> Iterator[MachineCheck]:
    if util.find_spec("torch") is None:
        yield MachineCheck("PyTorch", MachineVerdict.NOTE, "not installed",
                      "Reading and predicting need none; to record: pip install 'foretrace[capture]'.")
        return
    version = installed_version("torch")
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    yield _found("PyTorch", version, numbers < [2, 6], "Captures need 2.6 or newer.", MachineVerdict.PROBLEM)


def _gpus() -> Iterator[MachineCheck]:
    devices = find_gpus()
    if devices is None:
        lacking = [package for package, module in (("nvidia-ml-py", "pynvml"), ("amdsmi", "amdsmi"))
                   if util.find_spec(module) is None]
        ask = f" (NVIDIA's driver is asked through nvidia-smi or {lacking[0]})" if "nvidia-ml-py" in lacking else ""
        yield MachineCheck("GPU", MachineVerdict.NOTE, f"none found{ask}",
                      "Captures record the host alone; predictions need no GPU.")
        return
    for index in range(len(devices)):
        yield _gpu(index, devices.state(index))


def _gpu(index: int, state: GpuState) -> MachineCheck:
    clock = f", {state.sm_mhz} of {state.max_sm_mhz} MHz" if state.sm_mhz and state.max_sm_mhz else ""
    power = f", {state.power_w:.0f} of {state.power_limit_w:.0f} W" if state.power_w and state.power_limit_w else ""
    text = f"{state.name}, driver {state.driver or 'not known'}{clock}{power}"
    if state.slowed_by:
        return MachineCheck(f"GPU {index}", MachineVerdict.NOTE, f"{text}; slowed by {' and '.join(state.slowed_by)}",
                       "Kernels are timed at that clock: let it cool, or raise the limit, before recording.")
    if state.processes > 0:
        return MachineCheck(f"GPU {index}", MachineVerdict.NOTE, f"{text}; {state.processes} processes compute on it",
                       "Their kernels slow yours: record on a device of your own.")
    return MachineCheck(f"GPU {index}", MachineVerdict.OK, text)


def _counters() -> Iterator[MachineCheck]:
    if not ADMIN_ONLY.exists():
        return
    admin_only = "RmProfilingAdminOnly: 1" in ADMIN_ONLY.read_text(errors="replace")
    refused = admin_only and hasattr(os, "geteuid") and os.geteuid() != 0
    yield _found("GPU events (CUPTI)", "performance counters are the administrator's alone" if refused else "allowed",
                 refused, "Kernel times are recorded all the same; if they are not, load the driver with "
                 "NVreg_RestrictProfilingToAdminUsers=0 or give the container CAP_SYS_ADMIN.")


def _writable(folder: Path) -> Iterator[MachineCheck]:
    subject, folder = "captures' directory", folder.absolute()
    if (error := writing_error(folder)) is not None:
        yield MachineCheck(subject, MachineVerdict.PROBLEM, f"{folder} cannot be written ({error.strerror})",
                      "Record into another directory: --out DIR.")
        return
    free = free_bytes(folder)
    room = "" if free is None else f", {free / 1e9:,.1f} GB free"
    yield _found(subject, f"{folder} can be written{room}", free is not None and free < SCARCE_BYTES,
                 "Three steps of a large model take 1 GB.")


def _shared_memory() -> Iterator[MachineCheck]:
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    size = shutil.disk_usage(place).total
    yield _found("shared memory", f"{size / 1e9:.1f} GB", size < LEAST_SHARED_BYTES,
                 "Data loaders' workers may fail there: start the container with --shm-size=8g.")


def _profile() -> Iterator[MachineCheck]:
    """Check that a profiler sees a matrix product, on the GPU if there is one."""
    subject = "profiler"
    if util.find_spec("torch") is None:
        return
    torch: Any = sys.modules.get("torch") or __import__("torch")
    from torch.profiler import ProfilerActivity, profile

    on_device = torch.cuda.is_available()
    if not on_device and find_gpus() is not None:
        yield MachineCheck("GPU of PyTorch", MachineVerdict.PROBLEM, f"none{f': {why}' if (why := why_none()) else ''}",
                           "Captures and calibrations would be the CPU's: install the PyTorch of this GPU's driver, or "
                           "unset the variable that hides it.")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    matrix = torch.ones(64, 64, device="cuda" if on_device else "cpu")
    quiet = QuietStderr()
    with quiet.quiet(), profile(activities=activities, record_shapes=True) as recorded:
        _ = matrix @ matrix
        if on_device:
            torch.cuda.synchronize()
    quiet.close()
    events = recorded.events()
    if not any(event.name == "aten::mm" for event in events):
        yield MachineCheck(subject, MachineVerdict.PROBLEM, "it recorded no operation",
                           "Reinstall PyTorch; captures need Kineto.")
        return
    kernels = sum("CUDA" in str(event.device_type) for event in events)
    if on_device and not kernels:
        yield MachineCheck(subject, MachineVerdict.PROBLEM, "operations arrive, the device's kernels do not",
                      "CUPTI is missing or refused: see 'GPU events' above, and that no other profiler (Nsight) runs.")
        return
    yield MachineCheck(subject, MachineVerdict.OK, f"operations{' and kernels' if on_device else ''} arrive")
