"""Values that a program makes out of constants, such as a rate for each layer, a mask or a table of positions.

    rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
    stages = len(torch.unique(widths))

A fake tensor has no values, but what is computed from constants alone is the same on any device. Small tensors of this
kind are also made for real, next to the fake ones, and views of them as views. They are read where a program asks for a
number, or where values decide the number of elements. Random tensors, tensors from data and large ones have no values
here. A single number from data that is read by ``item`` has a stand-in (``stand_ins``); any other read is refused.
Where a share is given, masks from data are assumed to select it, evenly spread, and the selection is computed as for
known masks. Numbers between known bounds are assumed then too (``ends_of``); masks made of them select the same share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tracer.shape_only.errors import MOST_ELEMENTS, caller_line
from tracer.shape_only.stand_ins import READ, VALUE, OfData, stand_in
from tracer.shape_only.tensors import ENDS, KeptValues, ends_of, spread, tensors_in

if TYPE_CHECKING:
    from tracer.shape_only.substitutions.operators import Site

MOST_EXPANDED = 1 << 26
"""Most elements of a small tensor that is expanded, such as a mask of tokens for every channel."""
MOST_FILLED = 1 << 16
"""Most elements of a filled tensor whose values are kept: larger ones are weights."""
DRAWN = 0.5
"""Assumed position of a single random number in its range, such as one by which a program drops a layer."""
_MADE_OF_CONSTANTS = frozenset({"linspace", "logspace", "arange", "zeros", "ones", "full", "eye", "scalar_tensor",
                                "tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window"})
_LIKE = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1, "full_like": 1, "new_full": 2}
"""Operators that fill a new tensor with a constant: the constant, or the position of the argument that gives it."""
_FILLED = frozenset({"zero_", "fill_"})
"""Operators that give every element of a tensor a new value."""
LIFT = torch.ops.aten.lift_fresh.default
_INDEXED = torch.ops.aten.index.Tensor
_WHERE = torch.ops.aten.nonzero.default
_MASKED = torch.ops.aten.masked_select.default
_ROWS = torch.ops.aten.index_select.default
TO_NUMBER = torch.ops.aten._local_scalar_dense.default
_SCALED_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""Gradient scalers ask it whether gradients are finite; it writes the answer into its second argument."""
_OF_ALL = (torch.ops.aten.all.default, torch.ops.aten.any.default)
_COUNTED = torch.ops.aten.bincount.default
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isin", "logical_and", "logical_or", "logical_not"})
"""Operators that make masks."""
_RESHAPES = torch.Tag.inplace_view
_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
RANDOM = "A random number decides what the step does; it is taken to be the middle of its range."
SELECTED = ("What data select decides shapes of the step: masks that are not known are taken to select {:g} of their "
            "elements, evenly spread.")
EVENLY = "How often each value is there decides what the step does; all are taken to be there as often."
FINITE = "The program looks at whether values are finite, and goes on as it does where all of them are."
_CHECKS = {"isfinite": True, "isnan": False, "isinf": False, "isneginf": False, "isposinf": False}


class NumbersInLists(TorchFunctionMode):
    """Lets ``torch.tensor`` read the numbers of a list in which some are tensors, as it does with real tensors. A
    tensor made of stand-ins for numbers from data has no known values.

    Args:
        forget: called with each tensor made of stand-ins.
    """

    def __init__(self, forget: Callable[[Any], None]) -> None:
        super().__init__()
        self._forget = forget

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.tensor, torch.as_tensor) or not args or not isinstance(args[0], (list, tuple, OfData)):
            return func(*args, **(kwargs or {}))
        stand_ins: list[OfData] = []
        made = func(_numbers(args[0], stand_ins), *args[1:], **(kwargs or {}))
        if stand_ins:
            self._forget(made)
        return made


def _numbers(values: Any, stand_ins: list[OfData]) -> Any:
    if isinstance(values, FakeTensor):
        values = values.tolist() if values.dim() else values.item()
    if isinstance(values, OfData):
        stand_ins.append(values)
        return values if isinstance(values, float) else VALUE
    if isinstance(values, (list, tuple)) and any(isinstance(one, (list, tuple, FakeTensor, OfData)) for one in values):
        return [_numbers(one, stand_ins) for one in values]
    return values


class KnownValues:
    """The real tensors behind fake ones that were made of constants.

    Args:
        assumed: Called with a sentence where the program reads a value that is assumed, not known.
        selected: Share of the elements that masks with unknown values select, and of the range that numbers between
            known bounds fill; ``None`` refuses both.
    """

    def __init__(self, assumed: Callable[[str], None] = lambda text: None, selected: float | None = None) -> None:
        self._kept = KeptValues()
        self._reshaped: tuple[Any, tuple[str, ...]] | None = None
        self._say = assumed
        self._share = selected
        self._rows = 0
        self._stands_in = self._said_read = False

    def install(self, site: Site) -> None:
        """Let known values be read without an operator, and assume that all values are finite, during a trace."""
        site.patch(torch.Tensor, "numpy", self._numpy(torch.Tensor.numpy))
        site.patch(torch.Tensor, "__format__", self._format(torch.Tensor.__format__))
        site.patch(torch.Tensor, "item", self._item(torch.Tensor.item))
        if self._share is not None:
            site.patch(FakeImplCtx, "new_dynamic_size", self._dynamic_size)
            site.patch(FakeImplCtx, "create_unbacked_symint", self._dynamic_size)
        for owner in (torch, torch.Tensor):
            for name, expected in _CHECKS.items():
                if hasattr(owner, name):
                    site.patch(owner, name, self._check(getattr(owner, name), expected))

    def _check(self, original: Callable[..., Any], expected: bool) -> Callable[..., Any]:
        """Wrap an element-wise check of values so that it gives the result of ordinary numbers."""
        def checked(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if isinstance(result, FakeTensor) and self.of(result) is None:
                with _disable_current_modes():
                    value = torch.tensor(expected).expand(result.shape)
                self._kept.keep(result, value, (FINITE,))
            return result

        return checked

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute the result of an operator that depends on known values: numbers, or fresh fake tensors.

        Returns:
            ``None`` for any other operator, and where a value is not known.
        """
        if func.namespace != "aten" and self._share is not None:
            self._rows = max((one.shape[0] for one in tensors_in((args, kwargs)) if one.dim()), default=0)
        if _RESHAPES in func.tags:
            self._reshape(func, args, kwargs)
        if self._stands_in and func is TO_NUMBER:
            return float(VALUE) if args[0].is_floating_point() else VALUE
        if not any(tag in func.tags for tag in _BY_VALUES) or not any(
                isinstance(one, FakeTensor) for one in tensors_in((args, kwargs))):
            return None
        if func is _COUNTED and self._share is not None and (
                self.of(args[0]) is None or self._is_between_ends(args[0])):
            return self._evenly_counted(args[0], args[2] if len(args) > 2 else kwargs.get("minlength", 0))
        data, indices, masks = _masks_of(func, args)
        found = None if any(map(self._is_between_ends, masks)) else self._computed(func, args, kwargs)
        if found is None or found[0] is None:
            return self._selected(data, indices, masks)
        read = tensors_in((args, kwargs))
        self._note_assumed(read)
        return tree_map(lambda one: self._fake(one, self._assumptions(read)), found[0])

    def _selected(self, data: Any, indices: list[Any], read: list[Any]) -> Any:
        """Return the elements of any data that masks select, as fake tensors; ``None`` where a mask is not known."""
        masks = {id(one): self._mask(one) for one in read}
        if not masks or any(one is None for one in masks.values()):
            return None
        self._note_assumed(read)
        places: list[Any] = []
        for one in indices:
            if id(one) not in masks:
                places.append(one)
                continue
            with _disable_current_modes():
                found = masks[id(one)].nonzero()  # type: ignore[union-attr]
                columns = found.unbind(1)
            if data is None:
                return self._fake(found, self._assumptions(read))
            places += [self._fake(each, self._assumptions(read)) for each in columns]
        result = _INDEXED(data, places)
        self.follow(_INDEXED, (data, places), {}, result)
        return result

    def _evenly_counted(self, values: Any, count: int) -> Any:
        """Return counts of unknown values, as even as possible; ``None`` where the number of counts is not given."""
        if count < 1:
            return None
        with _disable_current_modes():
            counts = torch.full((count,), values.numel() // count)
            counts[:values.numel() % count] += 1
        self._say(EVENLY)
        return self._fake(counts, (EVENLY,))

    def _mask(self, mask: Any) -> torch.Tensor | None:
        """Return a mask's values, known or assumed, else ``None``. A mask of numbers selects where they are not 0."""
        known = self.of(mask)
        if self._share is None or (known is not None and not self._is_between_ends(mask)):
            return known
        assumed = self._pattern(mask)
        said = SELECTED.format(self._share)
        if mask.dtype is torch.bool and mask.numel() <= MOST_ELEMENTS:
            self._kept.keep(mask, assumed, (said,))
        else:
            self._kept.keep(mask, known, tuple(dict.fromkeys((*self._assumptions([mask]), said))))
        return assumed

    def _pattern(self, mask: Any) -> torch.Tensor:
        """Return the values of a mask that selects the assumed share of its elements, evenly spread."""
        with _disable_current_modes():
            steps = torch.arange(1, mask.numel() + 1, dtype=torch.float64).mul_(self._share or 0.0).floor_()
            return torch.diff(steps, prepend=torch.zeros(1, dtype=torch.float64)).bool().reshape(mask.shape)

    def _is_between_ends(self, tensor: Any) -> bool:
        """Return whether only the bounds of a tensor's values are known."""
        return self._share is not None and ENDS.format(self._share) in self._assumptions([tensor])

    def _dynamic_size(self, **limits: Any) -> int:
        """Return the assumed size of a library operator's selection: a share of the rows of its inputs."""
        share = self._share or 0.0
        self._say(SELECTED.format(share))
        return max(int(limits.get("min", 0)), int(share * (limits.get("max") or self._rows)))

    def _assumptions(self, read: list[Any]) -> tuple[str, ...]:
        """Return the sentences on what was assumed about the values of these tensors."""
        kept = [self._kept.get(one) for one in read]
        return tuple(dict.fromkeys(text for one in kept if one is not None for text in one.assumed))

    def _note_assumed(self, read: list[Any]) -> None:
        for text in self._assumptions(read):
            self._say(text)

    def of(self, tensor: Any) -> torch.Tensor | None:
        """Return the real tensor behind a fake one, or a small real one itself; ``None`` if its values are unknown."""
        if isinstance(tensor, FakeTensor):
            kept = self._kept.get(tensor)
            return None if kept is None else kept.value
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        with _disable_current_modes():
            return tensor.detach() if tensor.numel() <= MOST_ELEMENTS and tensor.device.type == "cpu" else None

    def _numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``Tensor.numpy`` that gives the known values of a fake tensor."""
        def read(tensor: Any, **options: Any) -> Any:
            known = self.of(tensor) if isinstance(tensor, FakeTensor) else None
            if known is None:
                return original(tensor, **options)
            self._note_assumed([tensor])
            with _disable_current_modes():
                return known.numpy(force=True).copy()

        return read

    def _format(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``Tensor.__format__`` that writes the known number of a fake tensor, like a real one's."""
        def written(tensor: Any, spec: str) -> Any:
            if not isinstance(tensor, FakeTensor) or tensor.dim():
                return original(tensor, spec)
            known = self.of(tensor)
            if known is None:
                return format(tensor.detach().item(), spec)
            self._note_assumed([tensor])
            with _disable_current_modes():
                return format(known.item(), spec)

        return written

    def forget(self, tensor: Any) -> None:
        """Forget the values of a tensor and of all tensors in its memory."""
        if isinstance(tensor, FakeTensor):
            tensor.constant = None  # PyTorch's own copy
            self._kept.forget(tensor)

    def _item(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``Tensor.item`` that gives a stand-in for a number that comes from data. Booleans decide what runs:
        reading them is refused as before."""
        def item(tensor: Any) -> Any:
            if self._stands_in or not isinstance(tensor, FakeTensor) or tensor.numel() != 1 or (
                    self._kept.get(tensor) is not None or tensor.dtype is torch.bool or tensor.is_complex()):
                return original(tensor)
            self._stands_in = True  # PyTorch may call it again on the way, for a function mode
            try:
                number = original(tensor)
            finally:
                self._stands_in = False
            if not self._said_read:
                self._say(READ.format(caller_line()))
            self._said_read = True
            return stand_in(number)

        return item

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the values of an operator's results, and forget those of tensors that get unknown values."""
        outputs = tensors_in(result)
        if outputs and not any(isinstance(one, FakeTensor) for one in outputs):
            return  # PyTorch's own, computed for real outside the fake world
        inputs = tensors_in((args, kwargs))
        name = func.__name__.split(".")[0]
        if not inputs and func.namespace == "aten" and name in _MADE_OF_CONSTANTS:
            if all(one.numel() <= MOST_ELEMENTS for one in outputs):
                self._note(func, args, {**kwargs, "device": torch.device("cpu")}, result)
        elif _is_chance(name, result):
            self._forget(func, args, kwargs)
            low, high = _ends(name, args)
            with _disable_current_modes():
                number = torch.full(result.shape, low + DRAWN * (high - low), dtype=result.dtype)
            self._kept.keep(result, number, (RANDOM,))
        elif name in _LIKE and func.namespace == "aten" and isinstance(result, FakeTensor):
            if result.numel() <= MOST_FILLED and result.layout is torch.strided:
                value: Any = _LIKE[name]
                if "full" in name:
                    value = kwargs["fill_value"] if "fill_value" in kwargs else args[value]
                with _disable_current_modes():
                    filled = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).fill_(value)
                self._kept.keep(result, filled)
        elif func is LIFT and inputs[0].numel() <= MOST_ELEMENTS:
            constant = inputs[0].constant if isinstance(inputs[0], FakeTensor) else inputs[0]
            if constant is not None:
                with _disable_current_modes():
                    copied = constant.detach().clone()
                self._kept.keep(result, copied)
        elif func is _SCALED_FINITE:
            self._forget(func, args, kwargs)
            with _disable_current_modes():
                none = torch.zeros(args[1].shape, dtype=args[1].dtype)
            self._kept.keep(args[1], none, (FINITE,))
        elif _RESHAPES in func.tags:  # the content of the memory stays
            if self._reshaped is not None:
                self._keep_results(self._reshaped[0], outputs, self._reshaped[1])
        elif name in _FILLED and len(inputs) == 1 and self.of(inputs[0]) is None:
            self._forget(func, args, kwargs)
            if 0 < inputs[0].numel() <= MOST_FILLED and isinstance(inputs[0], FakeTensor):
                self._fill(func, args, kwargs, inputs[0])
        elif (not self._kept and all(isinstance(one, FakeTensor) for one in inputs)) or not self._note(
                func, args, kwargs, result):
            self._forget(func, args, kwargs)
            self._assume_between_ends(func, args, kwargs, result)
            self._assume_mask(name, result)

    def _assume_mask(self, name: str, result: Any) -> None:
        """Assume which elements a comparison of unknown values selects: a program may ask whether there are any."""
        if (self._share is not None and name in _COMPARES and isinstance(result, FakeTensor)
                and result.dtype is torch.bool and 0 < result.numel() <= MOST_ELEMENTS):
            self._kept.keep(result, self._pattern(result), (SELECTED.format(self._share),))

    def _assume_between_ends(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Fill an operator's result of known bounds with values from the middle of their range."""
        if self._share is None or not isinstance(result, FakeTensor) or result.numel() > MOST_ELEMENTS:
            return
        ends = ends_of(func, args, kwargs, result)
        if ends is not None:
            with _disable_current_modes():
                value = spread(ends, self._share, result)
            self._kept.keep(result, value, (ENDS.format(self._share),))

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Note the values of results; return whether they are known."""
        outputs, inputs = tensors_in(result), tensors_in((args, kwargs))
        if sum(one.numel() for one in outputs) > (MOST_EXPANDED if func.is_view else MOST_ELEMENTS):
            return False
        found = self._computed(func, args, kwargs) or self._any_rows(func, args, result)
        if found is None:
            return False
        assumed = self._assumptions(inputs)
        self._keep_results(found[0], outputs, assumed)
        if assumed and func._schema.is_mutable:
            self._assume_of_sharing(_written(func, args, kwargs), assumed)
        return True

    def _reshape(self, func: Any, args: Any, kwargs: Any) -> None:
        """Compute the result of an operator that changes a tensor's shape in place, while its values are found under
        the old shape. A tensor that gets other memory has that memory's values, which are kept already. Memory that is
        added has unknown content."""
        self._reshaped = None
        name = func.__name__
        found = self._computed(func, args, kwargs) if self._kept and not name.startswith("set_") else None
        if found is not None and not (name.startswith("resize_") and found[0].numel() > args[0].numel()):
            self._reshaped = (found[0], self._assumptions(tensors_in((args, kwargs))))

    def _keep_results(self, found: Any, outputs: list[Any], assumed: tuple[str, ...]) -> None:
        for fake, one in zip(outputs, tensors_in(found), strict=False):
            if isinstance(fake, FakeTensor) and one.shape == fake.shape and one.dtype == fake.dtype:
                self._kept.keep(fake, one, assumed)

    def _any_rows(self, func: Any, args: Any, result: Any) -> tuple[Any] | None:
        """Return what unknown indices select from rows that are all equal, in a tuple; ``None`` in all other cases."""
        if func is _ROWS:
            dim = args[1]
        elif func is _INDEXED and len(args[1]) == 1 and args[1][0].dtype not in (torch.bool, torch.uint8):
            dim = 0
        else:
            return None
        rows = self.of(args[0])
        if rows is None or not rows.dim() or not rows.shape[dim]:
            return None
        with _disable_current_modes():
            first = rows.narrow(dim, 0, 1)
            if not torch.equal(rows, first.expand_as(rows)):
                return None
            return ((first if func is _ROWS else first.squeeze(0)).expand(result.shape).clone(),)

    def _assume_of_sharing(self, written: list[Any], assumed: tuple[str, ...]) -> None:
        """Add the assumptions on a written tensor to all tensors that share its memory."""
        for one in written:
            for kept in self._kept.sharing(one):
                kept.assumed = tuple(dict.fromkeys((*kept.assumed, *assumed)))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return an operator's result on the values of its inputs, in a tuple; ``None`` where a value is unknown."""
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        values: dict[int, torch.Tensor] = {}
        for one in tensors_in((args, kwargs)):
            value = self.of(one)
            if value is None:
                return None
            large = value.numel() > MOST_ELEMENTS and not func.is_view
            if large and func not in _OF_ALL:
                return None
            with _disable_current_modes():
                if large:  # elements that lie in the same place are the same
                    value = value[tuple(slice(None) if step else slice(1) for step in value.stride())]
                values[id(one)] = value.detach()  # an operator may give it another shape in place
        real = tree_map(lambda one: values[id(one)] if isinstance(one, torch.Tensor) else one, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            try:
                return (func(*real[0], **real[1]),)
            except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
                return None  # the program's own call raises the error, if it was wrong

    def _fill(self, func: Any, args: Any, kwargs: Any, target: Any) -> None:
        with _disable_current_modes(), torch.no_grad():
            real = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            self._kept.keep(target, func(real, *args[1:], **kwargs))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget all tensors that share memory with what an operator writes."""
        if func._schema.is_mutable and self._kept:
            for one in _written(func, args, kwargs):
                self._kept.forget(one)

    def _fake(self, value: Any, assumed: tuple[str, ...]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with _disable_current_modes():
            shape, stride, dtype = value.shape, value.stride(), value.dtype
        fake = torch.empty_strided(shape, stride, dtype=dtype)
        if value.numel() <= MOST_ELEMENTS:
            self._kept.keep(fake, value, assumed)
        return fake


def _masks_of(func: Any, args: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return the data that an operator selects from (``None`` if it only returns positions), its indices, and the masks
    among them. An operator that does not select has no masks."""
    if func is _WHERE:
        return None, [args[0]], [args[0]]
    if func is _MASKED and args[0].shape == args[1].shape:
        return args[0], [args[1]], [args[1]]
    if func is _INDEXED:
        return *args, [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
    return None, [], []


def _is_chance(name: str, result: Any) -> bool:
    """Return whether an operator draws one random number from a range."""
    return name in ("rand", "uniform_") and isinstance(result, FakeTensor) and result.numel() == 1


def _ends(name: str, args: Any) -> tuple[float, float]:
    """Return the bounds of a random number."""
    low, high = (0.0, 1.0) if name == "rand" else (*args[1:], *(0.0, 1.0)[len(args) - 1:])
    return low, high


def _named(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return the arguments of a call, each with its entry of the schema."""
    schema = func._schema.arguments
    by_name = {argument.name: argument for argument in schema}
    return [*zip(schema, args, strict=False), *((by_name[name], value) for name, value in kwargs.items()
                                                if name in by_name)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operator writes into."""
    return tensors_in([value for argument, value in _named(func, args, kwargs)
                     if argument.alias_info is not None and argument.alias_info.is_write])
