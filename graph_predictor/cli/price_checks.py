"""Sizes that an operation itself would refuse, where its formula would not notice: PyTorch's own rules, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from graph_predictor.cli.price_arguments import Asked, PriceError, Sizes, registry_names
from kernel_models import op_call
from kernel_models.families import registry as families_registry

_PRODUCTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2"),
             "addbmm": ("batch1", "batch2"), "addmm": ("mat1", "mat2"), "matmul": ("self", "other"),
             "linear": ("input", "weight")}
_ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
              "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_attention_math")
"""Operations whose tensors are (batch, heads, tokens, head size)."""
_OF_CLASSES = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss")
_WINDOWS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
            "max_pool2d_with_indices", "max_pool3d_with_indices")


@dataclass(frozen=True)
class _Sizes:
    """An operation's arguments, ready for the rules.

    Attributes:
        name: of the operation, as written.
        plain: without name space, overload and underscore.
        tensors: sizes by argument; only tensors that were given.
        dtypes: their element types.
        values: numbers as given.
    """

    name: str
    plain: str
    tensors: Mapping[str, Sizes]
    dtypes: Mapping[str, str]
    values: Mapping[str, Any]

    def refuse(self, why: str) -> PriceError:
        """The error of sizes that do not fit."""
        shapes = ", ".join(f"{name} {shown(sizes)}" for name, sizes in self.tensors.items())
        return PriceError(f"{self.name} cannot take {shapes}: {why}.")


def check(name: str, wanted: Asked) -> None:
    """Refuse sizes that the operation itself would refuse, where its formula would not notice.

    Raises:
        PriceError: they do not fit each other.
    """

    given, rule = wanted.operation.arguments, families_registry.forward_rule(name)
    if not name.startswith("aten::") or not given or rule is None:
        return
    plain = families_registry.plain_name(name)
    if plain in ("cat", "concat", "concatenate", "stack"):
        _joined(name, plain, given[0].shape, int(wanted.values.get("dim", 0)))
    pairs = [(one, argument) for one, argument in zip(registry_names(name), given, strict=False)
             if argument.shape is not None and not argument.dtype.startswith(("Scalar", "TensorList"))]
    tensors: dict[str, Any] = {one: argument.shape for one, argument in pairs}
    sizes = _Sizes(name, plain, tensors, {one: argument.dtype for one, argument in pairs}, wanted.values)
    if plain in _PRODUCTS:
        _product(sizes, *_PRODUCTS[plain])
    elif plain in _ATTENTION:
        _attention(sizes)
    elif plain in ("conv1d", "conv2d", "conv3d", "convolution"):
        _convolution(sizes)
    elif plain == "embedding" and sizes.dtypes.get("weight", "").startswith(("int", "uint")):
        raise PriceError(f"{name} takes its table before its indices: {name}(weight, indices).")
    elif plain in _WINDOWS and "kernel_size" not in wanted.values:
        raise PriceError(f"{name} needs the size of its window; give --value kernel_size=….")
    elif plain in ("topk", "kthvalue"):
        _some_of(sizes)
    else:
        _normalised(sizes)
        _broadcast(sizes, rule)


def _joined(name: str, plain: str, first: Any, dim: int) -> None:
    if not first or not isinstance(first[0], tuple):
        return
    shapes = [shape for shape in first if shape != (0,)]
    rank = len(shapes[0]) if shapes else 0
    if not -rank - (plain == "stack") <= dim < rank + (plain == "stack"):
        raise PriceError(f"{name} has no dimension {dim} to join tensors of {rank} dimensions along.")
    kept = [shape if plain == "stack" else shape[:dim % rank] + shape[dim % rank + 1:] for shape in shapes]
    if len({len(shape) for shape in shapes}) > 1 or len(set(kept)) > 1:
        but = "" if plain == "stack" else f" but those of dimension {dim}"
        raise PriceError(f"{name} cannot join {', '.join(map(shown, shapes))}: all sizes{but} must be equal.")


def _product(sizes: _Sizes, left: str, right: str) -> None:
    """Batches of both factors are equal, or broadcast in matmul; so are element types."""
    one, other = sizes.tensors.get(left), sizes.tensors.get(right)
    if one is None or other is None:
        return
    batches = (one[:-2], other[:-2]) if sizes.plain != "linear" else ((), ())
    if batches[0] != batches[1] and not (sizes.plain == "matmul" and _fit_together(batches)):
        raise sizes.refuse("their batches must be equal")
    if sizes.dtypes[left] != sizes.dtypes[right]:
        raise PriceError(f"{sizes.name} cannot multiply {sizes.dtypes[left]} by {sizes.dtypes[right]}; give both one "
                         "type with --dtype.")


def _attention(sizes: _Sizes) -> None:
    query, key, value = (sizes.tensors.get(one, ()) for one in ("query", "key", "value"))
    if not len(query) == len(key) == len(value) >= 3:
        return
    if query[-1] != key[-1]:
        raise sizes.refuse("queries and keys must be of one head size")
    if key[-2] != value[-2]:
        raise sizes.refuse("there must be as many keys as values")
    if len(query) == 4:
        if len({query[0], key[0], value[0]} - {1}) > 1:
            raise sizes.refuse("their batches must be equal")
        if key[1] != value[1] or (key[1] and query[1] % key[1]):
            raise sizes.refuse("the heads of queries must be a multiple of those of keys and values")


def _convolution(sizes: _Sizes) -> None:
    first, weight = sizes.tensors.get("input", ()), sizes.tensors.get("weight", ())
    for one, least in (("stride", 1), ("dilation", 1), ("padding", 0), ("groups", 1)):
        given = sizes.values.get(one)
        if given is not None and not isinstance(given, str) and any(
                number < least for number in (given if isinstance(given, list) else [given])):
            raise PriceError(f"The {one} of {sizes.name} is {least} or more; correct --value {one}=….")
    if len(first) < 2 or len(weight) < 2 or sizes.values.get("transposed"):
        return
    channels, each = first[1] if len(first) == len(weight) else first[0], weight[1]
    groups = sizes.values.get("groups")
    if each * groups != channels if groups else channels % max(each, 1):
        raise PriceError(f"The weight {shown(weight)} of {sizes.name} takes {each} channels a group, which does not "
                         f"fit {channels} channels{f' in {groups} groups' if groups else ''}.")
    if groups and weight[0] % groups:
        raise PriceError(f"The weight {shown(weight)} of {sizes.name} gives {weight[0]} channels, which cannot be "
                         f"split into {groups} groups.")


def _some_of(sizes: _Sizes) -> None:
    """Check that no more are taken than there are along the dimension."""
    shape, some, dim = sizes.tensors.get("self", ()), sizes.values.get("k"), sizes.values.get("dim", -1)
    if not shape or not isinstance(some, int) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return
    if not 0 <= some <= shape[dim]:
        raise PriceError(f"{sizes.name} cannot give {some} of {shape[dim]} elements; correct --value k=….")


def _normalised(sizes: _Sizes) -> None:
    """Weights and statistics have one element for each normalised size or channel."""
    first = sizes.tensors.get("input", ())
    if not first or sizes.plain.endswith("backward"):
        return
    own = {one: sizes.tensors[one] for one in ("weight", "bias", "running_mean", "running_var") if one in sizes.tensors}
    if sizes.plain in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        weight = own.get("weight", ())
        over = tuple(sizes.values.get("normalized_shape") or (
            weight if weight and first[-len(weight):] == weight else first[-1:]))
        what = "normalised sizes"
        if "normalized_shape" in sizes.values and first[-len(over):] != over:
            raise PriceError(f"The normalised sizes {shown(over)} of {sizes.name} are not the last sizes of "
                             f"{shown(first)}; correct --value normalized_shape=….")
    elif "batch_norm" in sizes.plain or sizes.plain in ("group_norm", "instance_norm"):
        over, what = first[1:2], "channels"
        groups = sizes.values.get("num_groups")
        if groups is not None and (groups < 1 or prod(over) % groups):
            raise PriceError(f"{sizes.name} cannot split {shown(over)} channels into {groups} groups; correct --value "
                             "num_groups=….")
    else:
        return
    for one, shape in own.items():
        if shape and prod(shape) != prod(over):
            raise PriceError(f"The {one} {shown(shape)} of {sizes.name} does not fit its {what} {shown(over)}.")


def _broadcast(sizes: _Sizes, rule: families_registry.Rule) -> None:
    """Tensors of an element-by-element operation broadcast; a loss has a target for each of its inputs."""
    first, target = sizes.tensors.get("self"), sizes.tensors.get("target")
    if sizes.plain in _OF_CLASSES:
        if first and target is not None and target != first[:1] * (len(first) > 1) + first[2:] and not (
                sizes.plain == "cross_entropy_loss" and target == first):
            raise sizes.refuse("there must be one target for each row of classes")
        return
    elementwise = rule.family is op_call.Family.ELEMENTWISE and rule.names[:2] in (("self", "other"),
                                                                                   ("self", "tensor1"))
    spread = elementwise or sizes.plain in ("lerp", "where") or rule.names == ("self", "target")
    if spread and sizes.plain != "isin" and not _fit_together(list(sizes.tensors.values())):
        raise sizes.refuse("counted from the last, sizes must be equal or 1")


def _fit_together(shapes: Sequence[Sizes]) -> bool:
    """Return whether these broadcast."""
    rank = max((len(shape) for shape in shapes), default=0)
    return all(len({shape[-d] for shape in shapes if d <= len(shape)} - {1}) <= 1 for d in range(1, rank + 1))


def shown(sizes: Sequence[int]) -> str:
    """ "3x4"; "()" of a tensor without dimensions."""
    return "x".join(map(str, sizes)) or "()"
