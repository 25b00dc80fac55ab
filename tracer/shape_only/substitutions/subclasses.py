"""Differences of a trace from a real run on any device, because fake tensors are a subclass of tensors.

This entry changes nothing; it is here so that the list is complete. The work is the same, element for element:

- autograd adds gradients, and computes a few formulas, out of place instead of in place: ``add`` for ``add_``,
  ``index_put`` for ``_index_put_impl_``; a gradient that is added to another takes a new buffer;
- ``view`` for ``_reshape_alias``;
- an ``empty`` of no elements (a result that is not asked for) is not there;
- gradients of ``index_select`` are added by ``index_add`` for ``scatter_add_`` into zeros;
- the fake kernels keep some statistics of norms in the input's type and some bag numbers of ``embedding_bag`` where
  the CPU keeps fp32 and none, and do not know the size of the CPU's workspace for recurrent layers.
"""

from __future__ import annotations

from tracer.shape_only.substitutions.substitution import Substitution

_SAME = frozenset({f"aten::{name}" for name in (
    "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward", "_embedding_bag",
    "_embedding_bag_backward", "view", "_to_copy", "clone", "_unsafe_view",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")})

SUBSTITUTION = Substitution(
    "subclasses", "Autograd works in place unless a tensor is of a subclass, as fake tensors are.",
    cpu=_SAME | {f"aten::{name}" for name in (
        "add_", "sub_", "mul_", "div_", "_index_put_impl_", "as_strided", "index_put_", "masked_fill_", "empty",
        "_reshape_alias", "scatter_add_", "index_add_", "zeros",
        "scatter_", "add")},
    gpu=_SAME | {f"aten::{name}" for name in (
        "add", "sub", "mul", "div", "index_put", "masked_fill", "scatter_add", "index_add",
        "scatter", "zeros",
        "new_zeros")},
    install=lambda site: None)
