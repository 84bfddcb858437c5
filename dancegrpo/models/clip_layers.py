"""Layers of transformers' CLIP and SigLIP towers, and attention as torch.nn.MultiheadAttention names it."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.ops import LayerNorm, ScaledDotProductAttention, get_activation
from dancegrpo.ops.activations import float32


def normalize(x: Tensor) -> Tensor:
    """Rows of unit length, float32."""
    x = float32(x)
    return x * ops.rsqrt((x * x).sum(-1, keepdims=True))


def causal_bias(length: int) -> Tensor:
    """(length, length) to add to attention scores: position i does not see those after it."""
    return Tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))


def take_positions(x: Tensor, position: Tensor) -> Tensor:
    """Of `x` (B, L, D) the states at `position` (B,): (B, D)."""
    batch, _, dim = x.shape
    index = ops.broadcast_to(position.astype(ms.int32).reshape((batch, 1, 1)), (batch, 1, dim))
    return ops.gather_elements(x, 1, index).reshape((batch, dim))


class Attention(nn.Cell):
    """Self-attention of `x` (B, L, D); `bias`, where given, is added to the scores."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.k_proj, self.v_proj = Linear(dim, dim), Linear(dim, dim)
        self.q_proj, self.out_proj = Linear(dim, dim), Linear(dim, dim)
        self.heads, self.head_dim = heads, dim // heads
        self.attention = ScaledDotProductAttention(heads, self.head_dim)

    def _split(self, x: Tensor) -> Tensor:
        return ops.transpose(x.reshape((x.shape[0], x.shape[1], self.heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.attention(
            self._split(self.q_proj(x)), self._split(self.k_proj(x)), self._split(self.v_proj(x)), bias
        )
        return self.out_proj(ops.transpose(y, (0, 2, 1, 3)).reshape(x.shape))


class MLP(nn.Cell):
    """Linear, activation, linear."""

    def __init__(self, dim: int, inner: int, act: str):
        super().__init__()
        self.activation_fn = get_activation(act)
        self.fc1, self.fc2 = Linear(dim, inner), Linear(inner, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class EncoderLayer(nn.Cell):
    """Pre-norm transformer layer on a float32 residual stream (B, L, D)."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config.hidden_size, config.num_attention_heads)
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + float32(self.self_attn(self.layer_norm1(x), bias))
        return x + float32(self.mlp(self.layer_norm2(x)))


class Encoder(nn.Cell):
    """All layers; returns the states before, between and after them."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.CellList([EncoderLayer(config) for _ in range(config.num_hidden_layers)])

    def construct(self, x: Tensor, bias: Tensor | None = None):
        states = (x,)
        for layer in self.layers:
            x = layer(x, bias)
            states = states + (x,)
        return states


class TextEmbeddings(nn.Cell):
    """Embeddings of tokens and of their positions, added: (B, L) ids to (B, L, D)."""

    def __init__(self, config):
        super().__init__()
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.token_embedding(input_ids) + self.position_embedding.weight[: input_ids.shape[1]]


class PatchEmbedding(nn.Cell):
    """Convolution of patch size and stride as a product: `weight` keeps the convolution's shape (D, C, P, P).

    Pixels (B, C, S, S) to tokens (B, (S / P)^2, D), row by row.
    """

    def __init__(self, dim: int, channels: int, image_size: int, patch_size: int, bias: bool = False):
        super().__init__()
        shape = (dim, channels, patch_size, patch_size)
        self.weight = Parameter(initializer(Normal(0.02), shape, ms.float32), name="weight")
        self.has_bias = bias
        if bias:
            self.bias = Parameter(Tensor(np.zeros(dim, np.float32)), name="bias")
        self.patch, self.channels, self.dim = patch_size, channels, dim
        self.grid = image_size // patch_size
        self.compute_dtype = ms.float32
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, pixels: Tensor) -> Tensor:
        batch, p, grid, c = pixels.shape[0], self.patch, self.grid, self.channels
        # Two 4-D transposes: those of higher rank are pathologically slow on CPU.
        x = pixels.reshape((batch * c * grid, p, grid, p)).transpose((0, 2, 1, 3))  # (B*C*gy, gx, py, px)
        x = x.reshape((batch, c, grid * grid, p * p)).transpose((0, 2, 1, 3))  # (B, g*g, C, p*p)
        x = x.reshape((batch * grid * grid, c * p * p)).astype(self.compute_dtype)
        weight = self.weight.reshape((self.dim, c * p * p)).astype(self.compute_dtype)
        y = float32(self.product(x, weight))
        if self.has_bias:
            y = ops.bias_add(y, self.bias)
        return y.reshape((batch, grid * grid, self.dim))


class MultiheadAttention(nn.Cell):
    """Attention with torch.nn.MultiheadAttention's parameters: one `in_proj_weight` for query, key and value.

    `query` (B, L, D) attends to `memory` (B, L', D); `bias`, where given, is added to the scores.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.in_proj_weight = Parameter(
            initializer(Normal(dim**-0.5), (3 * dim, dim), ms.float32), name="in_proj_weight"
        )
        self.in_proj_bias = Parameter(Tensor(np.zeros(3 * dim, np.float32)), name="in_proj_bias")
        self.out_proj = Linear(dim, dim)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.attention = ScaledDotProductAttention(heads, self.head_dim)
        self.compute_dtype = ms.float32
        self.product = ops.MatMul(transpose_b=True)

    def _project(self, x: Tensor, which: int) -> Tensor:  # (B, L, D) -> (B, H, L, D / H)
        start = which * self.dim
        weight = self.in_proj_weight[start : start + self.dim].astype(self.compute_dtype)
        bias = self.in_proj_bias[start : start + self.dim].astype(self.compute_dtype)
        y = ops.bias_add(self.product(x.reshape((-1, self.dim)).astype(self.compute_dtype), weight), bias)
        return ops.transpose(y.reshape((x.shape[0], x.shape[1], self.heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, query: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.attention(self._project(query, 0), self._project(memory, 1), self._project(memory, 2), bias)
        return self.out_proj(ops.transpose(y, (0, 2, 1, 3)).reshape(query.shape))
