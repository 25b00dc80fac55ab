"""CUDA devices without CUDA: requests for one give ordinary fake tensors, and their place is tracked separately.

On a build without CUDA a CUDA fake tensor aborts the process. So every request for one becomes a request for the CPU
before a tensor exists (``device="cuda"``, ``.cuda()``, ``.to("cuda")``, ``with torch.device("cuda")``, default
devices). The memory tracker notes that its storage lies on the device. A tensor that user code makes elsewhere and then
moves is copied, as on a GPU; the copy is recorded with its target. User code sees the requested device: ``x.device``,
``x.is_cuda`` and ``torch.cuda.is_available()`` answer as on a GPU, while torch's own code sees the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tracer.shape_only.errors import ShapeOnlyError, caller_line
from tracer.shape_only.substitutions.operators import Site, is_gpu
from tracer.shape_only.uncompiled import compiler_imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracer.shape_only.tensors import MemoryTracker

GPU = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_MODULE_MOVES = "torch.nn.modules.module"
_OWN = ("torch", "tracer")
_ONE_PLACE = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "embedding", "_embedding_bag", "cat",
    "gather", "scatter", "scatter_add", "index_select", "index_add", "masked_fill", "native_batch_norm",
    "cudnn_batch_norm", "native_layer_norm", "native_group_norm", "nll_loss_forward", "nll_loss2d_forward",
    "binary_cross_entropy", "_fused_rms_norm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention"))
"""Operators whose tensors (except scalars) must lie on one device, in place or not, like torch's pointwise ones."""
_MODULES = "torch.nn.modules."
_USERS_OF_OWN = "tracer.workloads"
SYNCHRONIZE = "synchronize"
"""Key in ``meta.substitutions`` of synchronisations that user code asks for; they are left out."""


class DevicePlacement(TorchFunctionMode):
    """Turns requests for CUDA into CPU requests; ``wanted``: whether new storages count as CUDA's; None: as inputs."""

    def __init__(self, tracker: MemoryTracker, *, one_device: bool = True) -> None:
        super().__init__()
        self._one_device = one_device
        self.tracker = tracker
        self.wanted: bool | None = None
        self.transfer: torch.device | None = None
        """The target of the copy in progress."""
        self.copies = 0
        self._constructors = frozenset(_device_constructors())
        tensor = torch.Tensor
        self._handlers: dict[Any, Callable[..., Any]] = {
            tensor.to: self._to, tensor.cuda: self._cuda, tensor.cpu: self._cpu,
            tensor.pin_memory: lambda args, kwargs, user: args[0], tensor.is_pinned: lambda args, kwargs, user: True,
            tensor.record_stream: lambda args, kwargs, user: None,
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: lambda args, kwargs, user: user and self.on_device(args[0]),
            tensor.is_cpu.__get__: lambda args, kwargs, user: not (user and self.on_device(args[0])),
            tensor.get_device: lambda args, kwargs, user: 0 if user and self.on_device(args[0]) else -1,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(args, kwargs, _asked_by_user(sys._getframe(1)))
        device = kwargs.get("device")
        if device is not None and self._is_gpu(device):
            with self.placed(True):
                return func(*args, **{**kwargs, "device": _HOST, **({"pin_memory": False} if "pin_memory" in kwargs
                                                                    else {})})
        if func in self._constructors:
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            # Torch's own code sees the CPU where a tensor lies on the device, and so requests it by name; its modules
            # pass on the user's request.
            caller = sys._getframe(1)
            if device is None or _asked_by_user(caller) or _makes_module(caller):
                with self.placed(False):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def placed(self, on_device: bool | None, transfer: torch.device | None = None) -> Iterator[None]:
        """Count new storages in the block as on the device or on the host (None: where their inputs are)."""
        before = self.wanted, self.transfer
        self.wanted, self.transfer = on_device, transfer
        try:
            yield
        finally:
            self.wanted, self.transfer = before

    def install(self, site: Site) -> None:
        """Let the program see the device on which a fake tensor counts as lying."""
        if "device" in vars(FakeTensor):
            site.patch(FakeTensor, "device", _Seen(vars(FakeTensor)["device"], self))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            site.patch(torch.cuda, name, lambda *_, **__: self.tracker.device_bytes())
        total = site.device.memory_bytes
        site.patch(torch.cuda, "mem_get_info", lambda *_, **__: (max(total - self.tracker.device_bytes(), 0), total))

    def check(self, func: Any, inputs: list[Any]) -> None:
        """Raise, as a GPU does, if an operation mixes the host's and the device's tensors."""
        pointwise = torch.Tag.pointwise in func.tags
        if func.namespace != "aten" or not (pointwise or func.overloadpacket.__name__.rstrip("_") in _ONE_PLACE):
            return
        host, device = 0, 0
        for tensor in inputs:
            place = self.tracker.on_device(tensor)
            device += place is True
            host += place is False and tensor.dim() > 0
        if host and device:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
                               f"and cpu, in {func._schema.name}; move the batch or the model to the GPU")

    def _is_gpu(self, device: Any) -> bool:
        """Return whether a device argument means the GPU; raise ``ShapeOnlyError`` for a second GPU."""
        gpu = is_gpu(device)
        if gpu and self._one_device:
            index = device if isinstance(device, int) else torch.device(str(device)).index
            if index:
                raise ShapeOnlyError(f"{caller_line()} asks for cuda:{index}, but a trace has one GPU: write \"cuda\", "
                                     "and give a world size for more ranks of one GPU each.")
        return gpu

    def on_device(self, tensor: Any) -> bool:
        """Return whether a tensor, or the local part of a DTensor, lies on the device."""
        with torch._C.DisableTorchFunction():
            local = getattr(tensor, "_local_tensor", tensor)
            return bool(self.tracker.on_device(local))

    def _device(self, args: Any, kwargs: Any, user: bool) -> Any:
        if user and self.on_device(args[0]):
            return GPU
        return getattr(args[0], "fake_device", None) or _true_device(args[0])

    def _cuda(self, args: Any, kwargs: Any, user: bool) -> Any:
        asked = args[1] if len(args) > 1 else kwargs.get("device")
        if asked is not None:
            self._is_gpu(asked)
        if sys._getframe(2).f_globals.get("__name__") == _MODULE_MOVES:
            self.tracker.move(args[0], True)
            return args[0]
        return self._moved(args[0], GPU, {"non_blocking": kwargs.get("non_blocking", False)})

    def _cpu(self, args: Any, kwargs: Any, user: bool) -> Any:
        return self._moved(args[0], _HOST, {}) if user else args[0].to(_HOST)

    def _to(self, args: Any, kwargs: Any, user: bool) -> Any:
        tensor, rest = args[0], args[1:]
        other = rest[0] if rest and isinstance(rest[0], torch.Tensor) else kwargs.get("other")
        if other is not None:
            device: Any = GPU if self.on_device(other) else _HOST
            options: dict[str, Any] = {"dtype": other.dtype}
        else:
            named = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*rest[:3], **named)
            options = {"dtype": dtype, "non_blocking": non_blocking, "memory_format": layout,
                       "copy": bool(kwargs.get("copy", rest[3] if len(rest) > 3 else False))}
            options = {name: value for name, value in options.items() if value}
        if device is None or not (user or self._is_gpu(device)):
            if device is not None:
                options["device"] = device
            return _original_to(tensor, **options) if options else tensor
        if sys._getframe(2).f_globals.get("__name__") == _MODULE_MOVES:
            self.tracker.move(tensor, self._is_gpu(device))  # a model that moves leaves nothing behind
            return _original_to(tensor, **options) if options else tensor
        return self._moved(tensor, GPU if self._is_gpu(device) else _HOST, options)

    def _moved(self, tensor: Any, device: torch.device, options: dict[str, Any]) -> Any:
        there = self.on_device(tensor)
        if there == (device.type == "cuda") or hasattr(tensor, "_local_tensor"):
            options.pop("non_blocking", None)
            return _original_to(tensor, **options) if options else tensor
        self.copies += 1
        with self.placed(not there, device):
            return _original_to(tensor, **{"dtype": tensor.dtype, **options, "copy": True})


class _Seen:
    """``FakeTensor.device``, which no torch-function mode sees: the GPU for users, the CPU for torch."""

    def __init__(self, original: Any, placement: DevicePlacement) -> None:
        self._original = original
        self._placement = placement

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is not None and _asked_by_user(sys._getframe(1)) and self._placement.on_device(tensor):
            return GPU
        return self._original.__get__(tensor, owner)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._original.__set__(tensor, value)


def _asked_by_user(frame: Any) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] not in _OWN or name.startswith(_USERS_OF_OWN)


def _makes_module(frame: Any) -> bool:
    """Return whether a frame creates a module of torch."""
    return frame.f_code.co_name == "__init__" and str(frame.f_globals.get("__name__", "")).startswith(_MODULES)


def _original_to(tensor: Any, **options: Any) -> Any:
    if not options:
        return tensor
    dtype = options.pop("dtype", None)
    device = options.pop("device", None)
    if dtype is None and device is None:
        dtype = tensor.dtype
    return torch._C.TensorBase.to(tensor, **({"dtype": dtype} if dtype is not None else {}),
                                  **({"device": device} if device is not None else {}), **options)


def _true_device(tensor: Any) -> torch.device:
    with torch._C.DisableTorchFunction():
        device: torch.device = tensor.device
        return device


def placement(site: Site) -> None:
    """Make ``torch.cuda`` answer users as on a machine with one such GPU, and torch's own code truthfully."""
    cuda = torch.cuda
    capability = site.device.capability
    properties = SimpleNamespace(name=site.device.reported, major=capability[0], minor=capability[1],
                                 multi_processor_count=site.device.sm_count, total_memory=site.device.memory_bytes)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None,
        "empty_cache": None, "get_device_name": site.device.reported, "get_device_capability": capability,
        "get_device_properties": properties, "reset_peak_memory_stats": None, "ipc_collect": None,
        "is_bf16_supported": site.device.has_bf16, "manual_seed": None, "manual_seed_all": None,
        "init": None, "is_initialized": True,
    }
    for name, answer in answers.items():
        if hasattr(cuda, name):
            site.patch(cuda, name, _answering(getattr(cuda, name), answer))
    if hasattr(cuda, "synchronize"):
        site.patch(cuda, "synchronize", _counting(cuda.synchronize, site))
    # torch.random.fork_rng asks torch.cuda itself.
    site.patch(cuda, "get_rng_state", lambda *_: torch.empty(0, dtype=torch.uint8))
    site.patch(cuda, "set_rng_state", lambda *_: None)
    waits = {"synchronize": lambda _: site.used(SYNCHRONIZE)}
    stream = type("Stream", (), {**_STREAM, **waits})
    site.patch(cuda, "Stream", stream)
    site.patch(cuda, "Event", type("Event", (), {**_EVENT, **waits}))
    site.patch(cuda, "current_stream", lambda *_: stream())
    site.patch(cuda, "default_stream", lambda *_: stream())
    site.patch(cuda, "stream", lambda stream: stream)
    set_default = torch.set_default_device
    site.patch(torch, "set_default_device",
               lambda device: set_default("cpu" if device is not None and is_gpu(device) else device))

    def compiled(model: Any = None, **options: Any) -> Any:
        site.note("torch.compile was left out: the graph has the eager operations, not the compiler's fused kernels.")
        return model if model is not None else lambda function: function

    site.patch(torch, "compile", compiled)
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is not None and compiler_imported():  # else nothing is compiled yet, and importing it is slow
        site.stack.enter_context(stance("force_eager"))

    _distributed(site)


def _distributed(site: Site) -> None:
    """Let device meshes, DDP and ``init_process_group`` accept calls for GPUs."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    mesh, ddp = DeviceMesh.__init__, DistributedDataParallel.__init__

    def mesh_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh(self, "cpu" if is_gpu(device_type) else device_type, *args, **kwargs)

    def ddp_init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any,
                 **kwargs: Any) -> None:
        ddp(self, module, None, None, *args, **kwargs)

    site.patch(DeviceMesh, "__init__", mesh_init)
    site.patch(DistributedDataParallel, "__init__", ddp_init)
    for module in (dist, dist.distributed_c10d):  # the world exists already
        site.patch(module, "init_process_group", lambda *_, **__: None)


def _answering(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return answer if _asked_by_user(sys._getframe(1)) else original(*args, **kwargs)

    return function


def _counting(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        return site.used(SYNCHRONIZE) if _asked_by_user(sys._getframe(1)) else original(*args, **kwargs)

    return synchronize


def _idle(*_: Any, **__: Any) -> None:
    """Do nothing: there is nothing to record or to wait for."""


_EVENT: dict[str, Callable[..., Any]] = {
    "__init__": _idle, "record": _idle, "wait": _idle, "query": lambda _: True, "elapsed_time": lambda *_: 0.0}
"""An event of a device that does not exist."""
_STREAM: dict[str, Callable[..., Any]] = {
    **_EVENT, "wait_stream": _idle, "wait_event": _idle,
    "record_event": lambda _, event=None: event or torch.cuda.Event(),
    "__enter__": lambda self: self, "__exit__": _idle}
"""A stream of such a device; also its own context."""
