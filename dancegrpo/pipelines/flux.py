"""FLUX: packed latents, embedded guidance, text tokens from a T5 and a pooled vector from a CLIP.

Black Forest Labs, FLUX.1 (2024).
"""

import shutil
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn, ops

from dancegrpo.config import ConfigError
from dancegrpo.models.flux import FluxTransformer2DModel
from dancegrpo.models.loading import read_config
from dancegrpo.pipelines.base import PipelineOptions, PromptEncoding
from dancegrpo.pipelines.checkpoint import CheckpointPipeline, LatentDecoder
from dancegrpo.pipelines.latents import image_ids
from dancegrpo.pipelines.sizes import image_size, vae_factor
from dancegrpo.pipelines.text import TextTower
from dancegrpo.runtime.files import read_json

_DEFAULT_GUIDANCE = 3.5  # what FLUX.1-dev was distilled around
_T5_TOKENS = 512  # as in diffusers
_LATENTS = 128  # of a side, as in diffusers, where the autoencoder makes any size
_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index*.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)


class FluxDenoiser(nn.Cell):
    """Velocity from packed latents (B, S, C), timestep (B,) = 1000 sigma, text states (B, L, D), pooled (B, P)."""

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        rows: int,
        columns: int,
        text_tokens: int,
        guidance_scale: float | None,
    ):
        super().__init__(auto_prefix=False)  # the parameters keep the transformer's own names
        self.transformer = transformer
        self.img_ids = Tensor(image_ids(rows, columns))
        self.txt_ids = Tensor(np.zeros((text_tokens, 3), np.float32))
        self.guidance_scale = guidance_scale

    def construct(self, latents: Tensor, timestep: Tensor, prompt_embeds: Tensor, pooled: Tensor) -> Tensor:
        guidance = None
        if self.guidance_scale is not None:
            guidance = ops.ones_like(timestep) * self.guidance_scale
        return self.transformer(
            latents, prompt_embeds, pooled, timestep * 0.001, self.img_ids, self.txt_ids, guidance
        )[0]


class FluxDecoder(nn.Cell):
    """Packed latents (B, S, 4 C) to images (B, 3, H, W) in [0, 1]."""

    def __init__(self, vae: nn.Cell, rows: int, columns: int):
        super().__init__(auto_prefix=False)
        self.decoder = LatentDecoder(vae)
        self.rows, self.columns, self.channels = rows, columns, vae.config.latent_channels

    def construct(self, packed: Tensor) -> Tensor:
        batch, rows, columns, channels = packed.shape[0], self.rows, self.columns, self.channels
        # unpack_latents in two 4-D transposes: those of higher rank are pathologically slow on CPU.
        x = packed.reshape((batch, rows * columns, channels, 4)).transpose((0, 2, 1, 3))
        x = x.reshape((batch * channels * rows, columns, 2, 2)).transpose((0, 2, 1, 3))
        return self.decoder(x.reshape((batch, channels, 2 * rows, 2 * columns)))


class FluxPipeline(CheckpointPipeline):
    """Text states (N, L, D) and the pooled vector (N, P).

    FLUX.1 has a T5 for the states; in a small one without `text_encoder_2` the CLIP gives both. `model.text_encoder`
    puts another encoder in the place that gives the states.
    """

    family = "FluxPipeline"
    backbone_class = "FluxTransformer2DModel"
    takes_text_encoder = takes_sequence_length = True

    def __init__(self, folder: str | Path, options: PipelineOptions | None = None):
        super().__init__(folder, options)
        config, guidance = self.backbone.config, self._guidance()
        self._load_text()
        channels = 4 * self.vae.config.latent_channels
        self.check_fit(("in_channels", config.in_channels, "4 x VAE latent_channels", channels))
        self.image_size = image_size(self.options, self.vae, _LATENTS, multiple=2)
        rows, columns = (side // (2 * vae_factor(self.vae)) for side in self.image_size)
        name, settings, _ = self.scheduler
        # Its pipeline gives the scheduler the sigmas.
        settings = settings | {"image_seq_len": rows * columns, "explicit_sigmas": True}
        self.scheduler = (name, settings, {})
        self.denoiser = FluxDenoiser(self.backbone, rows, columns, self.towers[-1].context, guidance)
        self._decoder = FluxDecoder(self.vae, rows, columns)
        self.latent_shape = (rows * columns, config.in_channels)

    def check_options(self) -> None:
        super().check_options()
        negative, encoder = self.options.negative_prompt, self.options.text_encoder
        if negative is not None:
            raise ConfigError(
                f"sampler.negative_prompt is {negative!r}, but {self.family} takes none: its guidance is a number that "
                "the model is told; set it to null"
            )
        if encoder is not None and not Path(encoder).is_dir():
            raise ConfigError(
                f"model.text_encoder {encoder} does not exist; give the folder of a text encoder"
            )

    def _guidance(self) -> float | None:
        """The scale that the transformer is told, None where it has no such input."""
        options, embedded = self.options, self.backbone.config.guidance_embeds
        if not embedded and options.guidance_scale not in (None, 1.0):
            raise ConfigError(
                f"sampler.guidance_scale is {options.guidance_scale}, but {self.folder / self.component} has no "
                "guidance embedding; set it to null"
            )
        if not embedded:
            return None
        return _DEFAULT_GUIDANCE if options.guidance_scale is None else options.guidance_scale

    def _load_text(self) -> None:
        """The tower of the pooled vector and that of the states, which may be the same."""
        config, asked = self.backbone.config, self.options.max_sequence_length
        other, states = self.options.text_encoder, ("last_hidden_state",)
        alone = other is None and not self.has("text_encoder_2")
        first = ("last_hidden_state", "pooler_output") if alone else ("pooler_output",)
        pooled = self.tower("text_encoder", "tokenizer", first)
        if other is not None:
            folder = Path(other)
            self.towers.append(TextTower(folder, folder, states, self.dtype, asked or _context_of(folder)))
        elif not alone:
            context = asked or _context_of(self.folder / "text_encoder_2")
            self.tower("text_encoder_2", "tokenizer_2", states, context)
        elif asked is not None:
            raise ConfigError(
                f"model.max_sequence_length is {asked}, but {self.folder} has a CLIP only, whose texts have "
                f"{pooled.context} tokens; set it to null"
            )
        last = self.towers[-1]
        where = f"width of {last.folder}" if other else "text hidden_size"
        self.check_fit(
            ("joint_attention_dim", config.joint_attention_dim, where, last.width),
            ("pooled_projection_dim", config.pooled_projection_dim, "text hidden_size", pooled.width),
        )

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        if len(self.towers) == 1:
            return self.towers[0].encode(prompts)
        return self.towers[1].encode(prompts) + self.towers[0].encode(prompts)

    def is_truncated(self, prompt: str) -> bool:
        return self.towers[-1].tokenizer.is_truncated(prompt)

    def unknown_words(self, prompt: str) -> list[str]:
        return self.towers[-1].tokenizer.unknown_words(prompt)

    def decode(self, latents: Tensor) -> Tensor:
        return self._decoder(latents)

    def _save_replaced(self, folder: Path) -> dict[str, list[str]]:
        if self.options.text_encoder is None:
            return {}
        tower = self.towers[-1]
        _copy_files(tower.folder, folder / "text_encoder_2", _MODEL_FILES)
        _copy_files(tower.tokenizer_folder, folder / "tokenizer_2", _TOKENIZER_FILES)
        settings = read_json(tower.tokenizer_folder / "tokenizer_config.json")
        tokenizer = settings.get("tokenizer_class") or "PreTrainedTokenizerFast"
        return {
            "text_encoder_2": ["transformers", tower.class_name],
            "tokenizer_2": ["transformers", tokenizer],
        }


def _context_of(folder: Path) -> int | None:
    """Tokens of a text of an encoder that gives the states: diffusers' number, or all that it has positions for; None
    for a CLIP, whose tokenizer knows."""
    config = read_config(folder)
    if str(config.get("model_type", "")).startswith("clip"):
        return None
    return min(_T5_TOKENS, config.get("max_position_embeddings") or _T5_TOKENS)


def _copy_files(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, target / file.name)
