"""Dimensions of one size by coincidence, told apart by what the step does with them (``sizes/size_flow.py``).

Each program is traced by shapes at two sizes; the first scaled to the second has the second's shapes.
"""

from __future__ import annotations

from graph_predictor.sizes.layout_rules import Call, rule_of
from graph_predictor.sizes.layout_rules import Tensor as Recorded
from graph_predictor.sizes.layouts import NamedSizes
from tracer.views import Argument


def test_a_dimension_of_one_that_is_put_in_follows_nothing() -> None:
    """``unsqueeze`` is written as strides, as the windows of a short-time Fourier transform are."""
    sizes = NamedSizes((120,), (180,), (False,))
    sound = Recorded((3, 40, 120), (sizes.constant, sizes.constant, sizes.following(0)))
    arguments = tuple(Argument("float", None, None, value) for value in ("", "[3, 40, 1, 120]", "[4800, 120, 120, 1]"))
    assert rule_of("aten::as_strided")(Call(sizes, (sound,), arguments, sizes.constants)).results == ()
