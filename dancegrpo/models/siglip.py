"""SigLIP (Zhai et al., 2023) with the configuration and parameter names of transformers' SiglipModel."""

from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.clip_layers import (
    MLP,
    Encoder,
    MultiheadAttention,
    PatchEmbedding,
    TextEmbeddings,
    normalize,
)
from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.models.transformers_config import TowersConfig, TransformersConfig, check_heads
from dancegrpo.ops import LayerNorm
from dancegrpo.ops.activations import float32


@dataclass(frozen=True)
class SiglipTextConfig(TransformersConfig):
    """transformers' SiglipTextConfig; defaults are SigLIP base's."""

    model_type = "siglip_text_model"
    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 64
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    projection_size: int | None = None

    def __post_init__(self):
        check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
        if self.projection_size is None:
            object.__setattr__(self, "projection_size", self.hidden_size)


@dataclass(frozen=True)
class SiglipVisionConfig(TransformersConfig):
    """transformers' SiglipVisionConfig; defaults are SigLIP base's at 224 pixels."""

    model_type = "siglip_vision_model"
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True

    def __post_init__(self):
        check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is below patch_size {self.patch_size}")
        if not self.vision_use_head:
            raise ValueError("vision_use_head is false; valid: true")


@dataclass(frozen=True)
class SiglipConfig(TowersConfig):
    """transformers' SiglipConfig: two towers."""

    model_type = "siglip"
    towers = {"text_config": SiglipTextConfig, "vision_config": SiglipVisionConfig}
    text_config: SiglipTextConfig = field(default_factory=SiglipTextConfig)
    vision_config: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)

    def __post_init__(self):
        text, vision = self.text_config.projection_size, self.vision_config.hidden_size
        if text != vision:
            raise ValueError(
                f"text_config.projection_size is {text}; valid: vision_config.hidden_size, {vision}"
            )


class _TextTransformer(nn.Cell):
    """Text tower that sees all tokens, padding too; the last position, projected, stands for the text."""

    def __init__(self, config: SiglipTextConfig):
        super().__init__()
        self.embeddings = TextEmbeddings(config)
        self.encoder = Encoder(config)
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.head = Linear(config.hidden_size, config.projection_size)

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.head(self.final_layer_norm(self.encoder(self.embeddings(input_ids))[-1][:, -1]))


class _VisionEmbeddings(nn.Cell):
    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.patch_embedding = PatchEmbedding(
            config.hidden_size, config.num_channels, config.image_size, config.patch_size, bias=True
        )
        grid = config.image_size // config.patch_size
        self.position_embedding = Embedding(grid * grid, config.hidden_size)
        self.covered = grid * config.patch_size

    def construct(self, pixels: Tensor) -> Tensor:
        # SigLIP So400m has 384 pixels and patches of 14: the rest at the right and at the bottom is not seen.
        seen = pixels[:, :, : self.covered, : self.covered]
        return self.patch_embedding(seen) + self.position_embedding.weight


class _PoolingHead(nn.Cell):
    """A learned probe attends to all patches; residual MLP."""

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        dim = config.hidden_size
        self.probe = Parameter(initializer(Normal(0.02), (1, 1, dim), ms.float32), name="probe")
        self.attention = MultiheadAttention(dim, config.num_attention_heads)
        self.layernorm = LayerNorm(dim, config.layer_norm_eps)
        self.mlp = MLP(dim, config.intermediate_size, config.hidden_act)

    def construct(self, states: Tensor) -> Tensor:
        batch, _, dim = states.shape
        x = float32(self.attention(ops.broadcast_to(self.probe, (batch, 1, dim)), states))
        return (x + float32(self.mlp(self.layernorm(x))))[:, 0]


class _VisionTransformer(nn.Cell):
    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.embeddings = _VisionEmbeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.head = _PoolingHead(config)

    def construct(self, pixels: Tensor) -> Tensor:
        return self.head(self.post_layernorm(self.encoder(self.embeddings(pixels))[-1]))


class SiglipModel(nn.Cell):
    """Both towers. Embeds are L2-normalised; logits are multiplied by exp(logit_scale) and shifted by logit_bias."""

    output_names = ("logits_per_image", "image_embeds", "text_embeds")
    config_class = SiglipConfig
    class_name = "SiglipModel"
    library = "transformers"
    ignored_weights = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")

    def __init__(self, config: SiglipConfig):
        super().__init__()
        self.config = config
        self.text_model = _TextTransformer(config.text_config)
        self.vision_model = _VisionTransformer(config.vision_config)
        self.logit_scale = Parameter(Tensor(np.zeros(1, np.float32)), name="logit_scale")
        self.logit_bias = Parameter(Tensor(np.zeros(1, np.float32)), name="logit_bias")

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        """(N, L) ids, padded to the full context, to (N, D), unit length."""
        return normalize(self.text_model(input_ids))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """(N, 3, H, W) preprocessed pixels to (N, D), unit length."""
        return normalize(self.vision_model(pixel_values))

    def construct(self, input_ids: Tensor, pixel_values: Tensor):
        image, text = self.get_image_features(pixel_values), self.get_text_features(input_ids)
        logits = ops.exp(self.logit_scale) * ops.matmul(image, text.transpose((1, 0))) + self.logit_bias
        return logits, image, text
