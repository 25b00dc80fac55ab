"""Recurrent layers over whole sequences, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, FORWARD_BACKWARD, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_GATES = {"lstm": 4, "gru": 3}


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """Input [seq, batch, input]; hidden states start at zero."""
    torch, dtype, backward = lab.torch, settings["dtype"], settings["op"] == "backward"
    seq, batch, inputs, hidden, layers = (settings[name] for name in ("seq", "batch", "input", "hidden", "layers"))
    lab.tf32(dtype == "tf32")
    kind = torch.nn.LSTM if settings["cell"] == "lstm" else torch.nn.GRU
    module = kind(inputs, hidden, layers).to(device=lab.device, dtype=lab.dtype(dtype)).train(backward)
    x = lab.random(seq, batch, inputs, dtype=dtype, grad=backward)
    gates = _GATES[settings["cell"]]
    products = gates * hidden * sum((inputs if layer == 0 else hidden) + hidden for layer in range(layers))
    values = seq * batch * (inputs + hidden * (2 * layers - 1))
    flops, moved = 2.0 * seq * batch * products, BYTES[dtype] * float(products + values)
    if not backward:
        def forward() -> Any:
            with torch.no_grad():
                return module(x)[0]
        return Bench(forward, flops, moved)
    out = module(x)[0]
    gradient = lab.random_like(out)
    wanted = (x, *module.parameters())
    return Bench(lab.gradients(out, wanted, gradient), 2.0 * flops, 2.0 * moved)


FAMILIES = [
    CampaignFamily(
        "recurrent",
        "LSTM and GRU layers over whole sequences",
        {
            "seq": SizeRange(4),
            "batch": SizeRange(2),
            "input": SizeRange(8),
            "hidden": SizeRange(8),
            "layers": SizeRange(2, 1),
        },
        {
            "cell": FamilyChoice(("lstm", "gru")),
            "op": FamilyChoice(FORWARD_BACKWARD),
            "dtype": FamilyChoice(("fp32", "bf16", "fp16", "tf32")),
        },
        _prepare,
    )
]
