"""CLIP (Radford et al., 2021) with the configuration and parameter names of transformers' CLIP models."""

from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.clip_layers import (
    Encoder,
    PatchEmbedding,
    TextEmbeddings,
    causal_bias,
    normalize,
    take_positions,
)
from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.models.preprocess import PIXEL_MEAN, PIXEL_STD
from dancegrpo.models.transformers_config import TowersConfig, TransformersConfig, check_heads
from dancegrpo.ops import LayerNorm
from dancegrpo.ops.activations import float32


@dataclass(frozen=True)
class CLIPTextConfig(TransformersConfig):
    """transformers' CLIPTextConfig; defaults are CLIP ViT-L/14's."""

    model_type = "clip_text_model"
    vocab_size: int = 49408
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    bos_token_id: int = 49406
    eos_token_id: int = 49407
    pad_token_id: int = 1

    def __post_init__(self):
        check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class CLIPTextProjectionConfig(CLIPTextConfig):
    """The same with the width of the projection, an option that only CLIPTextModelWithProjection reads."""

    projection_dim: int = 512


@dataclass(frozen=True)
class CLIPVisionConfig(TransformersConfig):
    """transformers' CLIPVisionConfig; defaults are CLIP ViT-B/32's."""

    model_type = "clip_vision_model"
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    def __post_init__(self):
        check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )


@dataclass(frozen=True)
class CLIPConfig(TowersConfig):
    """transformers' CLIPConfig: two towers and their common projection."""

    model_type = "clip"
    towers = {"text_config": CLIPTextConfig, "vision_config": CLIPVisionConfig}
    text_config: CLIPTextConfig = field(default_factory=CLIPTextConfig)
    vision_config: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    projection_dim: int = 512
    logit_scale_init_value: float = 2.6592


class _TextTransformer(nn.Cell):
    """Causal text tower; the pooled vector is the final state at the end-of-text token."""

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.embeddings = TextEmbeddings(config)
        self.encoder = Encoder(config)
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.causal = causal_bias(config.max_position_embeddings)
        # Checkpoints from before transformers fixed the id carry eos_token_id = 2 and mean "the largest id".
        self.legacy_eos = config.eos_token_id == 2
        self.eos_token_id = config.eos_token_id

    def construct(self, input_ids: Tensor):
        tokens = input_ids.shape[1]
        states = self.encoder(self.embeddings(input_ids), self.causal[:tokens, :tokens])
        last = self.final_layer_norm(states[-1])
        if self.legacy_eos:
            position = ops.argmax(input_ids.astype(ms.int32), 1)
        else:
            position = ops.argmax((input_ids == self.eos_token_id).astype(ms.int32), 1)
        return last, take_positions(last, position), states


class _TextModel(nn.Cell):
    """What the two text models share: `second_output` names what they give beside the states."""

    library = "transformers"
    ignored_weights = ("text_model.embeddings.position_ids",)
    second_output = ""

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.config = config
        self.text_model = _TextTransformer(config)
        self.output_names = ("last_hidden_state", self.second_output)
        self.with_states = False

    def return_hidden_states(self) -> None:
        """Also return `hidden_0` (embeddings) ... `hidden_n` (last layer, before the final norm)."""
        self.with_states = True
        names = tuple(f"hidden_{i}" for i in range(self.config.num_hidden_layers + 1))
        self.output_names = ("last_hidden_state", self.second_output) + names


class CLIPTextModel(_TextModel):
    """Text tower alone: `last_hidden_state` (B, L, D) and `pooler_output` (B, D) from input_ids (B, L) int."""

    config_class = CLIPTextConfig
    class_name = "CLIPTextModel"
    second_output = "pooler_output"

    def construct(self, input_ids: Tensor):
        last, pooled, states = self.text_model(input_ids)
        if self.with_states:
            return (last, pooled) + states
        return last, pooled


class CLIPTextModelWithProjection(_TextModel):
    """Text tower and projection: `last_hidden_state` (B, L, D) and `text_embeds` (B, P), not normalised, from
    input_ids (B, L) int.
    """

    config_class = CLIPTextProjectionConfig
    class_name = "CLIPTextModelWithProjection"
    second_output = "text_embeds"

    def __init__(self, config: CLIPTextProjectionConfig):
        super().__init__(config)
        self.text_projection = Linear(config.hidden_size, config.projection_dim, bias=False)

    def construct(self, input_ids: Tensor):
        last, pooled, states = self.text_model(input_ids)
        embeds = float32(self.text_projection(pooled))
        if self.with_states:
            return (last, embeds) + states
        return last, embeds


class _VisionEmbeddings(nn.Cell):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        dim = config.hidden_size
        self.class_embedding = Parameter(
            initializer(Normal(0.02), (dim,), ms.float32), name="class_embedding"
        )
        self.patch_embedding = PatchEmbedding(dim, config.num_channels, config.image_size, config.patch_size)
        self.position_embedding = Embedding((config.image_size // config.patch_size) ** 2 + 1, dim)
        self.dim = dim

    def construct(self, pixels: Tensor) -> Tensor:
        batch = pixels.shape[0]
        first = ops.broadcast_to(self.class_embedding.reshape((1, 1, self.dim)), (batch, 1, self.dim))
        return ops.concat((first, self.patch_embedding(pixels)), 1) + self.position_embedding.weight


class _VisionTransformer(nn.Cell):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.embeddings = _VisionEmbeddings(config)
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.layer_norm_eps)  # the reference's spelling
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def construct(self, pixels: Tensor) -> Tensor:
        states = self.encoder(self.pre_layrnorm(self.embeddings(pixels)))
        return self.post_layernorm(states[-1][:, 0])


class CLIPModel(nn.Cell):
    """Both towers. Embeds are L2-normalised, `vision_pooled` is the projected image vector before that; logits
    are multiplied by exp(logit_scale).
    """

    output_names = ("logits_per_image", "image_embeds", "text_embeds", "vision_pooled")
    config_class = CLIPConfig
    class_name = "CLIPModel"
    library = "transformers"
    ignored_weights = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.config = config
        self.text_model = _TextTransformer(config.text_config)
        self.vision_model = _VisionTransformer(config.vision_config)
        self.visual_projection = Linear(config.vision_config.hidden_size, config.projection_dim, bias=False)
        self.text_projection = Linear(config.text_config.hidden_size, config.projection_dim, bias=False)
        self.logit_scale = Parameter(Tensor(config.logit_scale_init_value, ms.float32), name="logit_scale")
        self.pixel_mean = Tensor(np.float32(PIXEL_MEAN).reshape(1, 3, 1, 1))
        self.pixel_inverse_std = Tensor((1.0 / np.float32(PIXEL_STD)).reshape(1, 3, 1, 1))

    def preprocess(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1], of the model's own size, to normalised pixel values."""
        return (images - self.pixel_mean) * self.pixel_inverse_std

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        """(N, L) ids to (N, projection_dim), unit length."""
        return normalize(self.text_projection(self.text_model(input_ids)[1]))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """(N, 3, H, W) preprocessed pixels to (N, projection_dim), unit length."""
        return normalize(self.visual_projection(self.vision_model(pixel_values)))

    def construct(self, input_ids: Tensor, pixel_values: Tensor):
        pooled = float32(self.visual_projection(self.vision_model(pixel_values)))
        image = normalize(pooled)
        text = self.get_text_features(input_ids)
        logits = ops.exp(self.logit_scale) * ops.matmul(image, text.transpose((1, 0)))
        return logits, image, text, pooled
