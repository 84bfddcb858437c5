"""CLIP in the configuration and parameter names of OpenCLIP (Ilharco et al., 2021), with vision transformers."""

from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.clip_layers import (
    MultiheadAttention,
    PatchEmbedding,
    causal_bias,
    normalize,
    take_positions,
)
from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.models.preprocess import PIXEL_MEAN, PIXEL_STD
from dancegrpo.models.transformers_config import check_heads
from dancegrpo.ops import LayerNorm, get_activation
from dancegrpo.ops.activations import float32

_LAYER_NORM_EPS = 1e-5

# Options of OpenCLIP that change the result, with the only value that is implemented. Those that are in neither
# list below have no effect: dropout of patches and features, where pretrained weights come from, pad_id.
_COMMON_FIXED = {
    "ls_init_value": None,
    "output_tokens": False,
    "final_ln_after_pool": False,
    "act_kwargs": None,
    "norm_kwargs": None,
    "block_type": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
}
_VISION_FIXED = _COMMON_FIXED | {
    "attentional_pool": False,
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "pool_type": "tok",
    "timm_model_name": None,
}
_TEXT_FIXED = _COMMON_FIXED | {
    "hf_tokenizer_name": None,
    "tokenizer_mode": None,
    "tokenizer_kwargs": None,
    "embed_cls": False,
    "no_causal_mask": False,
    "pool_type": "argmax",
    "proj_bias": False,
    "proj_type": "linear",
    "hf_model_name": None,
}
_MODEL_FIXED = {
    "custom_text": False,
    "init_logit_bias": None,
    "multimodal_cfg": None,
    "nonscalar_logit_scale": False,
}
_WITHOUT_EFFECT = {
    *("attn_pooler_queries", "attn_pooler_heads", "patch_dropout", "timm_model_pretrained", "timm_pool"),
    *("timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path", "hf_model_pretrained", "hf_proj_type"),
    *("hf_pooler_type", "pad_id", "eos_id", "cast_dtype", "init_logit_scale"),
}


def _whole(section: dict, prefix: str, name: str, default: int) -> int:
    value = section.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{prefix}{name} is {value!r}; valid: one positive whole number")
    return value


def _check_options(section: dict, prefix: str, read: set[str], fixed: dict[str, Any]) -> None:
    """ValueError for an option that is unknown, or set to what is not implemented."""
    for name, value in section.items():
        if name in fixed and value != fixed[name]:
            raise ValueError(f"{prefix}{name} is {value!r}; valid: {fixed[name]!r}")
        if name not in read | set(fixed) | _WITHOUT_EFFECT:
            raise ValueError(
                f"unsupported option {prefix}{name} = {value!r}; valid: {', '.join(sorted(read))}"
            )


@dataclass(frozen=True)
class TowerConfig:
    """A stack of transformer layers."""

    width: int
    layers: int
    heads: int
    inner: int


@dataclass(frozen=True)
class OpenCLIPConfig:
    """`open_clip_config.json`: the constructor's arguments, by themselves or as `model_cfg` beside
    `preprocess_cfg`.
    """

    embed_dim: int
    vision: TowerConfig
    text: TowerConfig
    image_size: int = 224
    patch_size: int = 16
    context_length: int = 77
    vocab_size: int = 49408
    quick_gelu: bool = False
    mean: tuple[float, ...] = PIXEL_MEAN
    std: tuple[float, ...] = PIXEL_STD
    resize: str = "shortest"
    source: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.image_size % self.patch_size:
            raise ValueError(
                f"vision_cfg.image_size {self.image_size} is not a multiple of vision_cfg.patch_size "
                f"{self.patch_size}"
            )
        check_heads(self.vision.width, self.vision.heads, "vision_cfg.width", "the number of heads")
        check_heads(self.text.width, self.text.heads, "text_cfg.width", "text_cfg.heads")

    @classmethod
    def from_dict(cls, config: dict) -> "OpenCLIPConfig":
        source = {key: value for key, value in config.items() if key not in ("_class_name", "architectures")}
        model, preprocess = source.get("model_cfg", source), source.get("preprocess_cfg", {})
        _check_options(model, "", {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg"}, _MODEL_FIXED)
        vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
        if preprocess.get("interpolation", "bicubic") != "bicubic":
            raise ValueError(
                f"preprocess_cfg.interpolation is {preprocess['interpolation']!r}; valid: 'bicubic'"
            )
        read = {"image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio"}
        _check_options(vision, "vision_cfg.", read, _VISION_FIXED)
        read = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
        _check_options(text, "text_cfg.", read, _TEXT_FIXED)
        width, text_width = (
            _whole(vision, "vision_cfg.", "width", 768),
            _whole(text, "text_cfg.", "width", 512),
        )
        head_width = _whole(vision, "vision_cfg.", "head_width", 64)
        check_heads(width, head_width, "vision_cfg.width", "vision_cfg.head_width")
        return cls(
            embed_dim=_whole(model, "", "embed_dim", 0),
            vision=TowerConfig(
                width,
                _whole(vision, "vision_cfg.", "layers", 12),
                width // head_width,
                int(width * vision.get("mlp_ratio", 4.0)),
            ),
            text=TowerConfig(
                text_width,
                _whole(text, "text_cfg.", "layers", 12),
                _whole(text, "text_cfg.", "heads", 8),
                int(text_width * text.get("mlp_ratio", 4.0)),
            ),
            image_size=_whole(vision, "vision_cfg.", "image_size", 224),
            patch_size=_whole(vision, "vision_cfg.", "patch_size", 16),
            context_length=_whole(text, "text_cfg.", "context_length", 77),
            vocab_size=_whole(text, "text_cfg.", "vocab_size", 49408),
            quick_gelu=bool(model.get("quick_gelu", False)),
            mean=tuple(preprocess.get("mean", PIXEL_MEAN)),
            std=tuple(preprocess.get("std", PIXEL_STD)),
            resize=preprocess.get("resize_mode", "shortest"),
            source=source,
        )

    def to_dict(self) -> dict:
        return self.source


class _MLP(nn.Cell):
    def __init__(self, config: TowerConfig, act: str):
        super().__init__()
        self.c_fc, self.c_proj = Linear(config.width, config.inner), Linear(config.inner, config.width)
        self.gelu = get_activation(act)

    def construct(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class _ResidualAttentionBlock(nn.Cell):
    def __init__(self, config: TowerConfig, act: str):
        super().__init__()
        self.ln_1 = LayerNorm(config.width, _LAYER_NORM_EPS)
        self.attn = MultiheadAttention(config.width, config.heads)
        self.ln_2 = LayerNorm(config.width, _LAYER_NORM_EPS)
        self.mlp = _MLP(config, act)

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + float32(self.attn(y, y, bias))
        return x + float32(self.mlp(self.ln_2(x)))


class _Transformer(nn.Cell):
    """Pre-norm layers on a float32 residual stream (B, L, D)."""

    def __init__(self, config: TowerConfig, act: str):
        super().__init__()
        self.resblocks = nn.CellList([_ResidualAttentionBlock(config, act) for _ in range(config.layers)])

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, bias)
        return x


def _normal(shape: tuple[int, ...], std: float, name: str) -> Parameter:
    return Parameter(initializer(Normal(std), shape, ms.float32), name=name)


class _Projection(nn.Cell):
    """x W with the weight of another Cell, in `compute_dtype`; float32 result."""

    def __init__(self):
        super().__init__()
        self.compute_dtype = ms.float32
        self.product = ops.MatMul()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return float32(self.product(x.astype(self.compute_dtype), weight.astype(self.compute_dtype)))


class _VisionTransformer(nn.Cell):
    def __init__(self, config: OpenCLIPConfig, act: str):
        super().__init__()
        width = config.vision.width
        self.conv1 = PatchEmbedding(width, 3, config.image_size, config.patch_size)
        self.class_embedding = _normal((width,), width**-0.5, "class_embedding")
        tokens = (config.image_size // config.patch_size) ** 2 + 1
        self.positional_embedding = _normal((tokens, width), width**-0.5, "positional_embedding")
        self.ln_pre = LayerNorm(width, _LAYER_NORM_EPS)
        self.transformer = _Transformer(config.vision, act)
        self.ln_post = LayerNorm(width, _LAYER_NORM_EPS)
        self.proj = _normal((width, config.embed_dim), width**-0.5, "proj")
        self.project = _Projection()
        self.width = width

    def construct(self, pixels: Tensor) -> Tensor:
        shape = (pixels.shape[0], 1, self.width)
        first = ops.broadcast_to(self.class_embedding.reshape((1, 1, self.width)), shape)
        x = ops.concat((first, self.conv1(pixels)), 1) + self.positional_embedding
        x = self.transformer(self.ln_pre(x))
        return self.project(self.ln_post(x[:, 0]), self.proj)


class OpenCLIPModel(nn.Cell):
    """Both towers. Embeds are L2-normalised, `vision_pooled` is the projected image vector before that; logits
    are multiplied by exp(logit_scale). The text vector is the state at the largest id, the end token.
    """

    output_names = ("logits_per_image", "image_embeds", "text_embeds", "vision_pooled")
    config_class = OpenCLIPConfig
    class_name = "OpenCLIPModel"
    library = "open_clip"

    def __init__(self, config: OpenCLIPConfig):
        super().__init__()
        self.config = config
        act = "quick_gelu" if config.quick_gelu else "gelu"
        width = config.text.width
        self.visual = _VisionTransformer(config, act)
        self.transformer = _Transformer(config.text, act)
        self.token_embedding = Embedding(config.vocab_size, width)
        self.positional_embedding = _normal((config.context_length, width), 0.01, "positional_embedding")
        self.ln_final = LayerNorm(width, _LAYER_NORM_EPS)
        self.text_projection = _normal((width, config.embed_dim), width**-0.5, "text_projection")
        self.logit_scale = Parameter(Tensor(np.log(1.0 / 0.07), ms.float32), name="logit_scale")
        self.project = _Projection()
        self.causal = causal_bias(config.context_length)
        self.pixel_mean = Tensor(np.float32(config.mean).reshape(1, 3, 1, 1))
        self.pixel_inverse_std = Tensor((1.0 / np.float32(config.std)).reshape(1, 3, 1, 1))

    def preprocess(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1], of the model's own size, to normalised pixel values."""
        return (images - self.pixel_mean) * self.pixel_inverse_std

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        """(N, L) ids to (N, embed_dim), unit length."""
        tokens = input_ids.shape[1]
        x = self.token_embedding(input_ids) + self.positional_embedding[:tokens]
        x = self.ln_final(self.transformer(x, self.causal[:tokens, :tokens]))
        pooled = take_positions(x, ops.argmax(input_ids.astype(ms.int32), 1))
        return normalize(self.project(pooled, self.text_projection))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """(N, 3, H, W) preprocessed pixels to (N, embed_dim), unit length."""
        return normalize(self.visual(pixel_values))

    def construct(self, input_ids: Tensor, pixel_values: Tensor):
        pooled = self.visual(pixel_values)
        image, text = normalize(pooled), self.get_text_features(input_ids)
        logits = ops.exp(self.logit_scale) * ops.matmul(image, text.transpose((1, 0)))
        return logits, image, text, pooled
