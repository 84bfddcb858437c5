"""Scaled dot-product attention."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.ops.activations import float32
from dancegrpo.ops.device import select


class _AttentionComposed(nn.Cell):
    """Two batched products around a float32 softmax."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.scale = head_dim**-0.5
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.values = ops.BatchMatMul()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        # The factor goes onto the query: (B, H, S, D) is smaller than (B, H, S, S') or equal to it.
        scores = float32(self.scores(query * self.scale, key))
        if bias is not None:
            scores = scores + bias
        return self.values(ops.softmax(scores, -1).astype(value.dtype), value)


class _AttentionFlash(nn.Cell):
    """CANN's flash attention (`mindspore.ops.flash_attention_score`, Atlas A2 training series).

    The kernel takes 16-bit inputs. Float32 inputs, and the short text towers that need a bias, take the
    composition: the documents of MindSpore and of CANN disagree on whether the kernel scales its bias.
    """

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.scale = head_dim**-0.5
        self.composed = _AttentionComposed(num_heads, head_dim)

    def construct(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        if query.dtype == ms.float32 or bias is not None:
            return self.composed(query, key, value, bias)
        return ops.flash_attention_score(
            query, key, value, self.num_heads, scalar_value=self.scale, input_layout="BNSD"
        )


def ScaledDotProductAttention(num_heads: int, head_dim: int, device: str | None = None) -> nn.Cell:
    """Attention of `query` (B, H, S, D) over `key` and `value` (B, H, S', D); returns (B, H, S, D).

    `bias`, where given, is added to the scaled scores; it broadcasts to (B, H, S, S') and is float32.
    """
    return select({"CPU": _AttentionComposed, "Ascend": _AttentionFlash}, device)(num_heads, head_dim)
