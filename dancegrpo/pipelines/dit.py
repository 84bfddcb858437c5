"""DiT: images of classes; a prompt is the name or the number of one.

Peebles and Xie, 2023, "Scalable diffusion models with transformers".
"""

import difflib
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.pipelines.base import PromptEncoding
from dancegrpo.pipelines.checkpoint import GuidedPipeline


class DiTDenoiser(nn.Cell):
    """Latents (B, C, h, w), timestep (B,), class (B,) int; a learned variance is dropped."""

    def __init__(self, transformer: nn.Cell):
        super().__init__(auto_prefix=False)  # the parameters keep the transformer's own names
        self.transformer, self.channels = transformer, transformer.config.in_channels

    def construct(self, latents: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        return self.transformer(latents, timestep, labels)[0][:, : self.channels]


class DiTPipeline(GuidedPipeline):
    """Class numbers (N,) int32; the names are those of `id2label` in model_index.json."""

    family, process = "DiTPipeline", "diffusion"
    backbone_class = "DiTTransformer2DModel"
    default_guidance = 4.0
    takes_negative_prompt = False

    def load_text(self):
        self._classes = self.backbone.config.num_embeds_ada_norm
        labels = self.index.get("id2label") or {}
        try:
            self._labels = {
                name.strip().lower(): int(number)
                for number, names in labels.items()
                for name in names.split(",")
            }
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / 'model_index.json'}: id2label must map class numbers to names"
            ) from error

    def make_denoiser(self):
        return DiTDenoiser(self.backbone)

    def _number(self, prompt: str) -> int | None:
        text = prompt.strip().lower()
        if text.isascii() and text.isdigit():
            return int(text) if len(text) < 10 and int(text) < self._classes else None
        return self._labels.get(text)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in dict.fromkeys(prompts):
            if self._number(prompt) is None:
                near = difflib.get_close_matches(prompt.strip().lower(), self._labels, n=3, cutoff=0.5)
                hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
                names = "the name of a class or " if self._labels else ""
                shown = prompt if len(prompt) <= 60 else f"{prompt[:60]}..."
                raise ConfigError(
                    f"the prompt {shown!r} is no class of this model: it takes {names}a number from 0 to "
                    f"{self._classes - 1}{hint}"
                )

    def _encode(self, prompts: list[str]) -> PromptEncoding:
        self.check_prompts(prompts)
        return (np.array([self._number(prompt) for prompt in prompts], np.int32),)

    def _encode_unconditional(self) -> PromptEncoding:
        return (np.array([self._classes], np.int32),)  # the embedding's last row: no class
