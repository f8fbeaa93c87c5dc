"""What a model is: sizes and choices, all global, checked once at construction."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, Flag, auto

import torch

from parallel.group import TPGroup, single_device
from tpblock.rope import LongRopeScaling, RopeScaling


class Norm(Enum):
    """RMSNORM: x / rms(x) * weight (Zhang & Sennrich, 2019). LAYERNORM: with mean and bias (Ba et al., 2016)."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class Activation(Enum):
    """The feed-forward's nonlinearity; SWIGLU is gated (Shazeer, 2020), the others are plain two-matrix feed-forwards.

    GELU is the exact (erf) form, GELU_TANH the tanh approximation that GPT-2 uses (Hendrycks & Gimpel, 2016).
    """

    SWIGLU = "swiglu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"

    @property
    def gated(self) -> bool:
        return self is Activation.SWIGLU


class Placement(Enum):
    """Where the norms stand around attention A and feed-forward F.

    PRE: ``x += A(norm(x)); x += F(norm(x))`` (GPT-2, Llama; Xiong et al., 2020).
    PARALLEL: ``h = norm(x); x += A(h) + F(h)`` (GPT-J, PaLM).
    PARALLEL_TWO_NORMS: ``x += A(norm_1(x)) + F(norm_2(x))`` (GPT-NeoX).
    """

    PRE = "pre"
    PARALLEL = "parallel"
    PARALLEL_TWO_NORMS = "parallel_two_norms"


class Position(Enum):
    """ROPE: rotary (Su et al., 2021), in the half-split form of GPT-NeoX and Hugging Face. LEARNED: a table, as in GPT-2."""

    ROPE = "rope"
    LEARNED = "learned"


class Bias(Flag):
    """Which linears of a block have a bias: QKV the projections of queries, keys and values (alone in Qwen2), OUT the attention's
    output projection, FEEDFORWARD its two or three matrices. ALL: as in GPT-2."""

    NONE = 0
    QKV = auto()
    OUT = auto()
    FEEDFORWARD = auto()
    ALL = QKV | OUT | FEEDFORWARD


class QKNorm(Enum):
    """PER_HEAD: every query head and every key head is RMS-normalised over head_dim, after the projection and before rotary
    embeddings, with one weight [head_dim] for all query heads and one for all key heads (Henry et al., 2020; Qwen3)."""

    NONE = "none"
    PER_HEAD = "per_head"


def default_d_ff(dim: int, activation: Activation, multiple_of: int = 64) -> int:
    """The usual feed-forward width: 4*dim, or for a gated one floor(8*dim/3) rounded up to ``multiple_of``.

    Both give about the same parameters: two matrices of 4*dim against three of 8*dim/3. Llama 2 rounds to 256.
    """
    if not activation.gated:
        return 4 * dim
    return -(-(8 * dim // 3) // multiple_of) * multiple_of


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Sizes left as None follow from the others: ``kv_heads = heads`` (fewer is grouped-query attention, one is multi-query),
    ``head_dim = dim // heads``, ``d_ff`` from :func:`default_d_ff`.

    Attributes:
        rope_theta, rotary_fraction: base of the rotary angles, and the share of each head that is rotated (from its start).
        rope_scaling: how the rotary frequencies are stretched for sequences longer than those of the first training.
        max_seq_len: the longest sequence; the length of the table of learned positions.
        sliding_window: a token attends to itself and the ``sliding_window - 1`` before it (Mistral); None: to all before it.
        full_attention_layers: the layers in which the window does not apply, counted from 0.
        bias: which linears of the blocks have biases; True is short for ``Bias.ALL``, False for ``Bias.NONE``.
        qk_norm: how queries and keys are normalised, with ``norm_eps``.
        dropout, attention_dropout: probabilities, after each sublayer and on the attention weights.
        init_std: standard deviation of the initial weights; the two matrices a block that write the residual get
            ``init_std / sqrt(2 * layers)`` (GPT-2, Megatron-LM).
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    d_ff: int = None  # type: ignore[assignment]
    activation: Activation = Activation.SWIGLU
    norm: Norm = Norm.RMSNORM
    norm_eps: float = 1e-5
    placement: Placement = Placement.PRE
    position: Position = Position.ROPE
    rope_theta: float = 10_000.0
    rotary_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 2048
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    bias: Bias | bool = Bias.NONE
    qk_norm: QKNorm = QKNorm.NONE
    tied_embeddings: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if isinstance(self.bias, bool):
            object.__setattr__(self, "bias", Bias.ALL if self.bias else Bias.NONE)
        kinds: dict[str, type[Enum]] = {
            "activation": Activation,
            "norm": Norm,
            "placement": Placement,
            "position": Position,
            "bias": Bias,
            "qk_norm": QKNorm,
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "d_ff", "max_seq_len", "sliding_window"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "head_dim", "d_ff", "sliding_window"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("norm_eps", "rope_theta", "rotary_fraction", "dropout", "attention_dropout", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not isinstance(self.tied_embeddings, bool):
            raise ValueError(f"tied_embeddings must be True or False, got {self.tied_embeddings!r}")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}: give head_dim explicitly")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", default_d_ff(self.dim, self.activation))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("norm_eps", "rope_theta", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be above 0 and at most 1, got {self.rotary_fraction}")
        if self.position is Position.ROPE:
            if self.rotary_dim < 2 or self.rotary_dim % 2:
                raise ValueError(
                    f"rotary_fraction {self.rotary_fraction} of head_dim {self.head_dim} rotates {self.rotary_dim} "
                    "features: rotary embeddings need an even number of at least 2"
                )
            self._check_rope_scaling()
        elif (self.rope_theta, self.rotary_fraction, self.rope_scaling) != (10_000.0, 1.0, None):
            raise ValueError(
                f"rope_theta {self.rope_theta}, rotary_fraction {self.rotary_fraction} and rope_scaling {self.rope_scaling} "
                f"have no effect with {self.position}"
            )
        if self.full_attention_layers and self.sliding_window is None:
            raise ValueError(f"full_attention_layers {self.full_attention_layers} have no effect without a sliding_window")
        for layer in self.full_attention_layers:
            if not isinstance(layer, int) or not 0 <= layer < self.layers:
                raise ValueError(f"full_attention_layers has {layer!r}, the layers are 0 to {self.layers - 1}")
        if self.placement is Placement.PARALLEL and self.has_bias(Bias.QKV) != self.has_bias(Bias.FEEDFORWARD):
            raise ValueError(
                f"{self.placement} computes q, k, v and the feed-forward's up projection with one weight: "
                f"both have a bias or neither, got {self.bias}"
            )

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is not None and not isinstance(scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be one of {RopeScaling} or None, got {scaling!r}")
        if isinstance(scaling, LongRopeScaling):
            for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
                if len(factors) != self.rotary_dim // 2:
                    raise ValueError(
                        f"{name} of rope_scaling has {len(factors)} numbers, {self.rotary_dim} rotated features need "
                        f"{self.rotary_dim // 2}"
                    )

    @property
    def rotary_dim(self) -> int:
        """How many features of each head are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def has_bias(self, linears: Bias) -> bool:
        """Whether the linears of that kind have biases."""
        assert isinstance(self.bias, Bias)
        return linears in self.bias

    def window(self, layer: int) -> int | None:
        """To how many tokens, itself included, a token attends in that layer at most; None: to all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def block_parameters(self) -> int:
        """The number of parameters of one block."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        up = self.d_ff * (2 if self.activation.gated else 1)
        out = self.heads * self.head_dim
        count = self.dim * (qkv + up + out + self.d_ff)
        biases = {Bias.QKV: qkv, Bias.OUT: self.dim, Bias.FEEDFORWARD: up + self.dim}
        count += sum(rows for linears, rows in biases.items() if self.has_bias(linears))
        if self.qk_norm is QKNorm.PER_HEAD:
            count += 2 * self.head_dim
        norms = 1 if self.placement is Placement.PARALLEL else 2
        return count + norms * self._norm_parameters()

    def parameters(self) -> int:
        """The number of parameters of the whole model, tied embeddings once."""
        tables = self.vocab_size * (1 if self.tied_embeddings else 2)
        if self.position is Position.LEARNED:
            tables += self.max_seq_len
        return self.layers * self.block_parameters() + tables * self.dim + self._norm_parameters()

    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm is Norm.LAYERNORM else 1)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model's work is divided: the tensor-parallel group, whether the activations between the sharded regions are cut
    along their tokens (sequence parallelism), and the dtype in which partial sums are added over the ranks (None: their own)."""

    group: TPGroup = single_device()
    sequence_parallel: bool = False
    reduce_dtype: torch.dtype | None = None
