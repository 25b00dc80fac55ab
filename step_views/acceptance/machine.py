"""Part 0: the machine, whether it can record, and whether its device is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kernel_models.device import DeviceError, resolve_device
from step_views.acceptance.parts import AcceptanceScale
from step_views.acceptance.points import AcceptancePoint, PointVerdict, is_true, noted
from tracer.campaign.lab import Lab
from tracer.capture import context, readiness
from tracer.gpu_state import find_gpus

_VERDICTS = {readiness.MachineVerdict.OK: PointVerdict.PASSED, readiness.MachineVerdict.NOTE: PointVerdict.NOTED,
             readiness.MachineVerdict.PROBLEM: PointVerdict.FAILED}


def machine(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Check the machine as ``foretrace doctor`` does, and the name of its device."""
    for check in readiness.examine(folder):
        yield AcceptancePoint(check.subject, "no problem", f"{check.found} {check.advice}".strip(),
                              _VERDICTS[check.verdict])
    driver = find_gpus()
    yield is_true("device of PyTorch", "the GPU that the driver shows", driver is None or scale.is_cuda,
                  f"{scale.device}; the driver shows {0 if driver is None else len(driver)} GPUs")
    lab = Lab(scale.device)
    kept = lab.random(1)  # a device counts as used only with memory on it
    facts = context.collect_context()
    hardware, software = facts.get("hardware", {}), facts.get("software", {})
    name = str(hardware.get("device", ""))
    yield is_true("device of a capture", "the GPU" if scale.is_cuda else "CPU", (name != "CPU") == scale.is_cuda, name)
    try:
        spec = resolve_device(name, hardware.get("total_memory"), hardware.get("multi_processor_count"))
        yield is_true("device known", "a data sheet has it", True, spec.name)
    except DeviceError as error:
        yield is_true("device known", "a data sheet has it", False, str(error))
    del kept
    yield noted("versions", ", ".join(f"{key} {value}" for key, value in software.items()))
