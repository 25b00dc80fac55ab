"""``price-layer``: its bounds are those of the data sheets, and its times those that ``serve`` adds up."""

from __future__ import annotations

import json

import pytest

import foretrace
from foretrace.commands import main
from planner.serving.layer_prices import LayerOperation, price_layer
from planner.serving.setup import ServingError

SHEETS = {"a100-sxm-80g": (312e12, 2039e9), "h100-sxm": (989.4e12, 3350e9), "b200": (2250e12, 8000e9)}
"""bf16 operations a second and bytes a second, as NVIDIA's data sheets have them."""


def products(found: list[LayerOperation]) -> dict[str, LayerOperation]:
    return {each.sizes: each for each in found if each.product}


@pytest.mark.parametrize("device", SHEETS)
def test_a_products_bound_is_the_data_sheets(device: str) -> None:
    peak, bandwidth = SHEETS[device]
    found = price_layer("llama-3.1-8b", devices=[device], batches=[1, 64, 256, 512], prompt=512)
    seen = set()
    for each in found.operations:
        if not each.product or "heads" in each.sizes:
            continue
        sizes = dict(word.split("=") for word in each.sizes.replace(",", "").split())
        m, n, k = (int(sizes.get(name, 1)) for name in "mnk")
        compute, memory = 2 * m * n * k / peak, 2 * (m * k + k * n + m * n) / bandwidth
        if max(compute, memory) > 1.2 * min(compute, memory):
            assert each.bound == ("compute" if compute > memory else "memory")
            seen.add(each.bound)
        assert each.low < each.us < each.high
    assert seen == {"compute", "memory"}


def test_layers_are_what_serve_adds_up() -> None:
    served = foretrace.serve("llama-3.1-8b", device="h100-sxm", batch=8, context=2048)
    found = price_layer("llama-3.1-8b", devices=["h100-sxm"], phases=["decode"], batches=[8], context=2048)
    layers = 32 * sum(each.us for each in found.operations)
    ends = sum(each.us for each in served.decode_operations if each.name in ("logits", "sampling", "embedding"))
    norm = next(each.us for each in found.operations if each.name == "norms") / 2
    assert layers + ends + norm == pytest.approx(sum(each.us for each in served.decode_operations), rel=1e-3)
    assert sum(each.share for each in found.operations) == pytest.approx(1)


def test_the_kind_that_there_is_most_of_is_priced_and_a_split_layer_communicates() -> None:
    found = price_layer("deepseek-v3", devices=["h200-sxm"], phases=["decode"], tp=8)
    assert (found.alike, found.layers) == (58, 61) and "58 of 61" in found.headline()
    names = [each.name for each in found.operations]
    assert "experts" in names and "all-reduce" in names and len(found.to_pandas()) == len(names)


def test_sizes_are_of_values_not_of_packed_pairs() -> None:
    pair = [products(list(price_layer("llama-3.1-8b", devices=["b200"], phases=["decode"], batches=[64],
                                      precision=precision).operations)) for precision in ("bf16", "nvfp4")]
    assert pair[0].keys() == pair[1].keys()


def test_the_command_prints_each_phase_and_takes_no_nonsense(capsys: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["foretrace", "price-layer", "llama-3.1-8b", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    assert run("--device", "a100-sxm-80g,h100-sxm", "--batch", "1,8", "--precision", "fp8") == 0
    out = capsys.readouterr().out
    assert "Decoding 8 × 1,152" in out and "Prompts 1 × 1,024" in out and "casts" in out
    assert run("--phase", "decode", "--json") == 0
    assert json.loads(capsys.readouterr().out)["operations"][0]["phase"] == "decode"
    for words, said in ((("--phase", "x"), "no phase"), (("--batch", "1,x"), "--batch 1,x is not possible"),
                        (("--batch", "0"), "--batch 0 is not possible"), (("--device", "a100-sxm-80g,,"), "empty name"),
                        (("--tp", "3"), "divisor"), (("--prompt", "400000"), "longer than")):
        assert run(*words) == 2 and said in capsys.readouterr().err


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ServingError, match="context=-1"):
        price_layer("llama-3.1-8b", context=-1)
