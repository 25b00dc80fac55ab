"""Optimizers and gradient clipping: ``foreach`` where torch chooses it for native tensors.

torch's own choice runs; it is only told that fake tensors are native, and of a GPU that it has multi-tensor kernels. On
a CPU clipping goes over lists then, and optimizers do not unless they are asked to.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        name = "_get_foreach_kernels_supported_devices"
        if hasattr(module, name):
            site.patch(module, name, _with_cpu(site, getattr(module, name)))
    _install_native(site)


def _install_native(site: Site) -> None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

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


SUBSTITUTION = Substitution(
    "optimizers", "Where nothing is said, torch updates CUDA parameters with multi-tensor (foreach) kernels.",
    cpu=frozenset({"aten::mul_", "aten::add_", "aten::lerp_", "aten::addcmul_", "aten::addcdiv_", "aten::sqrt",
                   "aten::div", "aten::add", "aten::linalg_vector_norm", "aten::stack"}),
    gpu=frozenset({"aten::_foreach_add_", "aten::_foreach_mul_", "aten::_foreach_lerp_", "aten::_foreach_addcmul_",
                   "aten::_foreach_addcdiv_", "aten::_foreach_sqrt", "aten::_foreach_div_", "aten::_foreach_norm",
                   "aten::_foreach_add", "aten::_foreach_mul"}),
    install=_install)

ON_CPU = Substitution(
    "clipping", "Where nothing is said, torch clips gradients of native tensors as lists.",
    cpu=frozenset({"aten::linalg_vector_norm", "aten::mul_"}),
    gpu=frozenset({"aten::_foreach_norm", "aten::_foreach_mul_"}),
    install=_install_native)
