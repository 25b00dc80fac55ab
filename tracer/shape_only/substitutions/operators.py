"""Operators and helpers of torch that a trace replaces, the ``Site`` of the replacements, and data on the host.

Operators are replaced in PyTorch's dispatcher, at the key ``AutogradCPU``: below autocast and above autograd, which is
where the operator itself would choose between its CPU and its CUDA implementation. So every caller is met, from Python
or from C++, in forward and when checkpointing runs forward again, and autograd keeps what CUDA's derivative keeps.

Other differences are not substituted: fake tensors are a subclass of tensors, so that a trace differs from a real run
on any device. The work is the same, element for element:

- autograd adds gradients, and computes a few formulas, out of place instead of in place: ``add`` for ``add_``,
  ``index_put`` for ``_index_put_impl_``; a gradient that is added to another takes a new buffer;
- ``view`` for ``_reshape_alias``;
- an ``empty`` of no elements (a result that is not asked for) is missing;
- gradients of ``index_select`` are added by ``index_add`` for ``scatter_add_`` into zeros;
- the fake kernels keep some statistics of norms in the input's type and some bag numbers of ``embedding_bag``. The CPU
  keeps fp32 statistics, no bag numbers. The fake kernels lack the size of the CPU's workspace for recurrent layers.

``DataLoader`` draws its seeds and orders for real, and ``torch.load`` reads to the requested device. A fake tensor has
no values, but values that the host draws decide which samples make a batch. So a loader's iterator and the samplers of
``torch.utils.data`` run outside the trace; the samples themselves are traced. Its worker processes are left out:
batches are loaded where the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, data
from torch.utils._python_dispatch import _disable_current_modes

from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.errors import ShapeOnlyError, caller_line

if TYPE_CHECKING:
    from tracer.shape_only.substitutions.placement import DevicePlacement


_MISSING = object()


@dataclass
class Site:
    """The substitutions of one trace.

    Attributes:
        device: The device the step is traced for.
        rules: Operator → a function that makes its outputs, for operators without a kernel for fake tensors.
        counts: How often each substitution was used.
    """

    device: TracedDevice
    rules: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    library: Any = None

    def used(self, name: str) -> None:
        """Count one use."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def note(self, text: str) -> None:
        """Add a sentence to the graph's loss report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def replace(self, operator: str, kernel: Callable[..., Any]) -> None:
        """Run ``kernel`` in an operator's place, above autograd; ``operator`` is "rms_norm" or "lstm.input"."""
        if operator_of(operator) is not None:
            self.library.impl(operator, kernel, "AutogradCPU")

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the trace ends; one the owner lacks is left alone."""
        before = vars(owner).get(name, _MISSING)
        if before is _MISSING and not hasattr(owner, name):
            return
        setattr(owner, name, value)
        self.stack.callback(_restore, owner, name, before)


@contextmanager
def installed(device: TracedDevice, substitutions: Iterable[Callable[[Site], None]]) -> Iterator[Site]:
    """Install substitutions; everything is restored at the end."""
    site = Site(device, library=torch.library.Library("aten", "IMPL"))
    with site.stack:
        site.stack.callback(site.library._destroy)
        for install in substitutions:
            install(site)
        yield site


def operator_of(name: str) -> Any:
    """Return ``aten``'s operator of a name such as "lstm.input"; None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def below_autograd(operator: Any, *args: Any) -> Any:
    """Call an operator as autograd's own functions do: seen by the recorder, not differentiated again."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def is_gpu(device: Any) -> bool:
    """Return whether a device argument means a GPU, as a bare number does."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] in ("cuda", "hip")
    return isinstance(device, int) and not isinstance(device, bool)


_NAMESPACE = "c10d::"
_WORK = "c10d.Work"
_SAME_ROWS = ("clone.default", *(f"{name}.{kind}" for name in ("mul", "div", "mul_", "div_")
                                 for kind in ("Tensor", "Scalar")))

_BAGS = torch.ops.aten._embedding_bag_backward.default
_NUM_WEIGHTS, _SPARSE = 6, 9
"""Positions of the arguments ``num_weights`` and ``sparse`` of the gradient of bags."""


def conversions(site: Site) -> None:
    """Let ``nn.Module.to``, ``.double()`` and the like give parameters without data their new type in place."""
    site.patch(torch.nn.Module, "_apply", _apply)


def _apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Do as ``nn.Module._apply``, but set ``.data``: torch's own swaps fake parameters, which fails if anything else
    refers to them."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            for tensor in (parameter, parameter.grad):
                applied = fn(tensor) if tensor is not None else None
                if applied is not tensor:
                    tensor.data = applied
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def dropout(site: Site) -> None:
    """Run dropout as one kernel that draws, masks and scales, and keeps a mask of one byte an element."""
    aten = torch.ops.aten

    def dropped(x: Any, p: float, train: bool) -> Any:
        if not train or p == 0 or x.numel() == 0:
            return x
        if p < 1:
            site.used("dropout")
            return aten.native_dropout(x, p, train)[0]
        return x * torch.zeros((), dtype=x.dtype)

    site.replace("dropout", dropped)


def one_hot(site: Site) -> None:
    """Run one-hot as CUDA does: zeros and scattered ones. CPUs check the values too; fake tensors take a third way."""
    def spread(x: Any, num_classes: int = -1) -> Any:
        if num_classes <= 0:
            raise ShapeOnlyError("one_hot without num_classes takes the number of classes from the values, which a "
                                 "trace by shapes alone does not have: give num_classes.")
        site.used("one_hot")
        ones = torch.zeros([*x.shape, num_classes], dtype=x.dtype, device=x.device)
        return ones.scatter_(-1, x.unsqueeze(-1), 1)

    site.replace("one_hot", spread)


def counting(site: Site) -> None:
    """Let histograms count integers, as CUDA does; the CPU refuses them."""
    def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
        return torch.empty(bins, dtype=x.dtype)

    site.rules[torch.ops.aten.histc.default] = histc


def ctc(site: Site) -> None:
    """Trace the CTC loss. Its fake kernel needs the targets' lengths and, for a list of lengths, memory. Targets are
    assumed to be padded to the longest, and joined targets to have equal lengths."""
    def of_lists(scores: Any, targets: Any, frames: Any, lengths: Any, *more: Any) -> Any:
        return torch.ops.aten.ctc_loss.Tensor(scores, targets, torch.tensor(frames), torch.tensor(lengths), *more)

    def forward(scores: Any, targets: Any, *_: Any) -> Any:
        frames, batch = scores.shape[:2]
        longest = targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // max(batch, 1))
        return scores.new_empty(batch), scores.new_empty(batch, frames, 2 * longest + 1)

    site.replace("ctc_loss.IntList", of_lists)
    site.rules[operator_of("_ctc_loss.Tensor")] = forward
    site.rules[operator_of("_ctc_loss_backward.Tensor")] = lambda _, scores, *__: torch.empty_like(scores)


def grouped(site: Site) -> None:
    """Trace grouped products of every floating-point type; fake tensors have a kernel for bf16 only."""
    operator = operator_of("_grouped_mm")
    if operator is None:
        return

    def grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        if a.dtype == torch.bfloat16:
            return operator(a, b, offs, bias, out_dtype)
        if a.shape[-1] != b.shape[-2]:
            raise RuntimeError(f"grouped_mm: {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
        rows, columns = a.shape[-2], b.shape[-1]
        # Two matrices are multiplied in parts of the dimension they share, with one result for each part.
        groups = [offs.shape[0]] if a.dim() == b.dim() == 2 else [a.shape[0]] if a.dim() == b.dim() == 3 else []
        return torch.empty([*groups, rows, columns], dtype=out_dtype or a.dtype)

    site.rules[operator] = grouped_mm


def initialization(site: Site) -> None:
    """Draw truncated normal weights once: drawing again until all lie within bounds would read values."""
    def drawn_once(tensor: Any, mean: float, std: float, *bounds: Any, generator: Any = None, **more: Any) -> Any:
        with torch.no_grad():
            return tensor.normal_(mean, std)

    site.patch(torch.nn.init, "_no_grad_trunc_normal_", drawn_once)


def optimizers(site: Site) -> None:
    """Let optimizers and clipping use ``foreach`` where torch does on a GPU, for which it has multi-tensor kernels."""
    for module in (optimizer, _foreach_utils):
        name = "_get_foreach_kernels_supported_devices"
        if hasattr(module, name):
            site.patch(module, name, _with_cpu(site, getattr(module, name)))
    clipping(site)


def clipping(site: Site) -> None:
    """Count fake tensors as native for ``foreach``, and let torch choose: on a CPU it clips gradients as lists."""
    for module in (optimizer, _foreach_utils):
        types = getattr(module, "_foreach_supported_types", None)
        if types is not None and FakeTensor not in types:
            types.append(FakeTensor)
            site.stack.callback(types.remove, FakeTensor)


def _with_cpu(site: Site, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def devices(*args: Any) -> list[str]:
        site.used("optimizers")
        return [*original(*args), "cpu"]

    return devices


def collectives(site: Site) -> None:
    """Let a collective return its tensors unchanged, and a finished work: in a fake world nothing is sent.

    Every operator of ``c10d`` is replaced, for all kernels that this version of PyTorch has. Functional collectives
    (``_c10d_functional``) give new tensors and have fake kernels of their own.
    """
    try:
        from torch._C._distributed_c10d import FakeWork
    except ImportError:  # a torch without distributed support has no such operators
        return
    for operator, schema in _operators():
        site.rules[operator] = _finished(schema, FakeWork)


@lru_cache(maxsize=1)
def _operators() -> list[tuple[Any, Any]]:
    """Return the operators that return a work, with their schemas; cached, since it searches thousands of schemas."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(_NAMESPACE) and any(_WORK in str(each.type) for each in schema.returns):
            packet = getattr(torch.ops.c10d, schema.name.removeprefix(_NAMESPACE))
            found.append((getattr(packet, schema.overload_name or "default"), schema))
    return found


def _finished(schema: Any, work: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that returns what an operator of this schema does: the arguments that it fills, and a work."""
    works = [_WORK in str(each.type) for each in schema.returns]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        results = [work().boxed() if is_work else given[at] for at, is_work in enumerate(works)]
        return tuple(results) if len(results) > 1 else results[0]

    return call


def _gradient_of_bags(*args: Any, **kwargs: Any) -> Any:
    """Return the gradient of bags, with one row for each index if it is sparse."""
    if len(args) <= _SPARSE or not args[_SPARSE]:
        return _BAGS(*args, **kwargs)
    grad, indices = args[:2]
    rows = grad.new_empty(indices.numel(), grad.shape[1])
    return torch.sparse_coo_tensor(indices.reshape(1, -1), rows, (args[_NUM_WEIGHTS], grad.shape[1]),
                                   check_invariants=False)


def sparse(site: Site) -> None:
    """Trace sparse gradients: a fake copy of a sparse tensor, or a scaled one, loses the number of its rows.

    An embedding with ``sparse=True`` has one gradient row for each index. ``clone``, ``mul`` and ``div`` of a fake
    sparse tensor return one without rows, so that reducing it would seem to cost nothing. The gradient of bags has no
    rows either, as the CPU's forward does not report which row belongs to which bag.
    """
    for name in _SAME_ROWS:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload, None)
        if operator is not None and operator not in site.rules:
            site.rules[operator] = _keeping_rows(operator, in_place=packet.endswith("_"))
    site.rules[_BAGS] = _gradient_of_bags


def _keeping_rows(operator: Any, *, in_place: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0]
        if tensor.layout is not torch.sparse_coo:
            return operator(*args, **kwargs)
        return tensor if in_place else torch.sparse_coo_tensor(
            tensor._indices(), tensor._values(), tensor.shape, check_invariants=False)

    return call


_SAMPLERS = ("RandomSampler", "SubsetRandomSampler")
_NO_WORKERS = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}  # PyTorch's defaults without workers


def install(site: Site, placement: DevicePlacement | None) -> None:
    """Replace data loading, and loading and saving of files, for one trace."""
    site.patch(data.DataLoader, "_get_iterator", _iterator(site, data.DataLoader._get_iterator))
    for name in _SAMPLERS:
        sampler = getattr(data, name)
        site.patch(sampler, "__iter__", _drawn(sampler.__iter__))
    site.patch(data.DistributedSampler, "__iter__", _drawn(data.DistributedSampler.__iter__))
    # The weights may be fake: which samples are drawn does not change a shape.
    site.patch(data.WeightedRandomSampler, "__iter__",
               lambda self: iter([i % len(self.weights) for i in range(self.num_samples)]))
    for module in (data, data.dataset):
        site.patch(module, "random_split", _really(data.random_split))
    site.patch(torch, "load", _load(placement, torch.load))
    site.patch(torch, "save", _save)


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


def _drawn(original: Callable[[Any], Any]) -> Callable[[Any], Iterator[int]]:
    """Return a sampler's ``__iter__`` that draws its whole order at once."""
    def drawn(self: Any) -> Iterator[int]:
        with _disable_current_modes():
            return iter(list(original(self)))

    return drawn


def _iterator(site: Site, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def iterator(self: Any) -> Any:
        before = {name: getattr(self, name) for name in _NO_WORKERS}
        if before["num_workers"]:
            site.note("The workers of DataLoader were left out: batches are loaded in the traced process.")
        try:
            vars(self).update(_NO_WORKERS)
            with _disable_current_modes():
                return original(self)
        finally:
            vars(self).update(before)

    return iterator


class _ToHost(dict[str, str]):
    """A ``map_location`` that reads everything to the host, and notes whether any was on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_gpu = False

    def get(self, location: Any, default: Any = None) -> Any:
        """Return the host, for any location."""
        self.on_gpu = self.on_gpu or is_gpu(str(location))
        return "cpu"


def _load(placement: DevicePlacement | None, original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        asked = isinstance(map_location, str | torch.device | int) and is_gpu(map_location)
        host = _ToHost()
        if isinstance(map_location, dict):
            asked = any(is_gpu(target) for target in map_location.values())
        with placement.placed(False) if placement is not None else nullcontext():
            loaded = original(f, host if asked or map_location is None else "cpu", *args, **kwargs)
        if placement is not None and (asked or (map_location is None and host.on_gpu)):
            with torch.no_grad():
                loaded = _rehoused(loaded, {})
        return loaded

    return load


def _rehoused(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Return loaded values in new storages that die with their tensors: the fake storages that ``torch.load`` makes are
    never freed."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            storage = value.untyped_storage()
        fresh = made.get(storage._cdata)
        if fresh is None:
            fresh = made[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
        found = fresh.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(found, value.requires_grad)
        return found.requires_grad_(value.requires_grad)
    if isinstance(value, torch.nn.Module):
        return value.cuda()
    if isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _rehoused(part, made)
    return tuple(_rehoused(part, made) for part in value) if type(value) is tuple else value


def _save(*_: Any, **__: Any) -> None:
    raise ShapeOnlyError(f"{caller_line()} saves tensors, which have no values in a trace by shapes alone: leave "
                         "torch.save out of the traced function, or skip it there by an argument of your own.")
