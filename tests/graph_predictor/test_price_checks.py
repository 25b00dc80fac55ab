"""``foretrace price`` refuses what PyTorch would refuse, instead of pricing sizes that no kernel could run with."""

from __future__ import annotations

import pytest

from step_views.cli.price import calls_to_price
from step_views.cli.price_arguments import PriceError

_ATTENTION = "aten::scaled_dot_product_attention"
REFUSED = [
    ("aten::add", "3x4,5x4", (), "sizes must be equal or 1"),
    ("aten::where", "8x8,8x8,8x7", (), "sizes must be equal or 1"),
    ("aten::mse_loss", "8x10,8x11", (), "sizes must be equal or 1"),
    ("aten::bmm", "8x128x64,9x64x128", (), "batches must be equal"),
    ("aten::baddbmm", "8x128x128,8x128x64,9x64x128", (), "batches must be equal"),
    ("aten::matmul", "8x128x64,9x64x128", (), "batches must be equal"),
    (_ATTENTION, "2x32x64x128,2x7x64x128,2x7x64x128", (), "multiple of those of keys"),
    (_ATTENTION, "2x32x64x128,2x32x64x64,2x32x64x128", (), "one head size"),
    (_ATTENTION, "2x32x64x128,3x32x64x128,3x32x64x128", (), "batches must be equal"),
    (_ATTENTION, "2x32x64x128,2x32x64x128,2x32x63x128", (), "as many keys as values"),
    ("aten::conv2d", "32x64x56x56,64x64x3x3", ("padding=-5",), "padding of aten::conv2d is 0 or more"),
    ("aten::conv2d", "32x64x56x56,64x64x3x3", ("stride=0",), "stride of aten::conv2d is 1 or more"),
    ("aten::conv2d", "32x64x56x56,64x1x3x3", ("groups=0",), "groups of aten::conv2d is 1 or more"),
    ("aten::conv2d", "32x64x56x56,63x32x3x3", ("groups=2",), "cannot be split into 2 groups"),
    ("aten::conv2d", "32x64x56x56,64x63x3x3", (), "takes 63 channels a group"),
    ("aten::layer_norm", "8192x4096", ("normalized_shape=4095",), "not the last sizes"),
    ("aten::layer_norm", "8192x4096,4096,4095", (), "bias 4095 .* does not fit"),
    ("aten::batch_norm", "32x64x56x56,63,64,64,64", (), "weight 63 .* does not fit its channels 64"),
    ("aten::group_norm", "32x64x56x56", ("num_groups=0",), "into 0 groups"),
    ("aten::topk", "32x1000", ("k=5000",), "cannot give 5000 of 1000"),
    ("aten::topk", "32x1000", ("k=-5",), "cannot give -5 of 1000"),
    ("aten::cross_entropy_loss", "8192x50257,8191", (), "one target for each row"),
    ("aten::max_pool2d", "32x64x112x112", (), "kernel_size"),
    ("aten::cat", "1024x1024,512x1023", (), "all sizes but those of dimension 0"),
]
TAKEN = [
    ("aten::add", "1024x1,1x1024", ()), ("aten::mul", "8x8,none", ("other=2",)),
    ("aten::matmul", "4x1x128x64,8x64x128", ()), ("aten::matmul", "64,64x128", ()),
    ("aten::linear", "8x128x64,32x64,32", ()), ("aten::addmm", "32,8x64,64x32", ()),
    (_ATTENTION, "2x32x64x128,2x8x64x128,2x8x64x128", ("is_causal=true",)),
    ("aten::conv2d", "32x64x56x56,64x1x3x3", ("groups=64", "padding=same")),
    ("aten::conv2d", "64x56x56,64x64x3x3", ("padding=1",)), ("aten::layer_norm", "8192x16x16,16x16,16x16", ()),
    ("aten::group_norm", "32x64x56x56,none,64,64", ("num_groups=32",)), ("aten::cross_entropy_loss", "8x10x5,8x5", ()),
    ("aten::topk", "32x1000", ("k=1000",)), ("aten::max_pool2d", "32x64x112x112", ("kernel_size=3",)),
]


@pytest.mark.parametrize(("name", "shapes", "values", "why"), REFUSED)
def test_sizes_that_pytorch_refuses_are_refused(name: str, shapes: str, values: tuple[str, ...], why: str) -> None:
    with pytest.raises(PriceError, match=why) as refused:
        calls_to_price(name, shapes, "fp32", values)
    assert "dropout_p" not in str(refused.value)


def test_sizes_that_pytorch_takes_are_priced() -> None:
    for name, shapes, values in TAKEN:
        assert calls_to_price(name, shapes, "fp32", values)[0], name
    with pytest.raises(PriceError, match="cannot multiply bf16 by fp32"):
        calls_to_price("aten::mm", "8x8,8x8", "bf16,fp32")
