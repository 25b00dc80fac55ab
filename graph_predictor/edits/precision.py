"""Other number formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import CallEdit, EditError, Scenario
from kernel_models.op_call import Family, OpCall, itemsize

PRODUCTS = frozenset({Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT})
"""Families that autocast runs in 16 bits (torch.amp, "CUDA Ops that can autocast to float16")."""
TYPES = frozenset({"fp32", "tf32", "bf16", "fp16"})
FOLLOWING = frozenset({Family.ELEMENTWISE, Family.POOLING, Family.NORM, Family.CONCAT, Family.COPY, Family.INTERPOLATE,
                       Family.INDEX, Family.REDUCTION})
"""Families that read and write the activations these products leave. Softmax, losses and the optimizer stay in fp32."""


@dataclass(frozen=True)
class Precision:
    """Matrix work in another format.

    ``bf16`` and ``fp16`` stand for autocast: products run in 16 bits and the activations they leave are read and
    written in 16 bits by what follows; softmax, losses and optimizer stay in fp32. ``tf32`` and ``fp32`` switch the
    products of fp32 data, and switch autocast off where the recording computed in 16 bits. Assumes that parameters are
    fp32, and that casts of weights are hidden in their neighbours (autocast caches them once a step).
    """

    dtype: str

    def describe(self) -> str:
        """One phrase."""
        return f"products in {self.dtype}"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if self.dtype not in ("bf16", "fp16", "tf32", "fp32"):
            raise EditError(f"Products cannot be switched to {self.dtype!r}: choose bf16, fp16, tf32 or fp32.")
        scenario = scenario.claim("the precision", f"--dtype {self.dtype}")
        scenario.known_source()
        spec = scenario.devices.target or scenario.devices.source
        if spec is not None and self.dtype not in spec.matrix_tflops and self.dtype in ("tf32", "bf16"):
            raise EditError(f"{spec.name} has no matrix units for {self.dtype}: the work would run no faster; choose "
                            "another device or type.")
        change = _Products(self.dtype)
        if not any(change(call) != (call,) for calls in scenario.work.calls for call in calls):
            raise EditError(f"No operation of the step changes with products in {self.dtype}: none is known to "
                            "compute in another type.")
        edits: dict[str, CallEdit] = {**scenario.kernels.call_edits, "1 precision": change}
        return replace(scenario, kernels=replace(scenario.kernels, call_edits=edits))


@dataclass(frozen=True)
class _Products:
    dtype: str

    def __call__(self, call: OpCall) -> tuple[OpCall, ...]:
        if "unsized" in call.flags or call.family not in PRODUCTS | FOLLOWING or call.dtype not in TYPES:
            return (call,)
        # Between fp32 and TF32 only products differ, and what they read and write is fp32.
        dtype = "fp32" if self.dtype == "tf32" and call.family in FOLLOWING else self.dtype
        if call.family in FOLLOWING and itemsize(dtype) == itemsize(call.dtype):
            return (replace(call, dtype=dtype),)
        change = itemsize(dtype) / itemsize(call.dtype)
        # Flash kernels take 16 bits; in fp32 the memory-efficient ones run.
        wide = call.family is Family.ATTENTION and change > 1
        return (replace(call, kind=call.kind.replace("flash", "efficient") if wide else call.kind, dtype=dtype,
                        bytes_read=call.bytes_read * change, bytes_written=call.bytes_written * change),)
