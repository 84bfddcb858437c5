"""The face that a backbone family shows to sampling, training and evaluation."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.config import Config
from dancegrpo.diffusion import Schedule, Transition, chain_schedule, deterministic_transition
from dancegrpo.diffusion.scheduler_config import SchedulerSettings
from dancegrpo.models import save_model
from dancegrpo.models.lora import lora_layers
from dancegrpo.models.lora_files import save_lora
from dancegrpo.models.saving import parameter_arrays

PromptEncoding = tuple[np.ndarray, ...]

_REMEMBERED_BYTES = 2**30
"""Encoded prompts that are kept: half a million of the small model's, a hundred of a large T5's."""


@dataclass(frozen=True)
class PipelineOptions:
    """What a config says of a pipeline beside its folder; None is the model's own.

    Attributes:
        compute: name of the dtype of matrix products.
        guidance_scale, negative_prompt: see `config.SamplerConfig`.
        height, width, text_encoder, max_sequence_length: see `config.ModelConfig`.
    """

    compute: str = "float32"
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    text_encoder: str | None = None
    max_sequence_length: int | None = None

    @classmethod
    def of(cls, config: Config) -> PipelineOptions:
        """Those that a config asks for."""
        model, sampler = config.model, config.sampler
        return cls(
            compute=config.precision.compute,
            guidance_scale=sampler.guidance_scale,
            negative_prompt=sampler.negative_prompt,
            height=model.height,
            width=model.width,
            text_encoder=model.text_encoder,
            max_sequence_length=model.max_sequence_length,
        )


class Pipeline(ABC):
    """A loaded model: text encoding, denoising, decoding and saving behind one interface.

    Attributes:
        family: name of the diffusers pipeline class.
        process: "flow" (rectified) or "diffusion" (variance preserving): which transitions it can be sampled with.
        scheduler: what `diffusion.read_scheduler` says of the checkpoint, with the number of image tokens where a
            shift depends on it; None: a flow with a linear schedule.
        component: sub-folder of the trained backbone (`"transformer"` or `"unet"`).
        backbone: the cell whose parameters are trained.
        denoiser: cell, denoiser(latents (B, *latent_shape), timestep (B,), *conditions) -> velocity of a flow, whose
            timestep is 1000 sigma, or what the scheduler's prediction type says.
        guided: the denoiser is a `GuidedDenoiser`, whose conditions hold two branches.
        latent_shape: shape of one image's latents, as the sampler sees them.
        image_size: (height, width) in pixels.
    """

    family: str
    process = "flow"
    scheduler: SchedulerSettings | None = None
    component = "transformer"
    backbone: nn.Cell
    denoiser: nn.Cell
    guided = False
    latent_shape: tuple[int, ...]
    image_size: tuple[int, int]

    def __init__(self, folder: Path, options: PipelineOptions | None = None):
        self.folder, self.options = folder, options or PipelineOptions()
        self._encoded: OrderedDict[str, PromptEncoding] = OrderedDict()
        self._encoded_bytes = 0
        self._unconditional: PromptEncoding | None = None

    # ---- sampling

    def schedule(self, num_steps: int, shift: float | None = None) -> Schedule:
        """The steps of a noise-free chain; see `diffusion.chain_schedule`."""
        return chain_schedule(num_steps, self.scheduler, shift)

    def deterministic_transition(self) -> Transition:
        """The kernel of a noise-free chain."""
        return deterministic_transition(self.scheduler)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """(B, *latent_shape) on the device to images (B, 3, H, W) float32 in [0, 1], on the device."""

    # ---- prompts

    def encode_prompts(self, prompts: Sequence[str]) -> PromptEncoding:
        """What the denoiser takes besides latents and time, arrays (N, ...); what was encoded is remembered.

        With guidance (N, 2, ...): given the prompt, and given the negative one.
        """
        known = {prompt: self._encoded[prompt] for prompt in prompts if prompt in self._encoded}
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if new:
            arrays = self._encode(new)
            known |= {prompt: tuple(np.array(a[i]) for a in arrays) for i, prompt in enumerate(new)}
        self._remember(known)
        columns = tuple(np.stack(column) for column in zip(*(known[p] for p in prompts), strict=True))
        if not self.guided:
            return columns
        if self._unconditional is None:
            self._unconditional = self._encode_unconditional()
        return tuple(
            np.stack((column, np.broadcast_to(other, column.shape)), axis=1)
            for column, other in zip(columns, self._unconditional, strict=True)
        )

    def _remember(self, encoded: Mapping[str, PromptEncoding]) -> None:
        """Keeps encodings, the oldest go first."""
        for prompt, arrays in encoded.items():
            if prompt not in self._encoded:
                self._encoded_bytes += sum(array.nbytes for array in arrays)
            self._encoded[prompt] = arrays
            self._encoded.move_to_end(prompt)
        while self._encoded_bytes > _REMEMBERED_BYTES:
            _, arrays = self._encoded.popitem(last=False)
            self._encoded_bytes -= sum(array.nbytes for array in arrays)

    @abstractmethod
    def _encode(self, prompts: list[str]) -> PromptEncoding:
        """Encode distinct prompts: arrays (N, ...)."""

    def _encode_unconditional(self) -> PromptEncoding:
        """What the second branch of guidance is given, arrays (1, ...)."""
        return self._encode([self.options.negative_prompt or ""])

    def check_prompts(self, prompts: Sequence[str]) -> None:  # noqa: B027, most models draw any prompt
        """Refuses prompts that the model cannot draw at all.

        Raises:
            ConfigError: names the first one, and what is valid.
        """

    @abstractmethod
    def unknown_words(self, prompt: str) -> list[str]:
        """Words of a prompt that the tokenizer does not know."""

    def is_truncated(self, prompt: str) -> bool:
        """Whether no text encoder reads the prompt to its end."""
        return False

    # ---- saving

    def save(self, folder: str | Path, weights: Mapping[str, np.ndarray] | None = None) -> None:
        """Write the whole pipeline in the diffusers layout: the backbone anew, the frozen components copied.

        Of a backbone with a LoRA the sum of both is written, and beside it the LoRA (see `models.lora_files`).

        Args:
            folder: created if needed.
            weights: arrays by parameter name to write in place of the backbone's own, or of its LoRA's (an average,
                say); parameters that are missing, because they are never trained, keep theirs.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        for name in components_of(index):
            if name == self.component:
                index[name] = [index[name][0], getattr(self.backbone, "class_name", index[name][1])]
            elif (self.folder / name).is_dir():
                shutil.copytree(self.folder / name, folder / name, dirs_exist_ok=True)
            else:  # such as a safety checker that was not downloaded: nothing here needs it
                index[name] = [None, None]
        index |= self._save_replaced(folder)
        has_lora = bool(lora_layers(self.backbone))
        if weights is not None:
            weights = ({} if has_lora else parameter_arrays(self.backbone)) | dict(weights)
        save_model(self.backbone, folder / self.component, weights=weights)
        if has_lora:
            save_lora(self.backbone, folder, self.component, weights)
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _save_replaced(self, folder: Path) -> dict[str, list[str]]:
        """Write components that the config put in place of the checkpoint's; returns their entries in the index."""
        return {}


def components_of(index: Mapping) -> list[str]:
    """The names in a `model_index.json` that are sub-folders: plain names with a library and a class."""
    return [
        name
        for name, value in index.items()
        if isinstance(value, list)
        and len(value) == 2
        and value[0] is not None
        and not name.startswith(("_", "."))
        and Path(name).name == name
    ]
