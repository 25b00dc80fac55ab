"""``StateSpace``: a Mamba-2 mixer as numbers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

SCAN = "scan"
"""Name of the module whose operations stand for a recurrence's kernels, and the flag of their calls."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", 2024, section 7): a gate, a short convolution, and a
    recurrence computed chunk by chunk with matrix products.

    Attributes:
        heads, head_size: of the inner width, which is their product.
        state: values that the recurrence keeps for each feature of a head.
        groups: of heads that share the recurrence's inputs and outputs (B and C), as queries share keys.
        window: tokens that the convolution sees.
        chunk: tokens of a chunk.
        bias: the two linear layers have biases.
        convolution_bias: the convolution has one.
        norm: the gated values are normalised before the last product.
    """

    heads: int
    head_size: int
    state: int
    groups: int = 1
    window: int = 4
    chunk: int = 256
    bias: bool = False
    convolution_bias: bool = True
    norm: bool = True

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_size

    @property
    def mixed(self) -> int:
        """Features that the convolution sees: all heads' inputs, and each group's B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Outputs of the first product: the gate, what the convolution sees, and each head's time step."""
        return self.inner + self.mixed + self.heads

    def share(self, tp: int, cp: int = 1) -> StateSpace:
        """Return what one rank has: of ``tp``, of every sequence's tokens; of ``cp`` too while the recurrence runs,
        for which context-parallel ranks share heads in place of tokens, and groups as far as there are enough."""
        groups = self.groups // tp
        return StateSpace(self.heads // tp // cp, self.head_size, self.state, max(groups // cp, 1), self.window,
                          self.chunk, self.bias, self.convolution_bias, self.norm)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Parameters of one rank's share of a mixer for a stream of this width."""
        own = self.share(tp)
        count = hidden * (own.projected + own.inner) + own.mixed * (self.window + self.convolution_bias)
        count += 3 * own.heads + (own.inner if self.norm else 0)  # time step's bias, decay and the skipped input
        return count + (own.projected + hidden if self.bias else 0)
