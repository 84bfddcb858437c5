"""The FLUX transformer, with the configuration and parameter names of diffusers' FluxTransformer2DModel.

Black Forest Labs, FLUX.1 (2024): double-stream blocks in which text and image tokens have their own weights and
attend jointly (Esser et al., 2024, MMDiT), then single-stream blocks over the concatenated tokens.
"""

from dataclasses import dataclass

from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Linear
from dancegrpo.models.transformer_layers import ContinuousNorm, FeedForward, Modulation, TimeTextEmbedding
from dancegrpo.ops import (
    BiasGELU,
    GatedResidual,
    JointRotaryAttention,
    ModulatedLayerNorm,
    RMSNorm,
    RotaryAttention,
    RotaryFrequencies,
    SiLU,
)
from dancegrpo.ops.activations import float32


@dataclass(frozen=True)
class FluxConfig:
    """diffusers' `config.json` of a FluxTransformer2DModel; defaults are FLUX.1-dev's."""

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self):
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope {tuple(self.axes_dims_rope)} sums to {sum(self.axes_dims_rope)}, "
                f"but attention_head_dim is {self.attention_head_dim}"
            )
        if any(dim % 2 for dim in self.axes_dims_rope):
            raise ValueError(f"axes_dims_rope {tuple(self.axes_dims_rope)} must be even numbers")
        if self.patch_size != 1:
            raise ValueError(
                f"patch_size is {self.patch_size}; FLUX packs its latents outside the model: only 1"
            )

    @property
    def inner_dim(self) -> int:
        return self.attention_head_dim * self.num_attention_heads


class JointAttention(nn.Cell):
    """Attention of a double block: separate projections of image and text tokens, one softmax over both.

    Returns image and text without the biases of the output projections.
    """

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim, head_dim = config.inner_dim, config.attention_head_dim
        self.to_q, self.to_k, self.to_v = Linear(dim, dim), Linear(dim, dim), Linear(dim, dim)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (
            Linear(dim, dim),
            Linear(dim, dim),
            Linear(dim, dim),
        )
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.norm_added_q, self.norm_added_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.to_out = nn.CellList([Linear(dim, dim)])
        self.to_add_out = Linear(dim, dim)
        self.attention = JointRotaryAttention(config.num_attention_heads, head_dim)

    def construct(self, x: Tensor, text: Tensor, cos: Tensor, sin: Tensor):
        text_out, image_out = self.attention(
            self.add_q_proj.without_bias(text),
            self.add_k_proj.without_bias(text),
            self.add_v_proj.without_bias(text),
            self.add_q_proj.bias,
            self.add_k_proj.bias,
            self.add_v_proj.bias,
            self.norm_added_q.weight,
            self.norm_added_k.weight,
            self.to_q.without_bias(x),
            self.to_k.without_bias(x),
            self.to_v.without_bias(x),
            self.to_q.bias,
            self.to_k.bias,
            self.to_v.bias,
            self.norm_q.weight,
            self.norm_k.weight,
            cos,
            sin,
        )
        return self.to_out[0].without_bias(image_out), self.to_add_out.without_bias(text_out)


class SelfAttention(nn.Cell):
    """Attention of a single block, without output projection (it is part of the block's `proj_out`)."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim, head_dim = config.inner_dim, config.attention_head_dim
        self.to_q, self.to_k, self.to_v = Linear(dim, dim), Linear(dim, dim), Linear(dim, dim)
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.attention = RotaryAttention(config.num_attention_heads, head_dim)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.attention(
            self.to_q.without_bias(x),
            self.to_k.without_bias(x),
            self.to_v.without_bias(x),
            self.to_q.bias,
            self.to_k.bias,
            self.to_v.bias,
            self.norm_q.weight,
            self.norm_k.weight,
            cos,
            sin,
        )


class FluxTransformerBlock(nn.Cell):
    """Double-stream block: modulated joint attention and feed-forward on image and text tokens."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim = config.inner_dim
        self.norm1, self.norm1_context = Modulation(dim, 6), Modulation(dim, 6)
        self.normalize, self.add = ModulatedLayerNorm(dim, 1e-6), GatedResidual()
        self.attn = JointAttention(config)
        self.ff, self.ff_context = FeedForward(dim), FeedForward(dim)

    def construct(self, x: Tensor, text: Tensor, condition: Tensor, cos: Tensor, sin: Tensor):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.norm1(condition)
        text_shift_a, text_scale_a, text_gate_a, text_shift_m, text_scale_m, text_gate_m = self.norm1_context(
            condition
        )
        attended, text_attended = self.attn(
            self.normalize(x, scale_a, shift_a), self.normalize(text, text_scale_a, text_shift_a), cos, sin
        )
        x = self.add(x, gate_a, attended, self.attn.to_out[0].bias)
        text = self.add(text, text_gate_a, text_attended, self.attn.to_add_out.bias)
        x = self.add(x, gate_m, self.ff(self.normalize(x, scale_m, shift_m)), self.ff.net[2].bias)
        text = self.add(
            text,
            text_gate_m,
            self.ff_context(self.normalize(text, text_scale_m, text_shift_m)),
            self.ff_context.net[2].bias,
        )
        return x, text


class FluxSingleTransformerBlock(nn.Cell):
    """Single-stream block: attention and feed-forward in parallel, one output projection for both."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim = config.inner_dim
        self.norm = Modulation(dim, 3)
        self.normalize, self.add = ModulatedLayerNorm(dim, 1e-6), GatedResidual()
        self.proj_mlp = Linear(dim, 4 * dim)
        self.act_mlp = BiasGELU()
        self.proj_out = Linear(5 * dim, dim)
        self.attn = SelfAttention(config)

    def construct(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate = self.norm(condition)
        y = self.normalize(x, scale, shift)
        hidden = self.act_mlp(self.proj_mlp.without_bias(y), self.proj_mlp.bias)
        branches = ops.concat((self.attn(y, cos, sin).astype(hidden.dtype), hidden), axis=-1)
        return self.add(x, gate, self.proj_out.without_bias(branches), self.proj_out.bias)


class FluxTransformer2DModel(nn.Cell):
    """Velocity of packed latents under text, time and guidance."""

    output_names = ("sample",)
    config_class = FluxConfig
    class_name = "FluxTransformer2DModel"

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.config = config
        self.pos_embed = RotaryFrequencies(tuple(config.axes_dims_rope))
        self.time_text_embed = TimeTextEmbedding(
            config.inner_dim, config.pooled_projection_dim, config.guidance_embeds
        )
        self.act = SiLU()  # before every modulation: once for all
        self.context_embedder = Linear(config.joint_attention_dim, config.inner_dim)
        self.x_embedder = Linear(config.in_channels, config.inner_dim)
        self.transformer_blocks = nn.CellList(
            [FluxTransformerBlock(config) for _ in range(config.num_layers)]
        )
        self.single_transformer_blocks = nn.CellList(
            [FluxSingleTransformerBlock(config) for _ in range(config.num_single_layers)]
        )
        self.norm_out = ContinuousNorm(config.inner_dim)
        self.proj_out = Linear(config.inner_dim, config.out_channels or config.in_channels)

    def construct(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | None = None,
    ):
        """Predict the velocity.

        Args:
            hidden_states: (B, S, in_channels) packed latents.
            encoder_hidden_states: (B, L, joint_attention_dim) text tokens.
            pooled_projections: (B, pooled_projection_dim).
            timestep: (B,) in [0, 1]; the model multiplies by 1000, as diffusers does.
            img_ids: (S, 3) float positions of the image tokens (0, row, column).
            txt_ids: (L, 3) float positions of the text tokens, all zero in FLUX.
            guidance: (B,) guidance scale, for models with `guidance_embeds` only.

        Returns:
            (sample,), sample (B, S, out_channels) in float32.
        """
        if self.config.guidance_embeds:
            guidance = float32(guidance) * 1000.0
        cos, sin = self.pos_embed(float32(ops.concat((txt_ids, img_ids), axis=0)))
        condition = self.act(self.time_text_embed(float32(timestep) * 1000.0, pooled_projections, guidance))
        x = float32(self.x_embedder(hidden_states))
        text = float32(self.context_embedder(encoder_hidden_states))
        for block in self.transformer_blocks:
            x, text = block(x, text, condition, cos, sin)
        tokens = text.shape[1]
        x = ops.concat((text, x), axis=1)
        for block in self.single_transformer_blocks:
            x = block(x, condition, cos, sin)
        x = self.norm_out(x[:, tokens:], condition)
        return (float32(self.proj_out(x)),)
