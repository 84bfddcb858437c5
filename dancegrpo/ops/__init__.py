"""Operator adaptation layer: one name per operator, one implementation per device, chosen at construction.

Nothing above this package asks which device it runs on. On CPU the operators are compositions that were
measured to be faster than (or needed in place of) MindSpore's kernels there; on Ascend they are the fused
kernels of CANN. See docs/how-it-works.md for what has been run where.
"""

from dancegrpo.ops.activations import GELU, QuickGELU, SiLU, get_activation
from dancegrpo.ops.attention import ScaledDotProductAttention
from dancegrpo.ops.norms import LayerNorm, RMSNorm
from dancegrpo.ops.rotary import ApplyRotary, RotaryFrequencies

__all__ = [
    "ApplyRotary",
    "GELU",
    "LayerNorm",
    "QuickGELU",
    "RMSNorm",
    "RotaryFrequencies",
    "ScaledDotProductAttention",
    "SiLU",
    "get_activation",
]
