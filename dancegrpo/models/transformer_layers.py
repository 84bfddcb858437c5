"""Layers that the diffusion transformers share, with diffusers' parameter names.

Adaptive norms: Peebles and Xie, 2023 (DiT, adaLN-Zero). Joint attention: Esser et al., 2024 (MMDiT).
"""

from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Linear, TextProjection, TimestepEmbedding
from dancegrpo.ops import BiasGELU, ModulatedLayerNorm, RMSNorm, ScaledDotProductAttention
from dancegrpo.ops.activations import float32


class Modulation(nn.Cell):
    """`count` vectors of size `dim` from the conditioning vector after its SiLU, each (B, 1, dim) in float32.

    One product each on a slice of the weight would be slower; the product is one, the slices are of a (B, ...)
    vector, not of the tokens.
    """

    def __init__(self, dim: int, count: int):
        super().__init__()
        self.linear = Linear(dim, count * dim)
        self.dim, self.count = dim, count

    def construct(self, condition: Tensor):
        parts = float32(self.linear(condition)).reshape((-1, 1, self.count * self.dim))
        return ops.split(parts, self.dim, axis=-1)


class ContinuousNorm(nn.Cell):
    """Modulated norm without a gate; diffusers' AdaLayerNormContinuous gives scale before shift."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = Linear(dim, 2 * dim)
        self.normalize = ModulatedLayerNorm(dim, 1e-6)
        self.dim = dim

    def construct(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = float32(self.linear(condition)).reshape((-1, 1, 2 * self.dim))
        scale, shift = ops.split(parts, self.dim, axis=-1)
        return self.normalize(x, scale, shift)


class FeedForward(nn.Cell):
    """Linear, tanh GELU, linear without its bias; named as diffusers' FeedForward (`net.0.proj`, `net.2`)."""

    def __init__(self, dim: int, mult: int = 4):
        super().__init__()
        self.net = nn.CellList([_Projection(dim, mult * dim), nn.Identity(), Linear(mult * dim, dim)])

    def construct(self, x: Tensor) -> Tensor:
        return self.net[2].without_bias(self.net[0](x))


class _Projection(nn.Cell):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = Linear(dim, inner)
        self.act = BiasGELU()

    def construct(self, x: Tensor) -> Tensor:
        return self.act(self.proj.without_bias(x), self.proj.bias)


class CaptionProjection(nn.Cell):
    """Linear, tanh GELU, linear on every text token."""

    def __init__(self, in_features: int, dim: int):
        super().__init__()
        self.linear_1 = Linear(in_features, dim)
        self.act = BiasGELU()
        self.linear_2 = Linear(dim, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1.without_bias(x), self.linear_1.bias))


class TimeTextEmbedding(nn.Cell):
    """Sum of the embedded timestep, the projected pooled text and, with `guidance`, the embedded guidance scale."""

    def __init__(self, dim: int, pooled_dim: int, guidance: bool = False):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(dim)
        self.has_guidance = guidance
        if guidance:
            self.guidance_embedder = TimestepEmbedding(dim)
        self.text_embedder = TextProjection(pooled_dim, dim)

    def construct(self, timestep: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        y = self.timestep_embedder(timestep)
        if self.has_guidance:
            y = y + self.guidance_embedder(guidance)
        return float32(y + self.text_embedder(pooled))


class Attention(nn.Cell):
    """Attention of tokens (B, S, dim) over `context` (B, L, context_dim), without the bias of its last layer.

    Args:
        dim: channels of the tokens.
        num_heads, head_dim: their product is the width of query, key and value.
        context_dim: channels of the context; `dim` when None.
        bias: query, key and value have biases.
        qk_norm: RMS norm of query and key, per head.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        context_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
    ):
        super().__init__()
        inner, context_dim = num_heads * head_dim, context_dim or dim
        self.num_heads, self.head_dim, self.qk_norm = num_heads, head_dim, qk_norm
        self.to_q = Linear(dim, inner, bias)
        self.to_k, self.to_v = Linear(context_dim, inner, bias), Linear(context_dim, inner, bias)
        if qk_norm:
            self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.to_out = nn.CellList([Linear(inner, dim)])
        self.attention = ScaledDotProductAttention(num_heads, head_dim)

    def construct(self, x: Tensor, context: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` is added to the scaled scores (B, H, S, L); it broadcasts and is float32."""
        query, key, value = self._heads(self.to_q(x)), self._heads(self.to_k(context)), self.to_v(context)
        if self.qk_norm:
            query, key = self.norm_q(query), self.norm_k(key)
        y = self.attention(query, key, self._heads(value), bias)
        return self.to_out[0].without_bias(self._tokens(y))

    def _heads(self, x: Tensor) -> Tensor:  # (B, S, H * D) -> (B, H, S, D)
        return x.reshape((x.shape[0], x.shape[1], self.num_heads, self.head_dim)).transpose((0, 2, 1, 3))

    def _tokens(self, x: Tensor) -> Tensor:  # (B, H, S, D) -> (B, S, H * D)
        return x.transpose((0, 2, 1, 3)).reshape((x.shape[0], x.shape[2], self.num_heads * self.head_dim))


class JointAttention(Attention):
    """One softmax over image and text tokens that have projections of their own; biases as in `Attention`.

    Args:
        text_output: the text tokens are projected back; otherwise None is returned in their place.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, qk_norm: bool, text_output: bool):
        super().__init__(dim, num_heads, head_dim, qk_norm=qk_norm)
        inner = num_heads * head_dim
        self.add_q_proj, self.add_k_proj = Linear(dim, inner), Linear(dim, inner)
        self.add_v_proj = Linear(dim, inner)
        if qk_norm:
            self.norm_added_q, self.norm_added_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.text_output = text_output
        if text_output:
            self.to_add_out = Linear(inner, dim)

    def construct(self, x: Tensor, text: Tensor):
        """(B, S, dim) and (B, L, dim) to the same shapes, image first."""
        query, key = self._heads(self.to_q(x)), self._heads(self.to_k(x))
        text_query, text_key = self._heads(self.add_q_proj(text)), self._heads(self.add_k_proj(text))
        if self.qk_norm:
            query, key = self.norm_q(query), self.norm_k(key)
            text_query, text_key = self.norm_added_q(text_query), self.norm_added_k(text_key)
        value = ops.concat((self._heads(self.to_v(x)), self._heads(self.add_v_proj(text))), 2)
        y = self.attention(ops.concat((query, text_query), 2), ops.concat((key, text_key), 2), value)
        y, tokens = self._tokens(y), x.shape[1]
        image = self.to_out[0].without_bias(y[:, :tokens])
        if self.text_output:
            return image, self.to_add_out.without_bias(y[:, tokens:])
        return image, None
