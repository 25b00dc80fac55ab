"""Matrix products in all four layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _check(settings: dict[str, Any]) -> str:
    if settings["dtype"] == "fp8":
        if settings["layout"] != "nt" or settings["op"] != "mm":
            return "dtype=fp8 goes with op=mm and layout=nt only (rows of the one by rows of the other)."
        if settings["n"] % 16 or settings["k"] % 16:
            return "dtype=fp8 needs n and k to be multiples of 16."
    if (settings["op"] == "bmm") != (settings["batch"] > 1):
        return "op=bmm goes with batch above 1, the others with batch=1."
    return ""


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``layout``: how A [m, k] and B [k, n] are stored, "n" as written (row-major), "t" transposed."""
    torch = lab.torch
    m, n, k, batch, dtype = (settings[name] for name in ("m", "n", "k", "batch", "dtype"))
    first, second = settings["layout"]
    outer = (batch,) if settings["op"] == "bmm" else ()
    flops = 2.0 * batch * m * n * k
    element = BYTES[dtype]
    if dtype == "fp8":
        a = lab.random(m, k, dtype="bf16").to(torch.float8_e4m3fn)
        b = lab.random(n, k, dtype="bf16").to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=lab.device)
        return Bench(lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), flops,
                     m * k + k * n + 2.0 * m * n)
    lab.tf32(dtype == "tf32")
    a = lab.random(*outer, m, k, dtype=dtype) if first == "n" else lab.random(*outer, k, m, dtype=dtype).mT
    b = lab.random(*outer, k, n, dtype=dtype) if second == "n" else lab.random(*outer, n, k, dtype=dtype).mT
    moved = element * batch * (m * k + k * n + m * n)
    if settings["op"] == "addmm":
        bias = lab.random(n, dtype=dtype)
        return Bench(lambda: torch.addmm(bias, a, b), flops, moved + element * n)
    product = torch.bmm if outer else torch.mm
    return Bench(lambda: product(a, b), flops, moved)


FAMILIES = [CampaignFamily(
    "gemm", "matrix products [m, k] × [k, n], plain, with bias and batched",
    {"m": SizeRange(32), "n": SizeRange(32), "k": SizeRange(32), "batch": SizeRange(2, 1)},
    {"op": FamilyChoice(("mm", "addmm", "bmm")), "layout": FamilyChoice(("nt", "nn", "tn", "tt")),
     "dtype": FamilyChoice(("bf16", "fp32", "tf32", "fp16", "fp8"))},
    _prepare, _check)]
