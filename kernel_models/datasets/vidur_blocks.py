"""Vidur's tables of transformer blocks: fp16 operations of one layer by tokens and tensor-parallel workers.

``op`` names what was timed (their ``sarathi`` model): projections are linear layers split among the workers, norms and
the residual addition are not. Times are quantised to 0.5 or 1 µs. The shape group is the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import Reader
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.families.elementwise import elementwise
from kernel_models.families.embedding import embedding
from kernel_models.families.gemm import gemm
from kernel_models.families.norm import norm
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec

if TYPE_CHECKING:
    import pandas

DEVICES = {"a100": "a100-pcie-80g"}
"""Names that say too little. Vidur's ``a100`` is assumed to be the PCIe card with 80 GB: its paper (MLSys 2024)
is understood to have been measured on Azure's NC A100 v4, which have those. Its repository knows nodes with pairwise
NVLink and DGX A100 alike, and does not say on which of both the tables were made."""
_GROUPS = {"gemm": ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")}
_SIZES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp", "num_tokens",
          "num_tensor_parallel_workers")


class _Layer(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    expanded: int
    vocabulary: int
    gated: int
    tokens: int
    workers: int


def device_of(gpu: str) -> DeviceSpec:
    """The device of a name in these tables; see ``DEVICES``."""
    return resolve_device(DEVICES.get(gpu, gpu))


def _call(op: str, layer: _Layer) -> Iterator[OpCall]:
    """The call of one operation on one worker."""
    tokens, width, workers, dtype = layer.tokens, layer.width, layer.workers, "fp16"
    head = width // layer.heads
    heads = layer.heads // workers + 2 * max(layer.kv_heads // workers, 1)
    expanded = layer.expanded // workers
    if op == "attn_pre_proj":
        yield from gemm(1, tokens, heads * head, width, dtype, "nt")
    elif op == "attn_post_proj":
        yield from gemm(1, tokens, width, width // workers, dtype, "nt")
    elif op == "mlp_up_proj":
        yield from gemm(1, tokens, expanded * (2 if layer.gated else 1), width, dtype, "nt")
    elif op == "mlp_down_proj":
        yield from gemm(1, tokens, width, expanded, dtype, "nt")
    elif op == "mlp_act":
        inputs = TensorSpec((tokens, expanded * (2 if layer.gated else 1)), dtype)
        yield from elementwise("silu_and_mul" if layer.gated else "gelu", [inputs], (tokens, expanded), dtype)
    elif op == "add":
        whole = TensorSpec((tokens, width), dtype)
        yield from elementwise("add", [whole, whole])
    elif op == "attn_rope":
        rotated = (layer.heads // workers + max(layer.kv_heads // workers, 1)) * head
        yield from elementwise("rotary_embedding", [TensorSpec((tokens, rotated), dtype)])
    elif op == "emb":
        yield from embedding("embedding", tokens, tokens, layer.vocabulary // workers, width, 1, dtype, "int64",
                             ("parallel",) if workers > 1 else ())
    else:
        kind = "rms_norm" if layer.gated else "layer_norm"
        yield from norm(kind, tokens, width, dtype, width, bias=not layer.gated)


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device and operation; the projections are one."""
    group = {op: name for name, ops in _GROUPS.items() for op in ops}
    for (gpu, _), rows in frame.groupby(["gpu", frame.op.map(lambda op: group.get(op, op))], sort=True):
        layers = [_Layer(*(int(size) for size in sizes)) for sizes in rows[list(_SIZES)].to_numpy().tolist()]
        calls = [call for op, layer in zip(rows.op, layers, strict=True) for call in _call(op, layer)]
        software = "vidur" if calls[0].family is Family.GEMM else f"vidur/{rows.op.iloc[0]}"
        yield Samples(device_of(str(gpu)).name, software, path.name, calls, rows.latency_us.to_numpy(float),
                      {"model": [str(model) for model in rows.model]})


READER = Reader("transformer blocks", frozenset({*_SIZES, "op", "gpu", "model", "latency_us"}), read)
