"""CLIP (Radford et al., 2021) with the configuration and parameter names of transformers' CLIPModel/CLIPTextModel."""

import dataclasses
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.ops import LayerNorm, ScaledDotProductAttention, get_activation
from dancegrpo.ops.activations import float32

# Pixel statistics of OpenAI's training set, used by every public CLIP's image processor.
_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def _pick(config_class, config: dict):
    names = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{key: value for key, value in config.items() if key in names})


@dataclass(frozen=True)
class CLIPTextConfig:
    """transformers' CLIPTextConfig; defaults are CLIP ViT-L/14's."""

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

    @classmethod
    def from_dict(cls, config: dict) -> "CLIPTextConfig":
        return _pick(cls, config)

    def to_dict(self) -> dict:
        return {"model_type": "clip_text_model", **dataclasses.asdict(self)}


@dataclass(frozen=True)
class CLIPVisionConfig:
    """transformers' CLIPVisionConfig; defaults are CLIP ViT-B/32's."""

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
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )


@dataclass(frozen=True)
class CLIPConfig:
    """transformers' CLIPConfig: two towers and their common projection."""

    text_config: CLIPTextConfig = field(default_factory=CLIPTextConfig)
    vision_config: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    projection_dim: int = 512
    logit_scale_init_value: float = 2.6592

    @classmethod
    def from_dict(cls, config: dict) -> "CLIPConfig":
        values = {key: config[key] for key in ("projection_dim", "logit_scale_init_value") if key in config}
        return cls(
            CLIPTextConfig.from_dict(config.get("text_config", {})),
            _pick(CLIPVisionConfig, config.get("vision_config", {})),
            **values,
        )

    def to_dict(self) -> dict:
        return {
            "model_type": "clip",
            "projection_dim": self.projection_dim,
            "logit_scale_init_value": self.logit_scale_init_value,
            "text_config": self.text_config.to_dict(),
            "vision_config": {"model_type": "clip_vision_model", **dataclasses.asdict(self.vision_config)},
        }


class _Attention(nn.Cell):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.k_proj, self.v_proj = Linear(dim, dim), Linear(dim, dim)
        self.q_proj, self.out_proj = Linear(dim, dim), Linear(dim, dim)
        self.heads, self.head_dim = heads, dim // heads
        self.attention = ScaledDotProductAttention(heads, self.head_dim)

    def _split(self, x: Tensor) -> Tensor:
        return ops.transpose(x.reshape((x.shape[0], x.shape[1], self.heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.attention(
            self._split(self.q_proj(x)), self._split(self.k_proj(x)), self._split(self.v_proj(x)), bias
        )
        return self.out_proj(ops.transpose(y, (0, 2, 1, 3)).reshape(x.shape))


class _MLP(nn.Cell):
    def __init__(self, dim: int, inner: int, act: str):
        super().__init__()
        self.activation_fn = get_activation(act)
        self.fc1, self.fc2 = Linear(dim, inner), Linear(inner, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class _EncoderLayer(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.self_attn = _Attention(config.hidden_size, config.num_attention_heads)
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = _MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def construct(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + float32(self.self_attn(self.layer_norm1(x), bias))
        return x + float32(self.mlp(self.layer_norm2(x)))


class _Encoder(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.CellList([_EncoderLayer(config) for _ in range(config.num_hidden_layers)])

    def construct(self, x: Tensor, bias: Tensor | None = None):
        states = (x,)
        for layer in self.layers:
            x = layer(x, bias)
            states = states + (x,)
        return states


class _TextEmbeddings(nn.Cell):
    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.token_embedding(input_ids) + self.position_embedding.weight[: input_ids.shape[1]]


class _TextTransformer(nn.Cell):
    """Causal text tower; the pooled vector is the final state at the end-of-text token."""

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.embeddings = _TextEmbeddings(config)
        self.encoder = _Encoder(config)
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        length = config.max_position_embeddings
        self.causal = Tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))
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
        index = position.astype(ms.int32).reshape((-1, 1, 1))
        pooled = ops.gather_elements(last, 1, ops.broadcast_to(index, (-1, 1, last.shape[2])))
        return last, pooled.reshape((last.shape[0], last.shape[2])), states


class CLIPTextModel(nn.Cell):
    """Text tower alone: `last_hidden_state` (B, L, D) and `pooler_output` (B, D) from input_ids (B, L) int."""

    config_class = CLIPTextConfig
    class_name = "CLIPTextModel"
    library = "transformers"
    ignored_weights = ("text_model.embeddings.position_ids",)

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.config = config
        self.text_model = _TextTransformer(config)
        self.output_names = ("last_hidden_state", "pooler_output")
        self.with_states = False

    def return_hidden_states(self) -> None:
        """Also return `hidden_0` (embeddings) ... `hidden_n` (last layer, before the final norm)."""
        self.with_states = True
        names = tuple(f"hidden_{i}" for i in range(self.config.num_hidden_layers + 1))
        self.output_names = ("last_hidden_state", "pooler_output") + names

    def construct(self, input_ids: Tensor):
        last, pooled, states = self.text_model(input_ids)
        if self.with_states:
            return (last, pooled) + states
        return last, pooled


class _PatchEmbedding(nn.Cell):
    """Convolution of patch size and stride as a product: `weight` keeps the convolution's shape (D, C, P, P)."""

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        shape = (config.hidden_size, config.num_channels, config.patch_size, config.patch_size)
        self.weight = Parameter(initializer(Normal(0.02), shape, ms.float32), name="weight")
        self.patch, self.channels = config.patch_size, config.num_channels
        self.grid, self.dim = config.image_size // config.patch_size, config.hidden_size

    def construct(self, pixels: Tensor) -> Tensor:  # (B, C, H, W) -> (B, grid * grid, D)
        batch, p, grid, c = pixels.shape[0], self.patch, self.grid, self.channels
        # Two 4-D transposes: those of higher rank are pathologically slow on CPU.
        x = pixels.reshape((batch * c * grid, p, grid, p)).transpose((0, 2, 1, 3))  # (B*C*gy, gx, py, px)
        x = x.reshape((batch, c, grid * grid, p * p)).transpose((0, 2, 1, 3))  # (B, g*g, C, p*p)
        weight = self.weight.reshape((self.dim, c * p * p))
        y = ops.matmul(x.reshape((batch * grid * grid, c * p * p)), weight.transpose((1, 0)))
        return y.reshape((batch, grid * grid, self.dim))


class _VisionEmbeddings(nn.Cell):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        dim = config.hidden_size
        self.class_embedding = Parameter(
            initializer(Normal(0.02), (dim,), ms.float32), name="class_embedding"
        )
        self.patch_embedding = _PatchEmbedding(config)
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
        self.encoder = _Encoder(config)
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
        self.pixel_mean = Tensor(np.float32(_PIXEL_MEAN).reshape(1, 3, 1, 1))
        self.pixel_inverse_std = Tensor((1.0 / np.float32(_PIXEL_STD)).reshape(1, 3, 1, 1))

    def _normalize(self, x: Tensor) -> Tensor:
        x = float32(x)
        return x * ops.rsqrt((x * x).sum(-1, keepdims=True))

    def preprocess(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1], of the model's own size, to normalised pixel values."""
        return (images - self.pixel_mean) * self.pixel_inverse_std

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        """(N, L) ids to (N, projection_dim), unit length."""
        return self._normalize(self.text_projection(self.text_model(input_ids)[1]))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """(N, 3, H, W) preprocessed pixels to (N, projection_dim), unit length."""
        return self._normalize(self.visual_projection(self.vision_model(pixel_values)))

    def construct(self, input_ids: Tensor, pixel_values: Tensor):
        pooled = float32(self.visual_projection(self.vision_model(pixel_values)))
        image = self._normalize(pooled)
        text = self.get_text_features(input_ids)
        logits = ops.exp(self.logit_scale) * ops.matmul(image, text.transpose((1, 0)))
        return logits, image, text, pooled
