"""Facts read from a kernel's name alone: its family, whether it computes in TF32, the type of its elements.

Used where no operation was recorded (traces without host events, kernels of a CUDA graph), and for what an operation's
arguments leave out. Sources: Names seen in the traces of V100 to B200 and MI210 to MI300X, 2020 to 2026; naming schemes
of cuBLAS, cuDNN, CUTLASS, Tensile ("Cijk"), MIOpen, ATen, FBGEMM, Triton and vLLM.
"""

from __future__ import annotations

import re
from functools import cache

from kernel_models.op_call import Family, short_dtype

# First match wins: names contain each other's words ("cudnn::bn_bw…", "softmax" within attention).
_FAMILIES: tuple[tuple[Family, str], ...] = (
    (Family.TRITON, r"^triton_"),
    (Family.TRANSFER, r"^Memcpy"),
    (Family.MEMSET, r"^Memset"),
    (Family.ATTENTION, r"flash|[Ff]mha|attn|attention|splitkv|bwd_kernel_d[kq]"),
    (Family.NORM, r"batch_?norm|layer_?norm|rms_?norm|group_?norm|\bbn_(fw|bw)|RowwiseMoments|GammaBeta|LayerNorm"
                  r"|BatchNorm|ComputeInternalGradients|cuComputeGrad"),
    (Family.RECURRENT, r"LSTM|GRU|RNN|persist.*rnn|lstm_cell|gru_cell"),
    (Family.CONV, r"cask_cudnn|cudnn.*(conv|dgrad|wgrad|fprop)|scudnn|[wd]grad|fprop|winograd|implicit_(gemm|conv)"
                  r"|\bconv|convolve|igemm_(fwd|bwd|wrw)|nchwToNhwc|nhwcToNchw|batched_transpose|SubTensorOp|Im2[Cc]ol"
                  r"|Col2Im|im2col|scalePackedTensor|miopen.*conv|naive_conv|depthwise"),
    (Family.GEMM, r"gemm|gemv|Cijk_|nvjet|cublas|splitK|split_k|cutlass.*(Kernel|Universal)|wgmma|matmul|_mm_|\bbmm_"
                  r"|trsm|wvSplit|LLGemm|getrf|potrf"),
    (Family.SOFTMAX, r"soft_?max"),
    (Family.EMBEDDING, r"embedding|EmbeddingBag|embedding_bag|compute_grad_weight|krn_partial|sum_and_scatter"),
    (Family.LOSS, r"nll_loss|NLLLoss|ctc_loss|CrossEntropy|mse_kernel"),
    (Family.CONCAT, r"CatArray|cat_copy|split_with_sizes"),
    (Family.OPTIMIZER, r"multi_tensor_apply|Adam|FusedOptim|sgd_kernel|adagrad"),
    (Family.POOLING, r"pool"),
    (Family.INTERPOLATE, r"upsample|grid_sampl"),
    (Family.SORT, r"[Rr]adix|[Ss]ort|[Tt]op_?[Kk]|bitonic|gatherTopK"),
    (Family.RANDOM, r"distribution_|[Dd]ropout|philox|curand|randperm"),
    (Family.INDEX, r"index|gather|scatter|permute|bounds_check|bucketize|linearize|nonzero|Select|recat"
                   r"|reshape_and_cache|expand_into_jagged|jagged"),
    (Family.COPY, r"direct_copy|copy_kernel|CopyKernel|copyPacked|transpose|batched_memcpy|__amd_rocclr_copy"),
    (Family.REDUCTION, r"reduce|[Ss]can|DeviceReduce|cumsum|RunLengthEncode"),
    (Family.MEMSET, r"__amd_rocclr_fill|fillBuffer"),
    (Family.ELEMENTWISE, r"elementwise|CUDAFunctor|pointwise|quantiz|FP8|fp8|silu|gelu|act_and_mul|rotary|swiglu"
                         r"|activation|addcmul|spin_kernel|fill|dequant|[Aa]dd"),
)
_TF32 = re.compile(r"tf32|s1688(gemm|fprop|dgrad|wgrad)|tensorop_s1688|s1688cudnn|_S_?S?X?F32|XF32", re.IGNORECASE)
_TEMPLATE = re.compile(r"[<,(]\s*(c10::\w+|long int|long|float|double|int|bool|unsigned char|signed char|__nv_bfloat16"
                       r"|__hip_bfloat16|__half)(?=[\s,>*])")
_OPAQUE = re.compile(r"OpaqueType<(\d{1,4})u?>")
_BY_SIZE = {1: "uint8", 2: "bf16", 4: "fp32", 8: "int64"}


@cache
def family_hint(name: str) -> Family:
    """Return the family that a kernel's name indicates; ``Family.OTHER`` if it indicates none."""
    return next((family for family, expression in _compiled() if expression.search(name)), Family.OTHER)


@cache
def uses_tf32(name: str) -> bool:
    """Return whether a matrix kernel of this name computes fp32 data in TF32 (NVIDIA's "s1688" and "tf32", AMD's
    "xf32")."""
    return _TF32.search(name) is not None


@cache
def element_dtype(name: str) -> str:
    """Return the short name of the first element type among a kernel's template arguments, "" if there is none.

    Names of kernels that only move bytes give a size instead: 2 bytes count as bf16, 4 as fp32.
    """
    opaque = _OPAQUE.search(name)
    if opaque is not None:
        return _BY_SIZE.get(int(opaque[1]), "")
    found = _TEMPLATE.search(name)
    return "" if found is None else short_dtype(found[1])


def short_kernel_name(name: str) -> str:
    """Return a kernel's name without return type, template arguments and parameters: enough to recognise it."""
    name = name.removeprefix("void ")
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    plain = re.split(r"[<(]", name, maxsplit=1)[0].strip() or name
    return plain if len(plain) <= 80 else plain[:79] + "…"


@cache
def _compiled() -> tuple[tuple[Family, re.Pattern[str]], ...]:
    return tuple((family, re.compile(expression)) for family, expression in _FAMILIES)
