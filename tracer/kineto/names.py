"""Meanings of the categories and names in a trace, for every era and vendor, in one place."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from tracer.graph import KernelKind, LaunchKind, SyncKind


class NameGroup(IntEnum):
    """The table that an event's category feeds."""

    IGNORED = 0
    OPERATION = 1
    ANNOTATION = 2
    CALL = 3
    DEVICE = 4
    SYNC = 5
    OVERHEAD = 6
    PYTHON = 7
    PYTHON_CALL = 8
    """No category's: all Python functions among ``PYTHON``, without names."""
    FRAME = 9
    """No category's: the program's own functions among ``PYTHON``."""


CATEGORY_GROUPS: dict[str | None, NameGroup] = {
    "cpu_op": NameGroup.OPERATION,
    "Operator": NameGroup.OPERATION,
    "mtia_op": NameGroup.OPERATION,
    "user_annotation": NameGroup.ANNOTATION,
    "cuda_runtime": NameGroup.CALL,
    "cuda_driver": NameGroup.CALL,
    "Runtime": NameGroup.CALL,
    "hip_runtime": NameGroup.CALL,
    "hip_driver": NameGroup.CALL,
    "xpu_runtime": NameGroup.CALL,
    "xpu_driver": NameGroup.CALL,
    "mtia_runtime": NameGroup.CALL,
    "privateuse1_runtime": NameGroup.CALL,
    "privateuse1_driver": NameGroup.CALL,
    "glow_runtime": NameGroup.CALL,
    "kernel": NameGroup.DEVICE,
    "Kernel": NameGroup.DEVICE,
    "gpu_memcpy": NameGroup.DEVICE,
    "Memcpy": NameGroup.DEVICE,
    "gpu_memset": NameGroup.DEVICE,
    "Memset": NameGroup.DEVICE,
    "concurrent_kernel": NameGroup.DEVICE,
    "cuda_sync": NameGroup.SYNC,
    "overhead": NameGroup.OVERHEAD,
    "python_function": NameGroup.PYTHON,
}
"""`gpu_user_annotation` echoes the host's annotations on the device and is left out on purpose."""

IGNORED_CATEGORIES = frozenset({"gpu_user_annotation", "Trace"})
UNREADABLE_DEVICE_CATEGORIES = frozenset({"mtia_ccp_events", "mtia_workloadd", "hpu_op"})
"""What accelerators did that this reader does not understand, on whichever process's track it was written."""
_GPU_RUNTIMES = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver"})
_A_RUNTIME = re.compile(r"\w+_(?:runtime|driver)$")
OTHER_PHASES = frozenset("sftiICnbePNODRvcBE")
"""Phases of the trace-event format that hold no durations the profiler writes."""

DEVICE_KINDS: dict[str | None, KernelKind] = {
    "gpu_memcpy": KernelKind.MEMCPY, "Memcpy": KernelKind.MEMCPY,
    "gpu_memset": KernelKind.MEMSET, "Memset": KernelKind.MEMSET,
}

ANNOTATION_NAME = re.compile(
    r"ProfilerStep#|ProfilerStep\*|Optimizer\.|enumerate\(DataLoader\)#|enumerate\(DataPipe\)#|"
    r"DistributedDataParallel\.|nccl:|gloo:|## .* ##$")
"""Names that mark a range although the 2020–21 category `Operator` does not tell it from an operation."""

DATA_LOADER = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)")
"""Ranges in which the next batch is fetched."""

OWN_FRAME = re.compile(r"(?!torch/|<).*\.py\(\d+\): ")
"""Python functions outside of PyTorch, as the profiler names them: "train.py(17): step"."""

COLLECTIVE_KERNEL = re.compile(
    r"^nccl(?:Dev)?Kernel|^rccl|ncclKern|multimem_all_reduce|multimem_one_shot_all_reduce|two_shot_all_reduce|"
    r"one_shot_all_reduce|cross_device_reduce|allreduce_fusion_kernel|oneShotAllReduce|twoShotAllReduce|"
    r"all_reduce_one_shot|all_reduce_two_shot|quickreduce|allreduce_prototype|"
    # Symmetric memory (PyTorch), NVSHMEM, and what vLLM, SGLang, TensorRT-LLM and FlashInfer bring of their own.
    r"multimem_|nvshmem\w*(?:put|get|barrier|broadcast|all_?to_?all|reduce|collect)|nccl_symm|ncclSymk|"
    r"all_to_all_vdev|allToAllV|trtllm_mnnvl_\w*allreduce|mnnvl\w*(?:all_?reduce|all_?to_?all)|moe_?a2a|moeAllToAll|"
    r"lamport\w*(?:reduce|gather)|allreduce_(?:push|lamport)|cross_device_gather|cross_device_all_gather|userbuffers_|"
    # Experts' exchange: DeepEP by its namespaces, and perplexity's kernels.
    r"(?:intranode|internode|internode_ll|hybrid|elastic)::(?:\w+::)*(?:cached_notify|notify|dispatch|combine)|"
    r"(?:deep_?ep|dpsk::ep|pplx\w*)::(?:\w+::)*(?:cached_notify|notify|dispatch|combine)", re.IGNORECASE)


def is_accelerator_call(category: str | None) -> bool:
    """Return whether a category is of calls of an accelerator's runtime: no CPU's program makes them, as it may CUDA's
    or HIP's to ask for a GPU."""
    return category is not None and category not in _GPU_RUNTIMES and bool(_A_RUNTIME.match(category))


@lru_cache(maxsize=1 << 14)
def is_collective_kernel(name: str) -> bool:
    """Return whether a kernel's name is that of a collective; ranks have the same names, and looking takes long."""
    return bool(COLLECTIVE_KERNEL.search(name))


_CALLS: tuple[tuple[re.Pattern[str], LaunchKind], ...] = (
    (re.compile(r"GraphLaunch"), LaunchKind.GRAPH),
    (re.compile(r"LaunchHostFunc|LaunchDevice"), LaunchKind.OTHER),
    (re.compile(r"^(?:cuda|cu|hip|ze|ur)\w*Launch|LaunchKernel"), LaunchKind.KERNEL),
    (re.compile(r"EventRecord"), LaunchKind.EVENT_RECORD),
    (re.compile(r"StreamWaitEvent"), LaunchKind.STREAM_WAIT),
    (re.compile(r"(?:Stream|Device|Event|Ctx|Context)Synchronize"), LaunchKind.BLOCKING_SYNC),
    (re.compile(r"^(?:cuda|cu|hip)\w*Memcpy|^hip\w*MemcpyWithStream"), LaunchKind.MEMCPY),
    (re.compile(r"^(?:cuda|cu|hip)\w*Memset"), LaunchKind.MEMSET),
)
_BLOCKING_COPY = re.compile(r"^(?:cuda|cu|hip)Memcpy(?!.*Async)")


def call_kind(name: str) -> LaunchKind:
    """Return what a runtime or driver call does, by its name (of any vendor)."""
    for pattern, kind in _CALLS:
        if pattern.search(name):
            return kind
    return LaunchKind.OTHER


def is_blocking_copy(name: str) -> bool:
    """Return whether a copy call returns only when the copy is done whatever its memory is (no `Async` in its name)."""
    return bool(_BLOCKING_COPY.match(name))


def sync_kind(text: str) -> SyncKind:
    """The kind of a `cuda_sync` event from its name or `cuda_sync_kind`."""
    lowered = text.lower()
    if "wait" in lowered:
        return SyncKind.STREAM_WAIT_EVENT
    if "event" in lowered:
        return SyncKind.EVENT_SYNC
    return SyncKind.STREAM_SYNC if "stream" in lowered else SyncKind.DEVICE_SYNC
