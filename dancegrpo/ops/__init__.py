"""Operator adaptation layer: one name per operator, one implementation per device, chosen at construction.

Nothing above this package asks which device it runs on. On CPU the operators are compositions that were
measured to be faster than (or needed in place of) MindSpore's kernels there, and where the machine has a C++
compiler the costly ones are fused kernels of our own (`ops.cpu`); on Ascend they are the fused kernels of
CANN. See docs/how-it-works.md for what has been run where.
"""

from dancegrpo.ops.activations import GELU, BiasGELU, QuickGELU, SiLU, get_activation
from dancegrpo.ops.attention import JointRotaryAttention, RotaryAttention, ScaledDotProductAttention
from dancegrpo.ops.convolution import Convolution
from dancegrpo.ops.device import describe_operators
from dancegrpo.ops.modulation import GatedResidual, ModulatedLayerNorm
from dancegrpo.ops.norms import GroupNorm, LayerNorm, RMSNorm
from dancegrpo.ops.rotary import ApplyRotary, RotaryFrequencies

__all__ = [
    "ApplyRotary",
    "BiasGELU",
    "Convolution",
    "GELU",
    "GatedResidual",
    "GroupNorm",
    "JointRotaryAttention",
    "LayerNorm",
    "ModulatedLayerNorm",
    "QuickGELU",
    "RMSNorm",
    "RotaryAttention",
    "RotaryFrequencies",
    "ScaledDotProductAttention",
    "SiLU",
    "describe_operators",
    "get_activation",
]
