"""The transformer of Stable Diffusion 3 and 3.5, as diffusers' SD3Transformer2DModel.

Esser et al., 2024, "Scaling rectified flow transformers" (MMDiT): text and image tokens have their own weights and
attend jointly. SD 3.5 adds RMS norms of query and key, and in some blocks (`dual_attention_layers`) a second
attention among the image tokens alone (MMDiT-X).
"""

from dataclasses import dataclass

from mindspore import Tensor, nn

from dancegrpo.models.layers import Linear
from dancegrpo.models.options import refuse_not_positive, refuse_unsupported
from dancegrpo.models.patches import CroppedPatchEmbed, unpatchify
from dancegrpo.models.transformer_layers import (
    Attention,
    ContinuousNorm,
    FeedForward,
    JointAttention,
    Modulation,
    TimeTextEmbedding,
)
from dancegrpo.ops import GatedResidual, ModulatedLayerNorm, SiLU
from dancegrpo.ops.activations import float32


@dataclass(frozen=True)
class SD3Config:
    """diffusers' `config.json` of an SD3Transformer2DModel, with diffusers' defaults."""

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    def __post_init__(self):
        refuse_unsupported(self, {"qk_norm": (None, "rms_norm")})
        refuse_not_positive(
            self,
            ("sample_size", "patch_size", "in_channels", "num_layers", "attention_head_dim")
            + ("num_attention_heads", "pos_embed_max_size"),
        )
        if self.caption_projection_dim != self.inner_dim:
            raise ValueError(
                f"caption_projection_dim is {self.caption_projection_dim}, but text and image tokens need the "
                f"same width: num_attention_heads * attention_head_dim is {self.inner_dim}"
            )
        if self.inner_dim % 4:
            raise ValueError(
                f"num_attention_heads * attention_head_dim is {self.inner_dim}; the position table needs a "
                f"multiple of 4"
            )
        outside = [i for i in self.dual_attention_layers if not 0 <= i < self.num_layers]
        if outside:
            raise ValueError(
                f"dual_attention_layers names {outside}; valid: 0 to {self.num_layers - 1} (num_layers - 1)"
            )

    @property
    def inner_dim(self) -> int:
        return self.attention_head_dim * self.num_attention_heads


class SD3TransformerBlock(nn.Cell):
    """Modulated joint attention and feed-forward on image and text tokens.

    Args:
        dual: the image tokens also attend among themselves.
        last: the text tokens are read and not changed any more.
    """

    def __init__(self, config: SD3Config, dual: bool, last: bool):
        super().__init__()
        dim, heads, head_dim = config.inner_dim, config.num_attention_heads, config.attention_head_dim
        qk_norm = config.qk_norm is not None
        self.dual, self.last = dual, last
        self.norm1 = Modulation(dim, 9 if dual else 6)
        self.norm1_context = ContinuousNorm(dim) if last else Modulation(dim, 6)
        self.normalize, self.add = ModulatedLayerNorm(dim, 1e-6), GatedResidual()
        self.attn = JointAttention(dim, heads, head_dim, qk_norm, text_output=not last)
        if dual:
            self.attn2 = Attention(dim, heads, head_dim, qk_norm=qk_norm)
        self.ff = FeedForward(dim)
        if not last:
            self.ff_context = FeedForward(dim)

    def construct(self, x: Tensor, text: Tensor, condition: Tensor):
        parts = self.norm1(condition)
        shift, scale, gate = parts[0], parts[1], parts[2]
        if self.last:
            image, _ = self.attn(self.normalize(x, scale, shift), self.norm1_context(text, condition))
            return self._image(x, image, gate, parts), text
        text_parts = self.norm1_context(condition)
        image, text_attended = self.attn(
            self.normalize(x, scale, shift), self.normalize(text, text_parts[1], text_parts[0])
        )
        return self._image(x, image, gate, parts), self._text(text, text_attended, text_parts)

    def _image(self, x: Tensor, attended: Tensor, gate: Tensor, parts) -> Tensor:
        y = self.add(x, gate, attended, self.attn.to_out[0].bias)
        if self.dual:  # from the same tokens as the joint attention
            alone = self.normalize(x, parts[7], parts[6])
            y = self.add(y, parts[8], self.attn2(alone, alone), self.attn2.to_out[0].bias)
        return self.add(y, parts[5], self.ff(self.normalize(y, parts[4], parts[3])), self.ff.net[2].bias)

    def _text(self, text: Tensor, attended: Tensor, parts) -> Tensor:
        text = self.add(text, parts[2], attended, self.attn.to_add_out.bias)
        hidden = self.ff_context(self.normalize(text, parts[4], parts[3]))
        return self.add(text, parts[5], hidden, self.ff_context.net[2].bias)


class SD3Transformer2DModel(nn.Cell):
    """Velocity of latents under text and time."""

    output_names = ("sample",)
    config_class = SD3Config
    class_name = "SD3Transformer2DModel"

    def __init__(self, config: SD3Config):
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.pos_embed = CroppedPatchEmbed(
            config.in_channels, dim, config.patch_size, config.sample_size, config.pos_embed_max_size
        )
        self.time_text_embed = TimeTextEmbedding(dim, config.pooled_projection_dim)
        self.act = SiLU()  # before every modulation: once for all
        self.context_embedder = Linear(config.joint_attention_dim, dim)
        self.transformer_blocks = nn.CellList(
            [
                SD3TransformerBlock(config, i in config.dual_attention_layers, i == config.num_layers - 1)
                for i in range(config.num_layers)
            ]
        )
        self.norm_out = ContinuousNorm(dim)
        out_channels = config.in_channels if config.out_channels is None else config.out_channels
        self.proj_out = Linear(dim, config.patch_size**2 * out_channels)

    def construct(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
    ):
        """Predict the velocity.

        Args:
            hidden_states: (B, in_channels, H, W) latents; H and W are multiples of patch_size, at most
                patch_size * pos_embed_max_size.
            encoder_hidden_states: (B, L, joint_attention_dim) text tokens.
            pooled_projections: (B, pooled_projection_dim).
            timestep: (B,) in [0, 1000], fractions allowed.

        Returns:
            (sample,), sample (B, out_channels, H, W) in float32.

        Raises:
            ValueError: a latent size that does not fit.
        """
        height, width = hidden_states.shape[2], hidden_states.shape[3]
        x = self.pos_embed(hidden_states)
        condition = self.act(self.time_text_embed(timestep, pooled_projections))
        text = float32(self.context_embedder(encoder_hidden_states))
        for block in self.transformer_blocks:
            x, text = block(x, text, condition)
        x = float32(self.proj_out(self.norm_out(x, condition)))
        return (unpatchify(x, height, width, self.config.patch_size),)
