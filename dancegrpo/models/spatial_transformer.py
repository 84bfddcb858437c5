"""Transformer over the pixels of a U-Net with cross-attention to text (Rombach et al., 2022, latent diffusion).

Configuration and parameter names are those of diffusers' Transformer2DModel.
"""

from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Linear
from dancegrpo.models.resnet import PointwiseConv2d, from_tokens, to_tokens
from dancegrpo.ops import GELU, GroupNorm, LayerNorm, ScaledDotProductAttention
from dancegrpo.ops.activations import float32


class Attention(nn.Cell):
    """Multi-head attention of tokens (B, S, dim) over themselves or over a context (B, L, context_dim).

    Args:
        dim: width of the tokens, split evenly over the heads.
        num_heads: number of heads.
        context_dim: width of the context; None for self-attention.
        bias: of the query, key and value projections.
        upcast: scores in float32 whatever the products compute in.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context_dim: int | None = None,
        bias: bool = False,
        upcast: bool = False,
    ):
        super().__init__()
        context_dim = dim if context_dim is None else context_dim
        self.to_q = Linear(dim, dim, bias)
        self.to_k = Linear(context_dim, dim, bias)
        self.to_v = Linear(context_dim, dim, bias)
        self.to_out = nn.CellList([Linear(dim, dim)])
        self.num_heads, self.head_dim, self.upcast = num_heads, dim // num_heads, upcast
        self.attention = ScaledDotProductAttention(num_heads, self.head_dim)

    def _split(self, x: Tensor) -> Tensor:  # (B, S, H * D) -> (B, H, S, D)
        return ops.transpose(x.reshape((x.shape[0], x.shape[1], self.num_heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.attend(x, x if context is None else context)

    def attend(self, x: Tensor, context: Tensor) -> Tensor:
        """Without the default context, for subclasses."""
        query, key = self._split(self.to_q(x)), self._split(self.to_k(context))
        if self.upcast:
            query, key = float32(query), float32(key)
        y = self.attention(query, key, self._split(self.to_v(context)))
        return self.to_out[0](ops.transpose(y, (0, 2, 1, 3)).reshape(x.shape))


class _GatedGELU(nn.Cell):
    """Half of a projection times the GELU of its other half (Shazeer, 2020, GEGLU)."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = Linear(dim, 2 * inner)
        self.gelu = GELU("none")
        self.inner = inner

    def construct(self, x: Tensor) -> Tensor:
        value, gate = ops.split(self.proj(x), self.inner, axis=-1)
        return value * self.gelu(gate)


class _FeedForward(nn.Cell):
    def __init__(self, dim: int):
        super().__init__()
        self.net = nn.CellList([_GatedGELU(dim, 4 * dim), nn.Identity(), Linear(4 * dim, dim)])

    def construct(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


class BasicTransformerBlock(nn.Cell):
    """Self-attention, cross-attention and a feed-forward layer, each after a layer norm; float32 in and out."""

    def __init__(self, dim: int, num_heads: int, context_dim: int, upcast: bool):
        super().__init__()
        self.norm1 = LayerNorm(dim, 1e-5)
        self.attn1 = Attention(dim, num_heads, upcast=upcast)
        self.norm2 = LayerNorm(dim, 1e-5)
        self.attn2 = Attention(dim, num_heads, context_dim, upcast=upcast)
        self.norm3 = LayerNorm(dim, 1e-5)
        self.ff = _FeedForward(dim)

    def construct(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + float32(self.attn1(self.norm1(x)))
        x = x + float32(self.attn2(self.norm2(x), text))
        return x + float32(self.ff(self.norm3(x)))


class Transformer2DModel(nn.Cell):
    """Transformer blocks on the pixels of (B, C, H, W), added to their input; float32 in and out.

    Args:
        channels: C.
        num_heads: heads of each attention.
        num_layers: transformer blocks.
        context_dim: width of the text states (B, L, context_dim).
        num_groups: of the group norm before the blocks.
        linear_projection: projections around the blocks are linear layers, not 1x1 convolutions (names and
            numbers are the same, weights have another shape).
        upcast: see `Attention`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        num_layers: int,
        context_dim: int,
        num_groups: int,
        linear_projection: bool,
        upcast: bool,
    ):
        super().__init__()
        projection = Linear if linear_projection else PointwiseConv2d
        self.norm = GroupNorm(num_groups, channels, 1e-6)
        self.proj_in = projection(channels, channels)
        self.transformer_blocks = nn.CellList(
            [BasicTransformerBlock(channels, num_heads, context_dim, upcast) for _ in range(num_layers)]
        )
        self.proj_out = projection(channels, channels)

    def construct(self, x: Tensor, text: Tensor) -> Tensor:
        y = float32(self.proj_in(to_tokens(self.norm(x))))
        for block in self.transformer_blocks:
            y = block(y, text)
        return x + from_tokens(float32(self.proj_out(y)), x.shape[2], x.shape[3])
