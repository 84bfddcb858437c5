"""`config.json` of diffusers' UNet2DConditionModel, and which of its options are supported."""

from dataclasses import dataclass

from dancegrpo.models.options import refuse_unsupported

DOWN_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")
UP_BLOCKS = ("CrossAttnUpBlock2D", "UpBlock2D")
_SUPPORTED = {
    "act_fn": ("silu", "swish"),
    "addition_embed_type": (None, "text_time"),
    "attention_type": ("default",),
    "center_input_sample": (False,),
    "class_embed_type": (None,),
    "class_embeddings_concat": (False,),
    "cross_attention_norm": (None,),
    "downsample_padding": (0, 1),
    "dual_cross_attention": (False,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_only_cross_attention": (None, False),
    "mid_block_scale_factor": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", None),
    "num_attention_heads": (None,),
    "num_class_embeds": (None,),
    "resnet_out_scale_factor": (1,),
    "resnet_skip_time_act": (False,),
    "resnet_time_scale_shift": ("default",),
    "time_cond_proj_dim": (None,),
    "time_embedding_act_fn": (None,),
    "time_embedding_type": ("positional",),
    "timestep_post_act": (None,),
}
_PER_BLOCK = (
    "attention_head_dim",
    "cross_attention_dim",
    "layers_per_block",
    "only_cross_attention",
    "transformer_layers_per_block",
)


@dataclass(frozen=True)
class UNet2DConditionConfig:
    """diffusers' `config.json` of a UNet2DConditionModel, with diffusers' defaults (Stable Diffusion 1.x).

    `attention_head_dim` is the *number* of heads, as in diffusers, for which the name came too early. Options may be
    one value or one per block, counted on the way down. `dropout` is never applied.
    """

    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 4
    out_channels: int = 4
    center_input_sample: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    down_block_types: tuple[str, ...] = (DOWN_BLOCKS[0],) * 3 + (DOWN_BLOCKS[1],)
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[str, ...] = (UP_BLOCKS[1],) + (UP_BLOCKS[0],) * 3
    only_cross_attention: bool | tuple[bool, ...] = False
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    downsample_padding: int = 1
    mid_block_scale_factor: float = 1
    dropout: float = 0.0
    act_fn: str = "silu"
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int | tuple[int, ...] = 1280
    transformer_layers_per_block: int | tuple[int, ...] = 1
    reverse_transformer_layers_per_block: tuple[int, ...] | None = None
    encoder_hid_dim: int | None = None
    encoder_hid_dim_type: str | None = None
    attention_head_dim: int | tuple[int, ...] = 8
    num_attention_heads: int | None = None
    dual_cross_attention: bool = False
    use_linear_projection: bool = False
    class_embed_type: str | None = None
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    num_class_embeds: int | None = None
    upcast_attention: bool = False
    resnet_time_scale_shift: str = "default"
    resnet_skip_time_act: bool = False
    resnet_out_scale_factor: float = 1.0
    time_embedding_type: str = "positional"
    time_embedding_dim: int | None = None
    time_embedding_act_fn: str | None = None
    timestep_post_act: str | None = None
    time_cond_proj_dim: int | None = None
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    projection_class_embeddings_input_dim: int | None = None
    attention_type: str = "default"
    class_embeddings_concat: bool = False
    mid_block_only_cross_attention: bool | None = None
    cross_attention_norm: str | None = None
    addition_embed_type_num_heads: int = 64

    def __post_init__(self):
        refuse_unsupported(self, _SUPPORTED)
        self._check_blocks()
        if any(self.per_block("only_cross_attention")):
            raise ValueError(
                f"only_cross_attention is {self.only_cross_attention!r}, which is not supported; valid: False"
            )
        for name in ("conv_in_kernel", "conv_out_kernel"):
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name} is {getattr(self, name)}; valid: odd numbers")
        if self.addition_embed_type == "text_time":
            for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim"):
                if getattr(self, name) is None:
                    raise ValueError(f"addition_embed_type 'text_time' needs {name}")

    def _check_blocks(self) -> None:
        count = len(self.block_out_channels)
        for name, valid in (("down_block_types", DOWN_BLOCKS), ("up_block_types", UP_BLOCKS)):
            types = getattr(self, name)
            if len(types) != count:
                raise ValueError(f"{name} has {len(types)} entries, but block_out_channels has {count}")
            for entry in types:
                if entry not in valid:
                    raise ValueError(
                        f"{name} has {entry!r}, which is not supported; valid: {', '.join(map(repr, valid))}"
                    )
        for name in _PER_BLOCK:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries, but block_out_channels has {count}")
        for name in ("transformer_layers_per_block", "reverse_transformer_layers_per_block"):
            for entry in getattr(self, name) if isinstance(getattr(self, name), tuple) else ():
                if not isinstance(entry, int):
                    raise ValueError(
                        f"{name} has {entry!r}, which is not supported; valid: one whole number for each block"
                    )
        if not isinstance(self.norm_num_groups, int):
            raise ValueError(f"norm_num_groups is {self.norm_num_groups!r}; valid: a whole number")
        for channels, heads in zip(
            self.block_out_channels, self.per_block("attention_head_dim"), strict=True
        ):
            if channels % heads or channels % self.norm_num_groups:
                raise ValueError(
                    f"block_out_channels has {channels}, which is not a multiple of both its number of heads "
                    f"(attention_head_dim: {heads}) and norm_num_groups ({self.norm_num_groups})"
                )

    def per_block(self, name: str) -> tuple:
        """An option that is one value or one for each block, as one for each block on the way down."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * len(self.block_out_channels)

    @property
    def up_transformer_layers(self) -> tuple[int, ...]:
        """Transformer blocks of each transformer, by block on the way up."""
        reverse = self.reverse_transformer_layers_per_block
        return self.per_block("transformer_layers_per_block")[::-1] if reverse is None else reverse

    @property
    def time_channels(self) -> int:
        """Width of the time embedding."""
        return self.time_embedding_dim or 4 * self.block_out_channels[0]
