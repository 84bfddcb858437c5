"""LLaMA (Touvron et al., 2023) as a text encoder, with the configuration and names of transformers' LlamaModel."""

import math
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.models.layers import Embedding, Linear
from dancegrpo.models.transformers_config import TransformersConfig, check_heads
from dancegrpo.ops import ApplyRotary, RMSNorm, ScaledDotProductAttention, get_activation
from dancegrpo.ops.activations import float32

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class LlamaConfig(TransformersConfig):
    """transformers' LlamaConfig; defaults are LLaMA 7B's. `rope_scaling` is the older name of `rope_parameters`."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: float = 1.0

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_heads(
            self.num_attention_heads, self.num_key_value_heads, "num_attention_heads", "num_key_value_heads"
        )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; valid: even numbers")
        if self.partial_rotary_factor != 1.0:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}; valid: 1.0")
        rope_type = self.rope["rope_type"]
        if rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope_type is {rope_type!r}; valid: {', '.join(_ROPE_TYPES)}")

    @property
    def rope(self) -> dict:
        """`rope_type`, `rope_theta` and the options of that type, whichever generation of config.json has them."""
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or {}), **(self.rope_parameters or {})}
        return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}

    def to_dict(self) -> dict:
        absent = {name for name in ("rope_scaling", "rope_parameters") if getattr(self, name) is None}
        return {key: value for key, value in super().to_dict().items() if key not in absent}


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angle per position (head_dim / 2,) float32 of each pair of channels."""
    rope, dim = config.rope, config.head_dim
    frequency = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    try:
        if rope["rope_type"] == "linear":
            frequency = frequency / rope["factor"]
        elif rope["rope_type"] == "llama3":
            # Waves longer than the context that the model was first trained on are stretched, short ones are not.
            turns = rope["original_max_position_embeddings"] * frequency / (2.0 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequency = frequency * (keep + (1.0 - keep) / rope["factor"])
    except KeyError as error:
        raise ValueError(f"rope_type {rope['rope_type']!r} needs the option {error.args[0]}") from error
    return frequency.astype(np.float32)


class _Rotation(nn.Cell):
    """Cosines and sines (L, head_dim) of positions 0 ... L - 1."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        frequency = rotary_frequencies(config)
        self.frequency = Tensor(np.concatenate([frequency, frequency]).reshape(1, -1))
        self.position = Tensor(np.arange(config.max_position_embeddings, dtype=np.float32).reshape(-1, 1))

    def construct(self, length: int):
        angle = self.position[:length] * self.frequency
        return ops.cos(angle), ops.sin(angle)


class _Attention(nn.Cell):
    """Grouped-query attention: the queries that share a key head are laid one after another along the sequence."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.memory_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        inner, memory, bias = (
            self.heads * self.head_dim,
            self.memory_heads * self.head_dim,
            config.attention_bias,
        )
        self.q_proj = Linear(config.hidden_size, inner, bias)
        self.k_proj, self.v_proj = (Linear(config.hidden_size, memory, bias) for _ in range(2))
        self.o_proj = Linear(inner, config.hidden_size, bias)
        self.rotary = ApplyRotary(self.head_dim, interleaved=False)
        self.attention = ScaledDotProductAttention(self.memory_heads, self.head_dim)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return ops.transpose(x.reshape((x.shape[0], x.shape[1], heads, self.head_dim)), (0, 2, 1, 3))

    def construct(self, x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = self.rotary(self._split(self.q_proj(x), self.heads), cos, sin)
        key = self.rotary(self._split(self.k_proj(x), self.memory_heads), cos, sin)
        query = query.reshape((batch, self.memory_heads, -1, self.head_dim))
        y = self.attention(query, key, self._split(self.v_proj(x), self.memory_heads), bias)
        y = ops.transpose(y.reshape((batch, self.heads, tokens, self.head_dim)), (0, 2, 1, 3))
        return self.o_proj(y.reshape((batch, tokens, self.heads * self.head_dim)))


class _MLP(nn.Cell):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj, self.up_proj = Linear(width, inner, bias), Linear(width, inner, bias)
        self.down_proj = Linear(inner, width, bias)
        self.act_fn = get_activation(config.hidden_act)

    def construct(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Cell):
    """Pre-norm layer on a float32 residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + float32(self.self_attn(self.input_layernorm(x), bias, cos, sin))
        return x + float32(self.mlp(self.post_attention_layernorm(x)))


class LlamaModel(nn.Cell):
    """`last_hidden_state` (B, L, D) float32, after the final norm, from input_ids (B, L) int and, optionally,
    attention_mask (B, L), 1 for tokens and 0 for padding. Positions count from 0 whatever the mask is.
    """

    config_class = LlamaConfig
    class_name = "LlamaModel"
    library = "transformers"
    ignored_weights = (
        "lm_head.weight",
        "*.rotary_emb.inv_freq",
    )  # LlamaForCausalLM's head; a constant of old files

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.CellList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = _Rotation(config)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.output_names = ("last_hidden_state",)
        self.with_states = False

    @staticmethod
    def weight_name(name: str) -> str:
        """LlamaForCausalLM's names with what they begin with taken away."""
        return name.removeprefix("model.")

    def return_hidden_states(self) -> None:
        """Also return `hidden_0` (embeddings) ... `hidden_n`, the last after the final norm."""
        self.with_states = True
        names = tuple(f"hidden_{i}" for i in range(self.config.num_hidden_layers + 1))
        self.output_names = ("last_hidden_state",) + names

    def _bias(self, length: int, mask: Tensor | None) -> Tensor:
        """(B or 1, 1, group * L, L): 0 where a query may look, else -1e9."""
        position = self.rotation.position[:length]
        blocked = float32(position < position.reshape((1, length))).reshape((1, 1, length, length))
        if mask is not None:
            blocked = ops.maximum(blocked, (1.0 - float32(mask)).reshape((mask.shape[0], 1, 1, length)))
        return ops.tile(blocked * -1e9, (1, 1, self.group, 1))

    def construct(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        length = input_ids.shape[1]
        bias = self._bias(length, attention_mask)
        cos, sin = self.rotation(length)
        x, states = self.embed_tokens(input_ids), ()
        for layer in self.layers:
            states = states + (x,)
            x = layer(x, bias, cos, sin)
        x = self.norm(x)
        if self.with_states:
            return (x,) + states + (x,)
        return (x,)
