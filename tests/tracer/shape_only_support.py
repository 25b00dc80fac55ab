"""A real CPU run beside a shape-only trace: the profiler's own account of one step, independent of our recorder."""

from __future__ import annotations

import difflib
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer import read_kineto
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.workloads import Settings, create

Call = tuple[str, tuple[Any, ...]]
"""An operator and its arguments: dtype and shape of each."""



def profiled_step(settings: Settings, folder: Path) -> ExecutionGraph:
    """The second step of a real run under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    workload = create(settings)
    batches = iter(workload.batches())
    workload.step(next(batches))
    batch = next(batches)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        workload.step(batch)
    path = folder / f"{settings.WORKLOAD}.json"
    profiler.export_chrome_trace(str(path))
    assert torch.autograd._profiler_enabled() is False
    return read_kineto(path)


def calls(graph: ExecutionGraph) -> list[Call]:
    """Every operation of a trace."""
    return [call(graph, row) for row in range(len(graph.ops))]


def call(graph: ExecutionGraph, row: int) -> Call:
    name = graph.string(int(graph.ops.name[row]))
    # The profiler leaves lists with missing tensors (the indices of aten::index) empty; a trace has them.
    listed = name in ("aten::index", "aten::index_put", "aten::_index_put_impl_")
    # It also leaves out the shapes of lists of more than 30 tensors.
    return name, tuple(
        ("", ()) if listed and _kind(a.dtype) == "TensorList" else
        ("", ()) if a.dtype == "ScalarList" and a.value.count(",") >= _LONG_LIST else
        (_kind(a.dtype), () if _kind(a.dtype) == "TensorList" and len(a.shape or ()) > _LONG_LIST else a.shape)
        for a in graph.arguments(row))


def _kind(dtype: str) -> str:
    """A trace says what type the tensors of a list have, ``TensorList[c10::Half]``; the profiler does not."""
    return dtype.partition("[")[0]


def dispatched(real: ExecutionGraph, names: set[str]) -> list[Call]:
    """The calls of a real run at the level a trace has: of nested operations the outermost one whose name the trace
    (or a substitution) knows, else what lies inside it."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(real.ops.parent.tolist()):
        children.setdefault(parent, []).append(row)
    return [call(real, row) for row in _outermost(real, children, NONE, names)]


def _outermost(real: ExecutionGraph, children: dict[int, list[int]], parent: int, names: set[str]) -> Iterator[int]:
    for row in sorted(children.get(parent, ()), key=lambda row: (real.ops.start_ns[row], row)):
        name = real.string(int(real.ops.name[row]))
        inside = {real.string(int(real.ops.name[child])) for child in children.get(row, ())}
        # A composite one that calls itself is an overload made of another (``where`` with a number).
        if real.ops.kind[row] == OpKind.OPERATION and name in names and not (name in inside and _is_composite(name)):
            yield row
        elif row in children:
            yield from _outermost(real, children, row, names)
        elif real.ops.kind[row] == OpKind.OPERATION and name.startswith("aten::") and not _is_composite(name):
            yield row


def _is_composite(name: str) -> bool:
    """Whether an operator only calls others: with none inside it did nothing (``to`` the type it has already)."""
    import torch

    packet = getattr(torch.ops.aten, name.partition("::")[2], None)
    operators = [getattr(packet, overload).name() for overload in packet.overloads()] if packet is not None else []
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator, "CompositeImplicitAutograd") for operator in operators
               if torch._C._dispatch_has_kernel(operator))


GONE = {
    "cpu": """
        _embedding_bag _embedding_bag_backward _index_put_impl_ _local_scalar_dense _reshape_alias _to_copy
        _unsafe_view add add_ as_strided clone div_ empty fill_ index_add_ index_put_ linalg_vector_norm
        masked_fill_ max min mkldnn_rnn_layer mkldnn_rnn_layer_backward mul_ native_batch_norm_backward
        native_group_norm_backward native_layer_norm_backward scatter_ scatter_add_ sub_ view zeros""",
    "gpu": """
        _embedding_bag _embedding_bag_backward _index_put_impl_ _local_scalar_dense _reshape_alias _safe_softmax
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _softmax _softmax_backward_data _to_copy _unsafe_view add add_ addcdiv_ addcmul_ addmm alias all any
        as_strided bernoulli_ bmm cat clone contiguous detach div div_ empty empty_like eq expand fill_ full
        full_like index_add_ index_put_ lerp_ linalg_vector_norm logical_not masked_fill masked_fill_ max mean
        min mkldnn_rnn_layer mkldnn_rnn_layer_backward mm mul mul_ native_batch_norm native_batch_norm_backward
        native_dropout native_dropout_backward native_group_norm_backward native_layer_norm_backward neg
        new_zeros ones pow rsqrt scalar_tensor scatter_ scatter_add_ select select_backward sigmoid sigmoid_
        sigmoid_backward slice slice_backward sqrt squeeze stack sub_ sum t tanh tanh_ tanh_backward transpose
        transpose_ tril type_as unbind unsafe_chunk unsafe_split unsqueeze unsqueeze_ view where zero_ zeros
        zeros_like""",
}
"""Operators of a real step on the CPU that a trace for a device has not, as the written list says."""
COME = {
    "cpu": """
        _embedding_bag _embedding_bag_backward _foreach_mul_ _foreach_norm _grouped_mm _to_copy _unsafe_view add
        clone div index_add index_put masked_fill mkldnn_rnn_layer mkldnn_rnn_layer_backward mul
        native_batch_norm_backward native_group_norm_backward native_layer_norm_backward new_zeros scatter
        scatter_ scatter_add sub view zeros""",
    "gpu": """
        _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _cudnn_rnn _cudnn_rnn_backward
        _embedding_bag _embedding_bag_backward _foreach_add _foreach_add_ _foreach_addcdiv_ _foreach_addcmul_
        _foreach_div_ _foreach_lerp_ _foreach_mul _foreach_mul_ _foreach_norm _foreach_sqrt _fused_rms_norm
        _fused_rms_norm_backward _grouped_mm _safe_softmax _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _softmax _softmax_backward_data _to_copy _unsafe_view add
        add_ addmm all any bernoulli_ bmm clone constant_pad_nd cudnn_batch_norm cudnn_batch_norm_backward
        detach div div_ empty_like eq expand full full_like histc index_add index_put logical_not masked_fill
        masked_fill_ mkldnn_rnn_layer mkldnn_rnn_layer_backward mm mul native_batch_norm_backward native_dropout
        native_dropout_backward native_group_norm_backward native_layer_norm_backward new_zeros ones
        scalar_tensor scatter scatter_ scatter_add select slice slice_backward squeeze sub sum t transpose tril
        unsqueeze view where zeros zeros_like""",
}
"""Those that it has in their place."""
_LONG_LIST = 30


@dataclass
class Difference:
    """One place where the two sequences differ."""

    real: list[Call]
    traced: list[Call]


def differences(real: list[Call], traced: list[Call]) -> list[Difference]:
    """Where the sequences differ; empty if they are equal, shapes and dtypes included."""
    matcher = difflib.SequenceMatcher(None, real, traced, autojunk=False)
    return [Difference(real[a:b], traced[c:d]) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal"]


def explained(found: Difference, device: str, *, checkpointing: bool = False) -> bool:
    """Whether the written list says that these calls go and those come.

    Under checkpointing the profiler also shows the call that recomputation was stopped in: it began, and did nothing.
    """
    if checkpointing and len(found.real) == 1 and not found.traced:
        return True
    kind = "cpu" if device == "cpu" else "gpu"
    return {name for name, _ in found.real} <= _named(GONE, kind) and {
        name for name, _ in found.traced} <= _named(COME, kind)


def _named(lists: dict[str, str], *kinds: str) -> set[str]:
    return {f"aten::{name}" for kind in kinds for name in lists[kind].split()}


def known_names(traced: ExecutionGraph) -> set[str]:
    """Operators at the level of the dispatcher: those of a trace and those the written list names."""
    names = {traced.string(code) for code in set(traced.ops.name.tolist())}
    return names | {name for name in _named(GONE, *GONE) if not _is_composite(name)}


def without_float_types(sequence: list[Call]) -> list[Call]:
    """The calls with every floating-point type the same, and without casts: what autocast decides."""
    def plain(kind: str) -> str:
        return "floating" if kind in ("float", "c10::BFloat16", "c10::Half") else kind

    return [(name, tuple((plain(kind), shape) for kind, shape in arguments)) for name, arguments in sequence
            if name not in ("aten::_to_copy", "aten::detach")]


def real_peak_bytes(settings: Settings, folder: Path) -> int:
    """Peak of a real run's second step by the allocator's own events (``[memory]`` of the profiler).

    Allocations that begin and end within one operator are its workspace, which no trace can see: they are left out.
    """
    import json

    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()
    with _plain_recurrence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        workload = create(settings)
        batches = iter(workload.batches())
        workload.step(next(batches))
        batch = next(batches)
        gc.collect()
        with record_function("the step"):
            workload.step(batch)
    path = folder / f"{settings.WORKLOAD}-memory.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return peak_of(events)


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Without oneDNN's recurrent layers, whose workspace lives on to backward and whose size only oneDNN knows."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def traced_peak_bytes(settings: Settings) -> int:
    """Peak of the same program traced by shapes alone, as the CPU runs it."""
    from tracer.shape_only import trace_workload

    with _plain_recurrence():
        return trace_workload(settings, "cpu").meta.memory["peak"]


def peak_of(events: list[dict[str, Any]]) -> int:
    """The peak within the range "the step", workspaces of operators left out."""
    step = next(e for e in events if e.get("name") == "the step" and e.get("cat") == "user_annotation")
    operators = sorted(((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op"
                        and e["name"].startswith("aten::")), key=lambda span: (span[0], -span[1]))
    memory = sorted((e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0),
                    key=lambda e: e["ts"])
    born: dict[int, int] = {}
    workspace: set[int] = set()
    for i, event in enumerate(memory):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            born[address] = i
        elif (start := born.pop(address, None)) is not None and _same(operators, memory[start]["ts"], event["ts"]):
            workspace |= {start, i}
    total = peak = 0
    for i, event in enumerate(memory):
        if i in workspace:
            continue
        total += event["args"]["Bytes"]
        if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]:
            peak = max(peak, total)
    return peak


def _same(spans: list[tuple[float, float]], begin: float, end: float) -> bool:
    """Whether one operator runs from before ``begin`` to after ``end``."""
    import bisect

    at = bisect.bisect_right(spans, (begin, float("inf")))
    return any(s <= begin and end <= e for s, e in spans[max(at - 40, 0):at])
