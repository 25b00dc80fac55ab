"""What holds for every operation: no arguments make it fail, and what a call says of itself decides FLOPs and bytes.

The registry of families, asked first by several threads at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.families import load, registry
from kernel_models.op_call import DIMENSIONS, OpCall
from kernel_models.operation import Operation, backward_calls_of, calls_of
from tracer.views import Argument

load()
NAMES = [*registry.FORWARD, *registry.BACKWARD, "triton_red_fused_0", "aten::_foreach_add_", "lib::unknown"]

sizes = st.lists(st.integers(0, 6), max_size=5).map(tuple)
tensors = st.builds(Argument, st.sampled_from(["float", "c10::BFloat16", "long int", "bool", "double"]), sizes)
lists = st.builds(Argument, st.just("TensorList"), st.lists(sizes, max_size=3).map(tuple))
numbers = st.builds(lambda value: Argument("Scalar", (), None, str(value)),
                    st.one_of(st.integers(-3, 9), st.booleans(), st.floats(-2, 2)))
number_lists = st.builds(lambda values: Argument("ScalarList", (), None, str(values)),
                         st.lists(st.integers(0, 6), max_size=5))
arguments = st.lists(st.one_of(tensors, tensors, lists, numbers, number_lists, st.just(Argument(""))),
                     max_size=12).map(tuple)


def well_formed(call: OpCall) -> bool:
    return (len(call.dims) == len(DIMENSIONS[call.family]) and all(isinstance(n, int) and n >= 0 for n in call.dims)
            and min(call.flops, call.bytes_read, call.bytes_written) >= 0 and call.flags == tuple(sorted(call.flags)))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), arguments)
def test_any_arguments_give_well_formed_calls(name: str, given_arguments: tuple[Argument, ...]) -> None:
    for calls in (calls_of(Operation(name, given_arguments)), backward_calls_of(Operation(name, given_arguments))):
        for call in calls:
            assert well_formed(call), call


def test_work_without_recorded_arguments_keeps_its_family() -> None:
    for name in (name for name, rule in registry.FORWARD.items() if not rule.is_free):
        call, = calls_of(Operation(name))
        assert (call.family, "unsized" in call.flags) == (registry.FORWARD[name].family, True), name


def test_equal_calls_have_equal_flops_and_bytes() -> None:
    """Over every registered operation with arguments of a few sizes and types, drawn at random."""
    random = Random(7)
    shapes = [(4, 6), (6, 4), (1, 6), (4, 1), (24,), (2, 3, 4), (2, 4, 3, 2), (4, 6, 1, 1), ()]
    kinds = ["float", "c10::BFloat16", "long int", "bool"]
    values = ["", "1", "2", "True", "[1, 1]", "[2, 2]", "[4, 6]"]
    first: dict[OpCall, OpCall] = {}
    for name in NAMES:
        for _ in range(9):
            op = Operation(name, tuple(
                Argument(random.choice(kinds), random.choice(shapes)) if random.random() < 0.65 else
                Argument("Scalar", (), None, random.choice(values)) for _ in range(10)))
            for call in (*calls_of(op), *backward_calls_of(op)):
                other = first.setdefault(call, call)  # is equal, so priced as one
                assert (other.flops, other.bytes_read, other.bytes_written) == (
                    call.flops, call.bytes_read, call.bytes_written), (other, call)
    assert len(first) > 2000


def wan_operations(folder: Path) -> pd.DataFrame:
    path = folder / "kernels" / "h100_wan_video_ops.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    frame = pd.read_parquet(path)
    frame = frame[frame["name"].str.fullmatch(r"aten::\w+")]
    return frame[frame["Input Dims"].str.startswith("(")]


def operation_of(row: pd.Series) -> Operation:
    from ast import literal_eval

    dims, types, strides, values = (literal_eval(row[column]) for column in (
        "Input Dims", "Input type", "Input Strides", "Concrete Inputs"))
    return Operation(row["name"], tuple(
        Argument(*parts) for parts in zip(types, dims, strides, values, strict=True)), "bf16")


# TraceLens does not count the bias of convolutions (one addition an output: 3% of a product over one channel's 3×3×3),
# counts one operation for a SiLU where we count four and five for layer norm's eight, and none for copies' zero.
_FLOPS_DIFFER = {"aten::convolution": (1.0, 1.04), "aten::silu": (4.0, 4.0), "aten::layer_norm": (1.59, 1.61)}
# It counts broadcast inputs as often as they are used, the result of a number times a bf16 tensor as fp32, and leaves
# out the statistics that norms, reductions' results and attention's log-sum-exp add.
_BYTES_DIFFER = {"aten::mul": (0.66, 1.001), "aten::div": (0.66, 1.001), "aten::add": (0.99, 1.001),
                 "aten::_scaled_dot_product_flash_attention": (1.0, 1.01),
                 "aten::_scaled_dot_product_efficient_attention": (1.0, 1.01)}


@pytest.mark.real_traces
def test_flops_and_bytes_agree_with_tracelens(data_folder: Path) -> None:
    compared = {"flops": 0, "bytes": 0}
    for _, row in wan_operations(data_folder).iterrows():
        calls = calls_of(operation_of(row))
        flops, moved = sum(call.flops for call in calls), sum(call.bytes_moved for call in calls)
        for theirs, ours, limits, what in (
            (float(row["GFLOPS"] or "nan") * 1e9, flops, _FLOPS_DIFFER.get(row["name"], (0.9999, 1.0001)), "flops"),
            (float(row["Data Moved (MB)"] or "nan") * 2**20, moved, _BYTES_DIFFER.get(row["name"], (0.9999, 1.0011)),
             "bytes"),
        ):
            if not theirs > 0 or (row["name"] == "aten::copy_" and what == "flops"):
                continue
            compared[what] += 1
            assert limits[0] <= ours / theirs <= limits[1], (row["name"], row["Input Dims"], what, ours, theirs)
    assert compared["flops"] > 150
    assert compared["bytes"] > 250


@pytest.mark.real_traces
def test_no_operation_of_the_h100_beats_its_memory_or_arithmetic(data_folder: Path) -> None:
    """3.35 TB/s and 989 TFLOP/s: a wrong formula shows as an impossible rate (larger than L2: 50 MB)."""
    rates = []
    for _, row in wan_operations(data_folder).iterrows():
        seconds = float(row["Kernel Time (µs)_mean"]) * 1e-6
        calls = calls_of(operation_of(row))
        moved = sum(call.bytes_moved for call in calls)
        if moved > 100e6:
            rates.append(moved / seconds)
        assert sum(call.flops for call in calls) / seconds < 989e12, row["name"]
    assert len(rates) > 100
    assert max(rates) < 3.35e12
    assert np.median(rates) > 0.2e12


PROGRAM = """
import sys, threading
sys.setswitchinterval(1e-6)
from kernel_models.families import registry
NAMES = ("aten::addmm", "aten::convolution", "aten::embedding", "aten::_foreach_add_", "aten::native_layer_norm")
ready, found = threading.Barrier(3), []

def ask():
    ready.wait()
    found.append(sum(registry.forward_rule(name) is not None for name in NAMES))

threads = [threading.Thread(target=ask) for _ in range(3)]
[one.start() for one in threads]
[one.join() for one in threads]
print(*found)
"""


def test_every_thread_finds_all_families() -> None:
    """One that asks while another imports them waits; it priced all work as unknown."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5"] * 3
