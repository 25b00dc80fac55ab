"""Data on the host: ``DataLoader`` draws its seeds and orders for real, ``torch.load`` reads to where it is asked to.

A fake tensor has no values, but which samples make a batch is decided by values the host draws. So a loader's iterator
and the samplers of ``torch.utils.data`` run outside the trace; the samples themselves are traced. Its workers, other
processes, are left out: batches are loaded where the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data
from torch.utils._python_dispatch import _disable_current_modes

from tracer.shape_only.errors import ShapeOnlyError, caller_line
from tracer.shape_only.substitutions.site import Site, is_gpu

if TYPE_CHECKING:
    from tracer.shape_only.substitutions.placement import DevicePlacement

_SAMPLERS = ("RandomSampler", "SubsetRandomSampler")
_NO_WORKERS = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}


def install(site: Site, placement: DevicePlacement | None) -> None:
    """Put real data loading, and loading and saving of files, in place for one trace."""
    site.patch(data.DataLoader, "_get_iterator", _iterator(site, data.DataLoader._get_iterator))
    for name in _SAMPLERS:
        sampler = getattr(data, name)
        site.patch(sampler, "__iter__", _drawn(sampler.__iter__))
    site.patch(data.DistributedSampler, "__iter__", _drawn(data.DistributedSampler.__iter__))
    # The weights may be fake: which samples come does not change a shape.
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
    """A sampler's ``__iter__`` that draws its whole order at once."""
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
    """A ``map_location`` that reads everything to the host, and notes where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.on_gpu = False

    def get(self, location: Any, default: Any = None) -> Any:
        """The host, whatever the location."""
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
    """Return what was loaded with storages that die with its tensors: the fake ones ``torch.load`` makes are never
    freed."""
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
