"""The PixArt transformer, as diffusers' PixArtTransformer2DModel.

Chen et al., 2024, "PixArt-alpha" (one modulation for all blocks, adaLN-single; text by cross-attention; at 1024
pixels the image size and aspect ratio as conditions) and "PixArt-Sigma" (without these conditions).
"""

import dataclasses
from dataclasses import dataclass

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.layers import Linear, TimestepEmbedding
from dancegrpo.models.options import OLDER_TRANSFORMER_OPTIONS, refuse_not_positive, refuse_unsupported
from dancegrpo.models.patches import PatchEmbed, unpatchify
from dancegrpo.models.transformer_layers import Attention, CaptionProjection, FeedForward
from dancegrpo.ops import GatedResidual, ModulatedLayerNorm, SiLU
from dancegrpo.ops.activations import float32

_MASKED = -10000.0  # diffusers' score of a text token that is masked out


@dataclass(frozen=True)
class PixArtConfig:
    """diffusers' `config.json` of a PixArtTransformer2DModel, with diffusers' defaults.

    `norm_num_groups`, `num_embeds_ada_norm` and `upcast_attention` change nothing (there is no group norm and no
    embedding table, the softmax is always float32) and `dropout` is never applied.
    """

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: int = 4
    out_channels: int | None = 8
    num_layers: int = 28
    dropout: float = 0.0
    norm_num_groups: int = 32
    cross_attention_dim: int = 1152
    attention_bias: bool = True
    sample_size: int = 128
    patch_size: int = 2
    activation_fn: str = "gelu-approximate"
    num_embeds_ada_norm: int | None = 1000
    upcast_attention: bool = False
    norm_type: str = "ada_norm_single"
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None
    use_additional_conditions: bool | None = None
    caption_channels: int | None = None
    attention_type: str = "default"
    num_vector_embeds: None = None
    use_linear_projection: bool = False
    only_cross_attention: bool = False
    double_self_attention: bool = False

    def __post_init__(self):
        refuse_unsupported(
            self,
            {
                "activation_fn": ("gelu-approximate",),
                "norm_type": ("ada_norm_single",),
                "norm_elementwise_affine": (False,),
                "attention_type": ("default",),
                **OLDER_TRANSFORMER_OPTIONS,
            },
        )
        refuse_not_positive(
            self,
            ("num_attention_heads", "attention_head_dim", "in_channels", "num_layers", "sample_size")
            + ("patch_size", "cross_attention_dim"),
        )
        if self.inner_dim % 4:
            raise ValueError(
                f"num_attention_heads * attention_head_dim is {self.inner_dim}; the position table needs a "
                f"multiple of 4"
            )
        if self.caption_channels is not None and self.cross_attention_dim != self.inner_dim:
            raise ValueError(
                f"cross_attention_dim is {self.cross_attention_dim}, but with caption_channels the captions are "
                f"projected to num_attention_heads * attention_head_dim, {self.inner_dim}"
            )
        if self.has_size_conditions and self.inner_dim % 3:
            raise ValueError(
                f"num_attention_heads * attention_head_dim is {self.inner_dim}; with use_additional_conditions "
                f"it is split among height, width and aspect ratio: it must be a multiple of 3"
            )

    @property
    def inner_dim(self) -> int:
        return self.attention_head_dim * self.num_attention_heads

    @property
    def has_size_conditions(self) -> bool:
        """Whether `resolution` and `aspect_ratio` are inputs; unless it is given, at 1024 pixels only."""
        if self.use_additional_conditions is None:
            return self.sample_size == 128
        return self.use_additional_conditions

    @property
    def position_scale(self) -> float:
        """What positions are divided by."""
        if self.interpolation_scale is None:
            return max(self.sample_size // 64, 1)
        return self.interpolation_scale

    def to_dict(self) -> dict:
        """What diffusers' class of today knows."""
        options = dataclasses.asdict(self)
        return {key: value for key, value in options.items() if key not in OLDER_TRANSFORMER_OPTIONS}


class _TimeSizeEmbedding(nn.Cell):
    """Embedded timestep, plus the embeddings of height, width and aspect ratio beside each other."""

    def __init__(self, dim: int, sizes: bool):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(dim)
        self.sizes = sizes
        if sizes:
            self.resolution_embedder = TimestepEmbedding(dim // 3)
            self.aspect_ratio_embedder = TimestepEmbedding(dim // 3)

    def construct(self, timestep: Tensor, resolution: Tensor | None, aspect_ratio: Tensor | None) -> Tensor:
        y = float32(self.timestep_embedder(timestep))
        if self.sizes:
            if resolution is None or aspect_ratio is None:
                raise ValueError("a model with use_additional_conditions needs resolution and aspect_ratio")
            batch = timestep.shape[0]
            size = self.resolution_embedder(resolution.reshape((-1,))).reshape((batch, -1))
            ratio = self.aspect_ratio_embedder(aspect_ratio.reshape((-1,))).reshape((batch, -1))
            y = y + float32(ops.concat((size, ratio), 1))
        return y


class _AdaptiveNormSingle(nn.Cell):
    """The modulation that all blocks share, (B, 6, dim), and the embedding it comes from, (B, dim)."""

    def __init__(self, dim: int, sizes: bool):
        super().__init__()
        self.emb = _TimeSizeEmbedding(dim, sizes)
        self.act = SiLU()
        self.linear = Linear(dim, 6 * dim)
        self.dim = dim

    def construct(self, timestep: Tensor, resolution: Tensor | None, aspect_ratio: Tensor | None):
        embedded = self.emb(timestep, resolution, aspect_ratio)
        return float32(self.linear(self.act(embedded))).reshape((-1, 6, self.dim)), embedded


def _shift_scale_table(count: int, dim: int) -> Parameter:
    return Parameter(initializer(Normal(dim**-0.5), (count, dim), ms.float32), name="scale_shift_table")


class PixArtBlock(nn.Cell):
    """Modulated self-attention, cross-attention to the caption, modulated feed-forward."""

    def __init__(self, config: PixArtConfig):
        super().__init__()
        dim, heads, head_dim = config.inner_dim, config.num_attention_heads, config.attention_head_dim
        self.scale_shift_table = _shift_scale_table(6, dim)
        self.normalize, self.add = ModulatedLayerNorm(dim, config.norm_eps), GatedResidual()
        self.attn1 = Attention(dim, heads, head_dim, bias=config.attention_bias)
        self.attn2 = Attention(dim, heads, head_dim, config.cross_attention_dim, config.attention_bias)
        self.ff = FeedForward(dim)

    def construct(self, x: Tensor, text: Tensor, text_bias: Tensor | None, modulation: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = ops.split(
            self.scale_shift_table + modulation, 1, axis=1
        )
        y = self.normalize(x, scale_a, shift_a)
        x = self.add(x, gate_a, self.attn1(y, y), self.attn1.to_out[0].bias)
        x = x + (float32(self.attn2(x, text, text_bias)) + self.attn2.to_out[0].bias)
        return self.add(x, gate_m, self.ff(self.normalize(x, scale_m, shift_m)), self.ff.net[2].bias)


class PixArtTransformer2DModel(nn.Cell):
    """Noise, and where `out_channels` is twice `in_channels` its variance, of latents under text and time."""

    output_names = ("sample",)
    config_class = PixArtConfig
    class_name = "PixArtTransformer2DModel"
    ignored_weights = ("caption_projection.y_embedding",)  # in PixArt-alpha's files; no reference reads it

    def __init__(self, config: PixArtConfig):
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.pos_embed = PatchEmbed(
            config.in_channels, dim, config.patch_size, config.sample_size, config.position_scale
        )
        self.transformer_blocks = nn.CellList([PixArtBlock(config) for _ in range(config.num_layers)])
        self.normalize = ModulatedLayerNorm(dim, 1e-6)
        self.scale_shift_table = _shift_scale_table(2, dim)
        out_channels = config.in_channels if config.out_channels is None else config.out_channels
        self.proj_out = Linear(dim, config.patch_size**2 * out_channels)
        self.adaln_single = _AdaptiveNormSingle(dim, config.has_size_conditions)
        self.projects_captions = config.caption_channels is not None
        if self.projects_captions:
            self.caption_projection = CaptionProjection(config.caption_channels, dim)

    def construct(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        encoder_attention_mask: Tensor | None = None,
        resolution: Tensor | None = None,
        aspect_ratio: Tensor | None = None,
    ):
        """Predict the noise.

        Args:
            hidden_states: (B, in_channels, H, W) latents; H and W are multiples of patch_size.
            encoder_hidden_states: (B, L, caption_channels) text tokens; (B, L, cross_attention_dim) in a model
                without caption_channels.
            timestep: (B,) in [0, 1000].
            encoder_attention_mask: (B, L), 1 for a text token to attend to, 0 for padding; all when None.
            resolution: (B, 2) height and width of the image in pixels, and
            aspect_ratio: (B, 1) height / width: for models with `use_additional_conditions`; others do not read
                them.

        Returns:
            (sample,), sample (B, out_channels, H, W) in float32. With learned variance the first half of the
            channels is the noise, the second the variance, as the reference returns them.

        Raises:
            ValueError: H or W is no multiple of patch_size, or an input that the model needs is missing.
        """
        height, width = hidden_states.shape[2], hidden_states.shape[3]
        x = self.pos_embed(hidden_states)
        modulation, embedded = self.adaln_single(timestep, resolution, aspect_ratio)
        text = encoder_hidden_states
        if self.projects_captions:
            text = self.caption_projection(text)
        bias = None
        if encoder_attention_mask is not None:
            batch, tokens = encoder_attention_mask.shape
            bias = (1.0 - float32(encoder_attention_mask).reshape((batch, 1, 1, tokens))) * _MASKED
        for block in self.transformer_blocks:
            x = block(x, text, bias, modulation)
        shift, scale = ops.split(self.scale_shift_table + embedded.expand_dims(1), 1, axis=1)
        x = float32(self.proj_out(self.normalize(x, scale, shift)))
        return (unpatchify(x, height, width, self.config.patch_size),)
