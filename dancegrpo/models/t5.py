"""T5's encoder (Raffel et al., 2020; v1.1 with gated GELU) with transformers' T5EncoderModel options and names."""

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.models.transformers_config import TransformersConfig
from dancegrpo.ops import RMSNorm, ScaledDotProductAttention, get_activation
from dancegrpo.ops.activations import float32

# feed_forward_proj -> activation, and whether a second product gates it. "gated-gelu" means the tanh form there.
_FEED_FORWARD = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_new", True),
    "gated-relu": ("relu", True),
    "gated-silu": ("silu", True),
}


@dataclass(frozen=True)
class T5Config(TransformersConfig):
    """transformers' T5Config as far as the encoder reads it; defaults are T5 small's."""

    model_type = "t5"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    is_decoder: bool = False

    def __post_init__(self):
        if self.feed_forward_proj not in _FEED_FORWARD:
            raise ValueError(
                f"feed_forward_proj is {self.feed_forward_proj!r}; valid: {', '.join(_FEED_FORWARD)}"
            )
        if self.is_decoder:
            raise ValueError("is_decoder is true; valid: false, only the encoder is here")
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 4 or distance <= buckets // 4:
            raise ValueError(
                f"relative_attention_num_buckets is {buckets}; valid: multiples of 4 whose quarter is below "
                f"relative_attention_max_distance, which is {distance}"
            )


def relative_buckets(length: int, buckets: int, max_distance: int) -> np.ndarray:
    """Bucket (length, length) int32 of the distance from each query (row) to each key (column).

    Half of the buckets are for keys behind the query. In each half, half of them hold one distance each, the rest
    grow with its logarithm up to `max_distance`. The logarithm is float32's, as the reference's.
    """
    half, exact = buckets // 2, buckets // 4
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    size = np.abs(distance)
    logarithm = np.log(np.maximum(size, exact).astype(np.float32) / np.float32(exact))
    step = logarithm / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + step.astype(np.int64), half - 1)
    return ((distance > 0) * half + np.where(size < exact, size, far)).astype(np.int32)


@ops.constexpr
def _bucket_tensor(length: int, buckets: int, max_distance: int) -> Tensor:
    return Tensor(relative_buckets(length, buckets, max_distance))


class _Linear(Linear):
    """`Linear` without bias whose result is float32, with a float32 product in place of a float16 one.

    The feed-forward block of large T5s leaves float16's range (bfloat16's is wide enough).
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        dtype = ms.float32 if self.compute_dtype == ms.float16 else self.compute_dtype
        y = self.product(x.reshape((-1, self.in_features)).astype(dtype), self.weight.astype(dtype))
        return float32(y.reshape(x.shape[:-1] + (self.out_features,)))


class _SelfAttention(nn.Cell):
    """Without the factor 1 / sqrt(d): T5 folds it into the initial weights."""

    def __init__(self, config: T5Config, has_bias: bool):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.q, self.k = Linear(config.d_model, inner, bias=False), Linear(config.d_model, inner, bias=False)
        self.v, self.o = Linear(config.d_model, inner, bias=False), Linear(inner, config.d_model, bias=False)
        if has_bias:
            self.relative_attention_bias = Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.heads, self.head_dim = config.num_heads, config.d_kv
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.attention = ScaledDotProductAttention(self.heads, self.head_dim, scale=1.0)

    def position_bias(self, length: int) -> Tensor:
        """(1, H, length, length), the same in every block."""
        rows = self.relative_attention_bias(_bucket_tensor(length, self.buckets, self.max_distance))
        return ops.transpose(rows, (2, 0, 1)).reshape((1, self.heads, length, length))

    def _split(self, x: Tensor) -> Tensor:
        return ops.transpose(x.reshape((x.shape[0], x.shape[1], self.heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.attention(self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x)), bias)
        width = self.heads * self.head_dim
        return self.o(ops.transpose(y, (0, 2, 1, 3)).reshape((x.shape[0], x.shape[1], width)))


class _FeedForward(nn.Cell):
    def __init__(self, config: T5Config):
        super().__init__()
        act, self.gated = _FEED_FORWARD[config.feed_forward_proj]
        if self.gated:
            self.wi_0, self.wi_1 = (Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        else:
            self.wi = Linear(config.d_model, config.d_ff, bias=False)
        self.wo = _Linear(config.d_ff, config.d_model)
        self.act = get_activation(act)

    def construct(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.wo(self.act(float32(self.wi_0(x))) * float32(self.wi_1(x)))
        return self.wo(self.act(float32(self.wi(x))))


class _AttentionLayer(nn.Cell):
    def __init__(self, config: T5Config, has_bias: bool):
        super().__init__()
        self.SelfAttention = _SelfAttention(config, has_bias)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + float32(self.SelfAttention(self.layer_norm(x), bias))


class _FeedForwardLayer(nn.Cell):
    def __init__(self, config: T5Config):
        super().__init__()
        self.DenseReluDense = _FeedForward(config)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class _Block(nn.Cell):
    def __init__(self, config: T5Config, has_bias: bool):
        super().__init__()
        self.layer = nn.CellList([_AttentionLayer(config, has_bias), _FeedForwardLayer(config)])

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer[1](self.layer[0](x, bias))


class _Stack(nn.Cell):
    """Blocks on a float32 residual stream; block 0 owns the position bias of all of them."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.block = nn.CellList([_Block(config, i == 0) for i in range(config.num_layers)])
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def construct(self, x: Tensor, mask: Tensor | None = None):
        bias = self.block[0].layer[0].SelfAttention.position_bias(x.shape[1])
        if mask is not None:
            bias = bias + (1.0 - float32(mask)).reshape((x.shape[0], 1, 1, x.shape[1])) * -1e9
        states = ()
        for block in self.block:
            states = states + (x,)
            x = block(x, bias)
        return states + (self.final_layer_norm(x),)


class T5EncoderModel(nn.Cell):
    """`last_hidden_state` (B, L, D) float32 from input_ids (B, L) int and, optionally, attention_mask (B, L), 1 for
    tokens and 0 for padding.
    """

    config_class = T5Config
    class_name = "T5EncoderModel"
    library = "transformers"
    # Tied to shared.weight; T5ForConditionalGeneration's second half.
    ignored_weights = ("encoder.embed_tokens.weight", "decoder.*", "lm_head.weight")

    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        self.shared = Embedding(config.vocab_size, config.d_model)
        self.encoder = _Stack(config)
        self.output_names = ("last_hidden_state",)
        self.with_states = False

    def return_hidden_states(self) -> None:
        """Also return `hidden_0` (embeddings) ... `hidden_n`, the last after the final norm."""
        self.with_states = True
        names = tuple(f"hidden_{i}" for i in range(self.config.num_layers + 1))
        self.output_names = ("last_hidden_state",) + names

    def construct(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        states = self.encoder(self.shared(input_ids), attention_mask)
        if self.with_states:
            return (states[-1],) + states
        return (states[-1],)
