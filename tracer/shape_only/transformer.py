"""``TransformerShape``: a decoder as numbers, and ``TransformerPart``: what one rank computes of it for a micro-batch.

A cluster's step is made of few different pieces: a block, the embedding, the head with its loss, and the optimizer.
Each piece is traced once by shapes (``transformer_parts``). Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from tracer.shape_only.errors import ShapeOnlyError

SCAN = "scan"
"""Name of the module whose operations represent a recurrence's kernels, and the flag of their calls."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", 2024, section 7): a gate, a short convolution, and a
    recurrence computed chunk by chunk with matrix products.

    Attributes:
        heads, head_size: Number and size of the heads; their product is the inner width.
        state: Values that the recurrence keeps for each feature of a head.
        groups: Groups of heads that share the recurrence's inputs and outputs (B and C), as queries share keys.
        window: Tokens that the convolution sees.
        chunk: Tokens of a chunk.
        bias: The two linear layers have biases.
        convolution_bias: The convolution has a bias.
        norm: The gated values are normalised before the last product.
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
        """Return the number of features of all heads together."""
        return self.heads * self.head_size

    @property
    def mixed(self) -> int:
        """Return the number of features that the convolution sees: all heads' inputs, and each group's B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Outputs of the first product: the gate, what the convolution sees, and each head's time step."""
        return self.inner + self.mixed + self.heads

    def share(self, tp: int, cp: int = 1) -> StateSpace:
        """Return the mixer on one of ``tp`` ranks, for all tokens; with ``cp``, as it is while the recurrence runs. The
        context-parallel ranks then share heads in place of tokens, and groups if there are enough."""
        groups = self.groups // tp
        return StateSpace(self.heads // tp // cp, self.head_size, self.state, max(groups // cp, 1), self.window,
                          self.chunk, self.bias, self.convolution_bias, self.norm)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Return the number of parameters of one rank's share of a mixer for a stream of this width."""
        own = self.share(tp)
        count = hidden * (own.projected + own.inner) + own.mixed * (self.window + self.convolution_bias)
        count += 3 * own.heads + (own.inner if self.norm else 0)  # time step's bias, decay and the skipped input
        return count + (own.projected + hidden if self.bias else 0)


LINEARS = ("fp8", "fp8_block", "mxfp8", "nvfp4")
"""Types of linear layers' products: fp8 with a scale for each tensor, each block of 128 values, or each 32 values (MX),
and fp4 with a scale for each 16."""


class Piece(str, Enum):
    """A part of a decoder that is traced by itself."""

    BLOCK = "block"
    EMBEDDING = "embedding"
    HEAD = "head"
    """The last norm, logits and the loss."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values from narrow projections.

    Attributes:
        query_rank: Width that queries are compressed to; 0 where they are not compressed.
        key_rank: Width that keys and values are compressed to together.
        plain, rotated: Features of a head's queries and keys without and with rotary positions.
        values: Features of a head's values.
    """

    query_rank: int
    key_rank: int
    plain: int
    rotated: int
    values: int


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """A decoder-only transformer: of equal blocks, or with ``stack`` of blocks of several kinds.

    Attributes:
        layers: Blocks in all.
        hidden: Width of the residual stream.
        heads, kv_heads: Query heads, and heads of keys and values.
        ffn: Inner width of the feed-forward part, of each expert where there are some; 0: blocks have none.
        vocab, seq: Size of the vocabulary, and tokens of a sequence.
        head_size: Features of one head; 0 means ``hidden / heads``.
        gated: The feed-forward part has a gate (SwiGLU).
        rms: RMSNorm in place of LayerNorm.
        bias: Linear layers have biases, all but router and logits.
        qkv_bias: The projections of queries, keys and values have biases; ``None``: as ``bias`` says.
        qk_norm: Queries and keys are normalised, head by head.
        norms: Norms of a block: 2 before attention and feed-forward part; 4 before and after them (Gemma 2); 1 where
            both run in parallel on one input (GPT-J's parallel block), and in a block of one part alone.
        window: Tokens that each token attends to, itself included; 0 for all before it.
        latent: Multi-head latent attention, in place of ``kv_heads`` and ``head_size``.
        attends: Blocks have attention.
        state: A state-space mixer: in place of attention, or in parallel to it on the same input if ``attends``.
        rotary: Rotary positions; else learned ones.
        positions: Rows of the table of learned positions. ``None``: one for each token of a sequence where positions
            are not rotary. 0: none (ALiBi).
        tied: The logits use the embedding's matrix. In a pipeline the last stage has a copy of it.
        flash: Fused attention; else separate products, softmax and dropout.
        flash_version: Version of FlashAttention (1, 2 or 3). The first two were written for Ampere; PyTorch's own
            kernels are version 2. 0: the fastest for the device (cuDNN's, or the latest FlashAttention).
        dropout: Dropout probability of attention and residuals; 0 for none.
        fused: Rotary positions, and a gate with its activation, are one kernel each way, as in Megatron-Core,
            Transformer Engine and compilers; else the operations that eager PyTorch runs.
        fused_loss: Softmax and loss are one kernel each way; else steps, as in Megatron-LM's vocabulary-parallel loss.
        experts, top_k: Experts of each block, and how many of them a token uses; 0 for a dense block.
        shared_ffn: Inner width of all experts that every token uses, together; 0 for none.
        imbalance: Tokens of the most loaded rank's experts over the mean; 1.0: all ranks have equally many.
        merges: The block takes the next token's embedding in addition to the stream (multi-token prediction modules).
        predictions: Multi-token prediction modules after the last block (DeepSeek-V3, 2024, section 2.2). Each is a
            block, a projection and the head once more; they lie on the last stage and are not among ``layers``.
        dtype: "fp16", "bf16" or "fp32": of parameters, activations and gradients.
        linears: Narrower type that the products of blocks' linear layers are computed in (``LINEARS``). Their inputs,
            weights and gradients are cast; routers, attention and logits stay as they are.
        kept: Parts of blocks whose weights stay in the decoder's own type when it is served in a narrower one.
        stack: Runs of equal blocks from the input to the output, where not all blocks are equal, such as a dense one
            and 59 with experts. Each run is a decoder of its own whose ``layers`` are the run's. The decoder's own
            figures of a block then only describe a typical block.

    Raises:
        ShapeOnlyError: Runs contain runs, have another width, or do not add up to the decoder's number of blocks.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    head_size: int = 0
    gated: bool = False
    rms: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    norms: int = 2
    window: int = 0
    latent: Latent | None = None
    attends: bool = True
    state: StateSpace | None = None
    rotary: bool = False
    positions: int | None = None
    tied: bool = False
    flash: bool = True
    flash_version: int = 0
    dropout: float = 0.0
    fused: bool = True
    fused_loss: bool = True
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    imbalance: float = 1.0
    merges: bool = False
    predictions: int = 0
    dtype: str = "bf16"
    linears: str = ""
    kept: tuple[str, ...] = ()
    stack: tuple[TransformerShape, ...] = ()

    def __post_init__(self) -> None:
        if not self.stack:
            return
        if any(run.stack or run.hidden != self.hidden for run in self.stack):
            raise ShapeOnlyError("Runs of a decoder's blocks are of the decoder's width and have no runs themselves; "
                                 "give each as a shape of its own.")
        if (have := sum(run.layers for run in self.stack)) != self.layers:
            raise ShapeOnlyError(f"The runs of a decoder have {have} blocks together and the decoder {self.layers}; "
                                 "give both the same number.")

    @property
    def runs(self) -> tuple[TransformerShape, ...]:
        """Runs of equal blocks from the input to the output; a decoder of equal blocks has a single run."""
        return self.stack or (self,)

    @property
    def kinds(self) -> tuple[TransformerShape, ...]:
        """Return the different blocks, each as a decoder of one block, in order of first appearance; a prediction
        module's is the last."""
        return _kinds(self)

    @property
    def prediction(self) -> TransformerShape:
        """Return the block of a multi-token prediction module, which is like the last one."""
        return replace(self.runs[-1].one_layer(), merges=True)

    def one_layer(self) -> TransformerShape:
        """Return the decoder with one block, which its own figures describe."""
        return replace(self, layers=1, stack=(), predictions=0)

    def cut(self, layers: int) -> TransformerShape:
        """Return the decoder's first ``layers`` blocks, with its embedding and head."""
        left, runs = layers, []
        for run in self.stack:
            if left > 0:
                runs.append(replace(run, layers=min(left, run.layers)))
                left -= run.layers
        return replace(self, layers=layers, stack=tuple(runs))

    def in_linears(self, linears: str) -> TransformerShape:
        """Return the decoder with its linear layers' products in another type (``LINEARS``, "" for its own)."""
        return replace(self, linears=linears, stack=tuple(replace(run, linears=linears) for run in self.stack))

    @property
    def width_of_head(self) -> int:
        """Return the number of features of one head's queries and keys."""
        if self.latent is not None:
            return self.latent.plain + self.latent.rotated
        return self.head_size or self.hidden // self.heads

    @property
    def width_of_values(self) -> int:
        """Return the number of features of one head's values."""
        return self.width_of_head if self.latent is None else self.latent.values

    @property
    def kv_width(self) -> int:
        """Features of a token's keys and values, all heads together, as attention takes them; 0 without attention."""
        if not self.attends:
            return 0
        heads = self.kv_heads if self.latent is None else self.heads
        return heads * (self.width_of_head + self.width_of_values)

    def shared_heads(self, tp: int, cp: int) -> list[tuple[str, int, str, int]]:
        """Return the parts of a block's attention and mixer that ranks share. Each entry: name, number, the ranks'
        dimension, and the number of ranks, which must divide the number."""
        found = [("heads", self.heads, "tp", tp),
                 ("heads of keys and values", self.kv_heads, "tp", tp)] if self.attends else []
        if self.state is not None:
            found += [("heads of a state-space mixer", self.state.heads, "tp" if cp == 1 else "tp cp", tp * cp),
                      ("groups of a state-space mixer", self.state.groups, "tp", tp)]
        return found

    @property
    def biased_qkv(self) -> bool:
        """Return whether the projections of queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def learned_positions(self) -> int:
        """Return the rows of the table of learned positions; 0 for none."""
        return (0 if self.rotary else self.seq) if self.positions is None else self.positions

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one element of the activations."""
        return 4 if self.dtype == "fp32" else 2

    def block_parameters(self, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
        """Return one rank's number of parameters of a block; ``etp`` ranks (default ``tp``) share each expert."""
        return self.dense_parameters(tp) + self.expert_parameters(ep, tp if etp is None else etp)

    def dense_parameters(self, tp: int = 1) -> int:
        """Return one rank's number of parameters of a block outside of routed experts: attention or its replacement,
        norms, and the feed-forward part or the router and the shared experts."""
        norm = self.hidden * (1 if self.rms else 2)
        count = self.attention_parameters(tp) + self.state_parameters(tp) + norm * self.norms
        if self.merges:  # norms of the stream, of the embedding and before the head
            count += 2 * self.hidden * self.hidden + 3 * norm
        if self.experts:
            count += self.hidden * self.experts
            return count + (self._feed_forward(self.shared_ffn, tp) if self.shared_ffn else 0)
        return count + self._feed_forward(self.ffn, tp)

    def state_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one block's state-space mixer on one rank; 0 without one."""
        return 0 if self.state is None else self.state.parameters(self.hidden, tp)

    def attention_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one block's attention on one rank; 0 without it."""
        if not self.attends:
            return 0
        d, heads = self.width_of_head, self.heads // tp
        count = heads * self.width_of_values * self.hidden + (self.hidden if self.bias else 0)
        if self.latent is not None:
            q, kv = self.latent.query_rank, self.latent.key_rank
            count += (self.hidden + heads * d + 1) * q if q else self.hidden * heads * d
            return count + self.hidden * (kv + self.latent.rotated) + kv + kv * heads * (
                self.latent.plain + self.latent.values)
        inner = (self.heads + 2 * self.kv_heads) * d // tp
        count += self.hidden * inner + (inner if self.biased_qkv else 0)
        return count + (2 * d if self.qk_norm else 0)

    def expert_parameters(self, ep: int = 1, tp: int = 1) -> int:
        """Return the number of parameters of one block's routed experts on one rank; 0 without experts."""
        return self._feed_forward(self.ffn, tp) * (self.experts // ep) if self.experts else 0

    def feed_forward_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one block's feed-forward part, or of its shared experts, on one rank."""
        return self._feed_forward(self.shared_ffn if self.experts else self.ffn, tp)

    def _feed_forward(self, inner: int, tp: int) -> int:
        if not inner:
            return 0
        count = self.hidden * inner // tp * (3 if self.gated else 2)
        return count + (inner // tp * (2 if self.gated else 1) + self.hidden if self.bias else 0)

    def embedding_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of one rank's embedding, including positions."""
        return self.vocabulary_parameters(tp) + self.learned_positions * self.hidden

    def vocabulary_parameters(self, tp: int = 1) -> int:
        """Return one rank's number of parameters of the embedding's matrix; the logits' matrix is equally large."""
        return -(-self.vocab // tp) * self.hidden

    def head_parameters(self, tp: int = 1) -> int:
        """Return the parameters of one rank's head: the last norm and the logits' matrix. A tied head has a copy of the
        matrix if the embedding is on another stage."""
        return self.vocabulary_parameters(tp) + self.hidden * (1 if self.rms else 2)

    def root_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters of a rank with embedding and head; a tied matrix counts once."""
        shared = self.vocabulary_parameters(tp) if self.tied else 0
        return self.embedding_parameters(tp) + self.head_parameters(tp) - shared

    @property
    def parameters(self) -> int:
        """Return the number of all parameters except those of prediction modules; a tied matrix counts once."""
        return sum(run.layers * run.block_parameters() for run in self.runs) + self.root_parameters()

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that work on one token, with ``top_k`` of the routed experts."""
        idle = sum(run.layers * run.expert_parameters() * (run.experts - run.top_k) // run.experts
                   for run in self.runs if run.experts)
        return self.parameters - idle


def expected_places(top_k: int, experts: int, places: int) -> float:
    """Return the expected number of equal places (ranks, nodes) with experts of one token, drawn at random.

    ``places · (1 − C(E − E/places, k) / C(E, k))``: a place is missed if all ``k`` experts are among the others.
    """
    missed = 1.0
    for drawn in range(top_k):
        missed *= max(experts - experts / places - drawn, 0.0) / (experts - drawn)
    return places * (1.0 - missed)


@lru_cache(maxsize=256)
def _kinds(shape: TransformerShape) -> tuple[TransformerShape, ...]:
    last = (shape.prediction,) if shape.predictions else ()
    return tuple(dict.fromkeys((*(run.one_layer() for run in shape.runs), *last)))


@dataclass(frozen=True, slots=True)
class TransformerPart:
    """One rank's share of a piece, a part of a decoder that is traced by itself.

    Attributes:
        piece: The piece.
        microbatch: Sequences of a micro-batch.
        tp: Ranks that share each layer.
        cp: Ranks that share each sequence.
        ep: Ranks that share the experts.
        sequence_parallel: Norms, dropout and residuals work on 1/``tp`` of the tokens.
        etp: Ranks that share each expert: 1, or ``tp`` (``None``).
        once: A token comes to a rank only once, even if several of its experts are there (``Dispatcher.once``).
    """

    piece: Piece
    microbatch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    etp: int | None = None
    once: bool = field(default=False, repr=False)  # pieces without it keep the names that they are shipped under

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    def sent_rows(self, shape: TransformerShape) -> float:
        """Return the rows that the experts of the most loaded rank receive if a token is sent once for each of its
        experts. Shards of an expert gather each other's tokens."""
        own, share = (self.tp, self.expert_tp) if self.sequence_parallel else (1, 1)
        return shape.seq // self.cp // own * self.microbatch * shape.top_k * share * shape.imbalance

    def rows_of_expert(self, shape: TransformerShape) -> int:
        """Return the number of rows that each expert of the most loaded rank receives."""
        return max(round(self.sent_rows(shape) / (shape.experts // self.ep)), 1)

    def check(self, shape: TransformerShape) -> None:
        """Raise ``ShapeOnlyError`` unless the shape's sizes are divisible as the part needs."""
        tokens = shape.seq * self.microbatch // self.cp
        for what, value, by in (*((what, value, by) for what, value, _, by in shape.shared_heads(self.tp, self.cp)),
                                ("ffn", shape.ffn, self.expert_tp if shape.experts else self.tp),
                                ("shared_ffn", shape.shared_ffn, self.tp),
                                ("seq", shape.seq, self.cp * 2 if self.cp > 1 else 1),
                                ("seq", shape.seq // self.cp, self.tp if self.sequence_parallel else 1),
                                ("experts", shape.experts, self.ep)):
            if value % by:
                raise ShapeOnlyError(f"{what}={value} cannot be split evenly by {by}; choose sizes that divide.")
        if shape.experts and tokens * shape.top_k * self.ep < shape.experts:
            raise ShapeOnlyError(f"{tokens} tokens of {shape.top_k} experts each are fewer than the {shape.experts} "
                                 "experts; choose a larger micro-batch.")
