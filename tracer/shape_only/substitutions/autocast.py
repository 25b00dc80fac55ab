"""``autocast("cuda")`` for tensors that claim to be on the CPU: CUDA's lists in place of the CPU's.

Fake tensors carry the CPU's dispatch keys, so their autocast key is ``AutocastCPU``. While a trace runs, CUDA's policy
replaces the CPU's kernels of that key. Contexts for "cuda" become contexts of that key: entered anywhere, nested, as
decorators, and again when checkpointing runs forward in backward. A context made before the trace is an error if torch
had already switched it off for lack of a GPU: the step would silently be traced in fp32.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.substitutions.operators import Site, operator_of
from tracer.shape_only.tensors import tensors_in

_KEY = "AutocastCPU"
_GPU = ("cuda", "hip")

# Operators that CUDA's autocast runs in each type, by ``ATen/autocast_mode.h`` of PyTorch. Operators that the installed
# torch lacks are skipped; ``name.overload`` means only that overload.
LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)
"""Operators that run in autocast's type (fp16 or bf16)."""
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)
"""Operators that run in fp32: inputs are cast."""
FP32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)
"""Operators that run in fp32 by their ``dtype`` argument, if the caller gave none: inputs are not cast."""
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators that run in fp32 by another overload with a ``dtype``."""
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)
"""Operators that run in the widest type among their inputs."""
REFUSED = ("binary_cross_entropy",)
"""Operators that raise under autocast; the caller must use another operator."""


def autocast(site: Site) -> None:
    """Install CUDA's autocast: norms, softmax, sums, powers and losses in fp32; the CPU's has other lists."""
    policy = _Policy(site)
    policy.install()
    _redirect(site, policy)


class _Policy:
    """CUDA's autocast kernels, with a cache of cast weights."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cache: dict[int, tuple[Any, Any]] = {}
        self.exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def install(self) -> None:
        makers: list[tuple[tuple[str, ...], Callable[[Any], Callable[..., Any]]]] = [
            (LOWER, self._lower), (FP32, self._fp32), (FP32_RESULT, self._fp32_result),
            (WIDEST, self._widest), (REFUSED, self._refused)]
        covered = set()
        for names, make in makers:
            for name in names:
                operator = operator_of(name)
                if operator is not None:
                    covered.add(operator.name())
                    self.site.library.impl(name, make(operator), _KEY)
        for name, other in NORMS.items():
            operator, target = operator_of(name), operator_of(other)
            if operator is not None and target is not None:
                covered.add(operator.name())
                self.site.library.impl(name, self._norm(operator, target), _KEY)
        for name in _with_cpu_kernel():
            if name not in covered:  # on the CPU's list only
                self.site.library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, _KEY)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return the value with floating-point tensors (except fp64) cast to ``dtype``, weights through the cache."""
        if isinstance(value, torch.Tensor):
            if not _eligible(value) or value.dtype is dtype:
                return value
            self.site.used("autocast")
            cached = (dtype in (torch.float16, torch.bfloat16) and value.dtype is torch.float32 and value.is_leaf
                      and value.requires_grad and not value._is_view() and torch.is_autocast_cache_enabled())
            if not cached:
                return value.to(dtype)
            known = self.cache.get(id(value))
            if known is None or known[0]() is not value:
                known = self.cache[id(value)] = (weakref.ref(value), value.to(dtype))
            return known[1]
        if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
            return type(value)(self.cast(part, dtype) for part in value)
        return value

    def _casting(self, operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(self.exclude):
            return operator(*(self.cast(a, dtype) for a in args),
                            **{name: self.cast(value, dtype) for name, value in kwargs.items()})

    def _lower(self, operator: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._casting(operator, args, kwargs, torch.get_autocast_dtype("cpu"))

    def _fp32(self, operator: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._casting(operator, args, kwargs, torch.float32)

    def _fp32_result(self, operator: Any) -> Callable[..., Any]:
        place = [a.name for a in operator._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is None and _eligible(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
                if place < len(operator._schema.arguments) and not operator._schema.arguments[place].kwarg_only:
                    args, kwargs = (*args, torch.float32), {k: v for k, v in kwargs.items() if k != "dtype"}
            with torch._C._ExcludeDispatchKeyGuard(self.exclude):
                return operator(*args, **kwargs)

        return kernel

    def _norm(self, operator: Any, target: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.exclude):
                if _eligible(args[0]):
                    return target(*args, **kwargs, dtype=torch.float32)
                return operator(*args, **kwargs)

        return kernel

    def _widest(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            widest = torch.get_autocast_dtype("cpu")
            for tensor in tensors_in((args, kwargs)):
                if _eligible(tensor):
                    widest = torch.promote_types(widest, tensor.dtype)
            return self._casting(operator, args, kwargs, widest)

        return kernel

    def _refused(self, operator: Any) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> Any:
            raise ShapeOnlyError(f"{operator.name().removeprefix('aten::')} is refused under CUDA's autocast: take "
                                 "binary_cross_entropy_with_logits, or leave autocast for the loss.")

        return kernel


def _redirect(site: Site, policy: _Policy) -> None:
    """Redirect contexts and queries of CUDA's autocast to the key that replaces it."""
    kind = torch.amp.autocast_mode.autocast
    begin, enter, clear = kind.__init__, kind.__enter__, torch.clear_autocast_cache
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def __init__(self: Any, device_type: str, dtype: Any = None, enabled: bool = True,
                 cache_enabled: Any = None) -> None:
        gpu = device_type in _GPU
        from_torch = str(sys._getframe(1).f_globals.get("__name__", "")).split(".")[0] == "torch"
        if gpu:
            dtype = torch.float16 if dtype is None else dtype
            if enabled and dtype not in (torch.float16, torch.bfloat16):
                enabled = False  # as CUDA does, which warns
        elif device_type == "cpu" and not from_torch:
            enabled = torch.is_autocast_enabled("cpu")  # the CPU's autocast does nothing to tensors on a GPU
            dtype = torch.get_autocast_dtype("cpu")
        begin(self, "cpu" if gpu else device_type, dtype, enabled, cache_enabled)
        made.add(self)

    def __enter__(self: Any) -> Any:
        if getattr(self, "device", "") in _GPU and self not in made:
            if not self._enabled:
                raise ShapeOnlyError("An autocast context for cuda was made before the trace began, when torch had "
                                     "switched it off because there is no GPU, and the step would be traced in fp32: "
                                     "make it inside the traced function.")
            self.device = self._device = "cpu"
        return enter(self)

    def clear_autocast_cache() -> None:
        policy.cache.clear()
        clear()

    site.patch(kind, "__init__", __init__)
    site.patch(kind, "__enter__", __enter__)
    site.patch(torch, "clear_autocast_cache", clear_autocast_cache)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        if hasattr(torch, name):
            site.patch(torch, name, _about_cpu(getattr(torch, name), name))
    if hasattr(torch, "get_autocast_gpu_dtype"):
        site.patch(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))


def _about_cpu(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        if not args and name == "is_autocast_enabled":
            return original("cpu")
        if args and args[0] in _GPU:
            if name == "get_autocast_dtype" and not torch.is_autocast_enabled("cpu"):
                return torch.float16
            return original("cpu", *args[1:])
        return original(*args)

    return function


def _eligible(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


_CPU_KERNELS: list[str] = []


def _with_cpu_kernel() -> list[str]:
    """Return the operators with an autocast kernel for the CPU, cached before any is replaced."""
    if not _CPU_KERNELS:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        _CPU_KERNELS.extend(name for name in torch._C._dispatch_get_all_op_names()
                            if name.startswith("aten::") and has(name, _KEY))
    return _CPU_KERNELS


def grad_scaler(site: Site) -> None:
    """Enable the gradient scaler of fp16 training, as on a GPU; its gradients are assumed to be finite.

    torch disables ``GradScaler("cuda")`` without a GPU. The scaler reads the gradients to decide whether to skip a
    step, and a trace has no values: the step is taken, without the wait for that read.
    """
    kind = getattr(torch.amp, "GradScaler", None)
    if kind is None:
        return
    begin = kind.__init__

    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        site.used("grad_scaler")
        site.note("The gradient scaler's question whether gradients are finite was answered with yes: on a GPU the "
                  "host waits for that answer.")
        return optimizer.step(*args, **kwargs)

    site.patch(kind, "__init__", __init__)
    site.patch(kind, "_maybe_opt_step", _maybe_opt_step)
