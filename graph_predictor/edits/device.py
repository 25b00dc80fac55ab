"""The job on another device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import CallEdit, EditError, Scenario
from kernel_models.device import DeviceSpec, find_device
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import Models


@dataclass(frozen=True)
class Device:
    """Run the job on another device.

    Assumes that the same operations run, with the target's own kernels: each kernel takes its measured time ×
    model(target) / model(source). Convolutions in fp32 become TF32 on devices with TF32 units (cuDNN's default); TF32
    becomes fp32 on devices without. Matrix products in fp32 stay fp32 (PyTorch's default since 1.12). Host time, launch
    latencies and gaps between kernels stay those of the recording, unless the host is changed too. Collectives keep
    their times.

    Attributes:
        device: a name, or the figures themselves.
        models: fitted models of it; without them its data sheet and default efficiencies.
    """

    device: str | DeviceSpec
    models: Models | None = None

    @property
    def spec(self) -> DeviceSpec:
        """Return the target's figures."""
        return find_device(self.device) if isinstance(self.device, str) else self.device

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"on {self.spec.name}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        spec = self.spec
        scenario = scenario.claim("the device", f"--device {spec.name}")
        if scenario.built.computes_on_host:
            raise EditError(f"The trace has no GPU work, so that nothing of it would run on {spec.name}: trace the "
                            "step by shapes (foretrace trace) to predict it there.")
        source = scenario.known_source()
        if spec.vendor == "host" and source.vendor != "host":
            raise EditError(f"The trace is of {source.name}'s kernels, and {spec.name} is a CPU, which runs other "
                            f"operations: trace the step by shapes for it (foretrace predict SCRIPT.py:FUNCTION "
                            f"--device {spec.name}).")
        if spec.name == source.name:
            return replace(scenario, devices=replace(
                scenario.devices, target=spec, source_models=self.models or scenario.devices.source_models))
        tf32 = _TF32("tf32" in spec.matrix_tflops)
        edits: dict[str, CallEdit] = {**scenario.kernels.call_edits, "0 tf32 by device": tf32}
        note = f"Kernels are scaled from {source.name} to {spec.name}"
        scenario = replace(scenario, devices=replace(scenario.devices, target=spec, target_models=self.models),
                           kernels=replace(scenario.kernels, call_edits=edits))
        if "tf32" in spec.matrix_tflops and "tf32" not in source.matrix_tflops:
            return scenario.with_note(f"{note}; fp32 convolutions run as TF32 there (cuDNN's default), matrix "
                                      "products in fp32.")
        if "tf32" in source.matrix_tflops and "tf32" not in spec.matrix_tflops:
            return scenario.with_note(f"{note}; what ran as TF32 runs in fp32 there.")
        return scenario.with_note(f"{note}.")


@dataclass(frozen=True)
class _TF32:
    """Convert fp32 convolutions to TF32 on a device with TF32 units, and TF32 work to fp32 on a device without."""

    units: bool

    def __call__(self, call: OpCall) -> tuple[OpCall, ...]:
        if self.units:
            if call.family is Family.CONV and call.dtype == "fp32":
                call = replace(call, dtype="tf32")
        elif call.dtype == "tf32":
            call = replace(call, dtype="fp32")
        return (call,)
