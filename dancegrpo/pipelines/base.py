"""The face that a backbone family shows to sampling, training and evaluation."""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.models import save_model
from dancegrpo.models.lora import lora_layers
from dancegrpo.models.lora_files import save_lora

PromptEncoding = tuple[np.ndarray, ...]


class Pipeline(ABC):
    """A loaded model: text encoding, denoising, decoding and saving behind one interface.

    Attributes:
        family: name of the diffusers pipeline class.
        process: "flow" (rectified) or "diffusion" (variance preserving): which transitions it can be sampled with.
        scheduler: what `diffusion.read_scheduler` says of the checkpoint; None for a flow.
        component: sub-folder of the trained backbone (`"transformer"` or `"unet"`).
        backbone: the cell whose parameters are trained.
        denoiser: cell, denoiser(latents (B, *latent_shape), timestep (B,) = 1000 sigma, *conditions) -> velocity.
        latent_shape: shape of one image's latents, as the backbone sees them.
        image_size: (height, width) in pixels.
    """

    family: str
    process = "flow"
    scheduler: tuple[str, dict, dict] | None = None
    component = "transformer"
    backbone: nn.Cell
    denoiser: nn.Cell
    latent_shape: tuple[int, ...]
    image_size: tuple[int, int]

    def __init__(self, folder: Path):
        self.folder = folder
        self._encoded: dict[str, PromptEncoding] = {}

    def encode_prompts(self, prompts: Sequence[str]) -> PromptEncoding:
        """What the denoiser takes besides latents and time, float32 arrays (N, ...); each prompt is encoded once."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._encoded]
        if new:
            arrays = self._encode(new)
            self._encoded.update({prompt: tuple(a[i] for a in arrays) for i, prompt in enumerate(new)})
        rows = [self._encoded[prompt] for prompt in prompts]
        return tuple(np.stack(column) for column in zip(*rows, strict=True))

    @abstractmethod
    def _encode(self, prompts: list[str]) -> PromptEncoding:
        """Encode distinct prompts."""

    @abstractmethod
    def unknown_words(self, prompt: str) -> list[str]:
        """Words of a prompt that the tokenizer does not know."""

    def is_truncated(self, prompt: str) -> bool:
        """Whether the prompt is longer than the text encoder's context."""
        return False

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """(B, *latent_shape) on the device to images (B, 3, H, W) float32 in [0, 1], on the device."""

    def save(self, folder: str | Path, weights: Mapping[str, np.ndarray] | None = None) -> None:
        """Write the whole pipeline in the diffusers layout: the backbone anew, the frozen components copied.

        Of a backbone with a LoRA the sum of both is written, and beside it the LoRA (see `models.lora_files`).

        Args:
            folder: created if needed.
            weights: arrays by parameter name to write in place of the backbone's own, or of its LoRA's (an average,
                say).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        for name, value in index.items():
            if isinstance(value, list) and value[0] is not None and name != self.component:
                shutil.copytree(self.folder / name, folder / name, dirs_exist_ok=True)
        weights = None if weights is None else dict(weights)
        save_model(self.backbone, folder / self.component, weights=weights)
        if lora_layers(self.backbone):
            save_lora(self.backbone, folder, self.component, weights)
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
