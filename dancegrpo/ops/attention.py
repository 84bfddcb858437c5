"""Scaled dot-product attention."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.ops.activations import float32
from dancegrpo.ops.cpu.cells import JointRotaryAttentionFused, RotaryAttentionFused
from dancegrpo.ops.device import select, select_fused
from dancegrpo.ops.norms import RMSNormalize
from dancegrpo.ops.rotary import ApplyRotary


class _AttentionComposed(nn.Cell):
    """Two batched products around a float32 softmax."""

    def __init__(self, num_heads: int, head_dim: int, scale: float | None = None):
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale
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

    def __init__(self, num_heads: int, head_dim: int, scale: float | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.composed = _AttentionComposed(num_heads, head_dim, scale)

    def construct(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        if query.dtype == ms.float32 or bias is not None:
            return self.composed(query, key, value, bias)
        return ops.flash_attention_score(
            query, key, value, self.num_heads, scalar_value=self.scale, input_layout="BNSD"
        )


def ScaledDotProductAttention(
    num_heads: int, head_dim: int, device: str | None = None, scale: float | None = None
) -> nn.Cell:
    """Attention of `query` (B, H, S, D) over `key` and `value` (B, H, S', D); returns (B, H, S, D).

    `bias`, where given, is added to the scaled scores; it broadcasts to (B, H, S, S') and is float32. `scale` is
    1 / sqrt(D) unless given.
    """
    return select({"CPU": _AttentionComposed, "Ascend": _AttentionFlash}, device)(num_heads, head_dim, scale)


FUSED_TOKENS = 256
"""Longest sequence for the fused CPU kernel, which holds a head in cache; beyond it plain products are faster."""


class _Heads(nn.Cell):
    """(B, S, H*D) plus a bias (H*D,) to (B, H, S, D)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = ops.bias_add(x.reshape((-1, width)), bias.astype(x.dtype))
        return ops.transpose(y.reshape((batch, tokens, self.num_heads, self.head_dim)), (0, 2, 1, 3))


class _RotaryAttentionComposed(nn.Cell):
    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.heads = _Heads(num_heads, head_dim)
        self.normalize = RMSNormalize(head_dim, eps)
        self.rotary = ApplyRotary(head_dim)
        self.attention = ScaledDotProductAttention(num_heads, head_dim)

    def construct(self, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        query = self.rotary(self.normalize(self.heads(q, qb), qw), cos, sin)
        key = self.rotary(self.normalize(self.heads(k, kb), kw), cos, sin)
        y = self.attention(query, key, self.heads(v, vb))
        return ops.transpose(y, (0, 2, 1, 3)).reshape(q.shape)


class _RotaryAttentionOnCPU(nn.Cell):
    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.kernel = RotaryAttentionFused(eps)
        self.composed = _RotaryAttentionComposed(num_heads, head_dim, eps)

    def construct(self, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        if q.shape[1] > FUSED_TOKENS:
            return self.composed(q, k, v, qb, kb, vb, qw, kw, cos, sin)
        return self.kernel(float32(q), float32(k), float32(v), qb, kb, vb, qw, kw, cos, sin)


def RotaryAttention(num_heads: int, head_dim: int, eps: float = 1e-6, device: str | None = None) -> nn.Cell:
    """Self-attention as FLUX has it: biases, RMS norm of query and key per head, rotation, softmax, values.

    Called as (q, k, v, q_bias, k_bias, v_bias, q_weight, k_weight, cos, sin): q, k, v (B, S, H*D) without their
    biases (H*D,); the weights (D,) of the norms; cos, sin (S, D). Returns (B, S, H*D).
    """
    return select_fused(_RotaryAttentionOnCPU, _RotaryAttentionComposed, device)(num_heads, head_dim, eps)


class _JointRotaryAttentionComposed(nn.Cell):
    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.heads = _Heads(num_heads, head_dim)
        self.normalize = RMSNormalize(head_dim, eps)
        self.rotary = ApplyRotary(head_dim)
        self.attention = ScaledDotProductAttention(num_heads, head_dim)

    def construct(self, cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        heads, normalize = self.heads, self.normalize
        query = ops.concat((normalize(heads(cq, cqb), cqw), normalize(heads(q, qb), qw)), 2)
        key = ops.concat((normalize(heads(ck, ckb), ckw), normalize(heads(k, kb), kw)), 2)
        value = ops.concat((heads(cv, cvb), heads(v, vb)), 2)
        y = self.attention(self.rotary(query, cos, sin), self.rotary(key, cos, sin), value)
        tokens = cq.shape[1]
        y = ops.transpose(y, (0, 2, 1, 3)).reshape((q.shape[0], tokens + q.shape[1], q.shape[2]))
        return y[:, :tokens], y[:, tokens:]


class _JointRotaryAttentionOnCPU(nn.Cell):
    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.kernel = JointRotaryAttentionFused(eps)
        self.composed = _JointRotaryAttentionComposed(num_heads, head_dim, eps)

    def construct(self, cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin):
        if cq.shape[1] + q.shape[1] > FUSED_TOKENS:
            return self.composed(cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin)
        cq, ck, cv, q, k, v = (float32(cq), float32(ck), float32(cv), float32(q), float32(k), float32(v))
        return self.kernel(cq, ck, cv, cqb, ckb, cvb, cqw, ckw, q, k, v, qb, kb, vb, qw, kw, cos, sin)


def JointRotaryAttention(
    num_heads: int, head_dim: int, eps: float = 1e-6, device: str | None = None
) -> nn.Cell:
    """`RotaryAttention` over two streams of tokens with projections and norms of their own, in one softmax.

    Called with the first eight arguments of `RotaryAttention` for the text (B, L, H*D), the same eight for the
    image (B, S, H*D), and cos, sin (L + S, D). Returns text (B, L, H*D) and image (B, S, H*D).
    """
    fused = select_fused(_JointRotaryAttentionOnCPU, _JointRotaryAttentionComposed, device)
    return fused(num_heads, head_dim, eps)
