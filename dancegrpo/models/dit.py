"""The class-conditional diffusion transformer, as diffusers' DiTTransformer2DModel.

Peebles and Xie, 2023, "Scalable diffusion models with transformers" (DiT, adaLN-Zero). As in diffusers every block
has timestep and class embedders of its own.
"""

import dataclasses
from dataclasses import dataclass

from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Embedding, Linear, TimestepEmbedding
from dancegrpo.models.options import OLDER_TRANSFORMER_OPTIONS, refuse_not_positive, refuse_unsupported
from dancegrpo.models.patches import PatchEmbed, unpatchify
from dancegrpo.models.transformer_layers import Attention, FeedForward
from dancegrpo.ops import GatedResidual, ModulatedLayerNorm, SiLU
from dancegrpo.ops.activations import float32

_OLDER_OPTIONS = {
    "cross_attention_dim": (None,),
    "attention_type": ("default",),
    **OLDER_TRANSFORMER_OPTIONS,
}


@dataclass(frozen=True)
class DiTConfig:
    """diffusers' `config.json` of a DiTTransformer2DModel, with diffusers' defaults.

    `norm_num_groups` and `upcast_attention` change nothing (there is no group norm, the softmax is always float32)
    and `dropout` is never applied.
    """

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: int = 4
    out_channels: int | None = None
    num_layers: int = 28
    dropout: float = 0.0
    norm_num_groups: int = 32
    attention_bias: bool = True
    sample_size: int = 32
    patch_size: int = 2
    activation_fn: str = "gelu-approximate"
    num_embeds_ada_norm: int = 1000
    upcast_attention: bool = False
    norm_type: str = "ada_norm_zero"
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-5
    cross_attention_dim: None = None
    num_vector_embeds: None = None
    use_linear_projection: bool = False
    only_cross_attention: bool = False
    double_self_attention: bool = False
    attention_type: str = "default"

    def __post_init__(self):
        refuse_unsupported(
            self,
            {
                "activation_fn": ("gelu-approximate",),
                "norm_type": ("ada_norm_zero",),
                "norm_elementwise_affine": (False,),
                **_OLDER_OPTIONS,
            },
        )
        refuse_not_positive(
            self,
            ("num_attention_heads", "attention_head_dim", "in_channels", "num_layers", "sample_size")
            + ("patch_size", "num_embeds_ada_norm"),
        )
        if self.inner_dim % 4:
            raise ValueError(
                f"num_attention_heads * attention_head_dim is {self.inner_dim}; the position table needs a "
                f"multiple of 4"
            )

    @property
    def inner_dim(self) -> int:
        return self.attention_head_dim * self.num_attention_heads

    def to_dict(self) -> dict:
        """What diffusers' class of today knows."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in _OLDER_OPTIONS}


class _ClassEmbedding(nn.Cell):
    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.embedding_table = Embedding(num_classes + 1, dim)  # the last row: no class, for guidance

    def construct(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)


class _TimeClassEmbedding(nn.Cell):
    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(dim, frequency_shift=1)
        self.class_embedder = _ClassEmbedding(num_classes, dim)

    def construct(self, timestep: Tensor, labels: Tensor) -> Tensor:
        return float32(self.timestep_embedder(timestep)) + self.class_embedder(labels)


class _AdaptiveNorm(nn.Cell):
    """Shift, scale and gate of attention and feed-forward, each (B, 1, dim), from timestep and class."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.emb = _TimeClassEmbedding(num_classes, dim)
        self.act = SiLU()
        self.linear = Linear(dim, 6 * dim)
        self.dim = dim

    def construct(self, timestep: Tensor, labels: Tensor):
        parts = float32(self.linear(self.act(self.emb(timestep, labels))))
        return ops.split(parts.reshape((-1, 1, 6 * self.dim)), self.dim, axis=-1)


class DiTBlock(nn.Cell):
    """Modulated self-attention and feed-forward."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        dim = config.inner_dim
        self.norm1 = _AdaptiveNorm(config.num_embeds_ada_norm, dim)
        self.normalize, self.normalize_ff = (
            ModulatedLayerNorm(dim, 1e-6),
            ModulatedLayerNorm(dim, config.norm_eps),
        )
        self.attn1 = Attention(
            dim, config.num_attention_heads, config.attention_head_dim, bias=config.attention_bias
        )
        self.ff, self.add = FeedForward(dim), GatedResidual()

    def construct(self, x: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.norm1(timestep, labels)
        y = self.normalize(x, scale_a, shift_a)
        x = self.add(x, gate_a, self.attn1(y, y), self.attn1.to_out[0].bias)
        return self.add(x, gate_m, self.ff(self.normalize_ff(x, scale_m, shift_m)), self.ff.net[2].bias)


class DiTTransformer2DModel(nn.Cell):
    """Noise, and where `out_channels` is twice `in_channels` its variance, of latents under class and time."""

    output_names = ("sample",)
    config_class = DiTConfig
    class_name = "DiTTransformer2DModel"

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.pos_embed = PatchEmbed(config.in_channels, dim, config.patch_size, config.sample_size)
        self.transformer_blocks = nn.CellList([DiTBlock(config) for _ in range(config.num_layers)])
        self.act = SiLU()
        self.normalize = ModulatedLayerNorm(dim, 1e-6)
        out_channels = config.in_channels if config.out_channels is None else config.out_channels
        self.proj_out_1 = Linear(dim, 2 * dim)
        self.proj_out_2 = Linear(dim, config.patch_size**2 * out_channels)

    def construct(self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor):
        """Predict the noise.

        Args:
            hidden_states: (B, in_channels, H, W) latents; H and W are multiples of patch_size.
            timestep: (B,) in [0, 1000].
            class_labels: (B,) integers from 0 to num_embeds_ada_norm; the last stands for no class.

        Returns:
            (sample,), sample (B, out_channels, H, W) in float32. With learned variance the first half of the
            channels is the noise, the second the variance, as the reference returns them.

        Raises:
            ValueError: H or W is no multiple of patch_size.
        """
        height, width = hidden_states.shape[2], hidden_states.shape[3]
        x = self.pos_embed(hidden_states)
        for block in self.transformer_blocks:
            x = block(x, timestep, class_labels)
        # The reference has no embedder of its own for the last norm: it takes the first block's.
        condition = self.act(self.transformer_blocks[0].norm1.emb(timestep, class_labels))
        parts = float32(self.proj_out_1(condition)).reshape((-1, 1, 2 * self.config.inner_dim))
        shift, scale = ops.split(parts, self.config.inner_dim, axis=-1)
        x = float32(self.proj_out_2(self.normalize(x, scale, shift)))
        return (unpatchify(x, height, width, self.config.patch_size),)
