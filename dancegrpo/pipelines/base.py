"""The face that a backbone family shows to sampling, training and evaluation."""

from __future__ import annotations

import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn
from tqdm import tqdm

from dancegrpo.config import Config, ConfigError
from dancegrpo.data.embedding_cache import EmbeddingCache
from dancegrpo.diffusion import Schedule, Transition, chain_schedule, deterministic_transition
from dancegrpo.diffusion.scheduler_config import SchedulerSettings
from dancegrpo.models import save_model
from dancegrpo.models.lora import lora_layers
from dancegrpo.models.lora_files import save_lora
from dancegrpo.models.saving import parameter_arrays

PromptEncoding = tuple[np.ndarray, ...]

_REMEMBERED_BYTES = 2**30
"""Encoded prompts that are kept: half a million of the small model's, a hundred of a large T5's."""
_AHEAD = 16  # prompts between two steps of the progress bar
_ALIKE = 0.01  # relative; other kernels or thread counts differ by less, other weights by more


@dataclass(frozen=True)
class PipelineOptions:
    """What a config says of a pipeline beside its folder; None is the model's own.

    Attributes:
        compute: name of the dtype of matrix products.
        guidance_scale, negative_prompt: see `config.SamplerConfig`.
        height, width, text_encoder, max_sequence_length: see `config.ModelConfig`.
        embedding_cache_gb: 10^9 bytes of encoded prompts that are kept on disk; 0: none are.
        frozen: the backbone's own weights are not trained, so its matrices may be held in the dtype of the products.
    """

    compute: str = "float32"
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    text_encoder: str | None = None
    max_sequence_length: int | None = None
    embedding_cache_gb: float = 0.0
    frozen: bool = False

    @classmethod
    def of(cls, config: Config, frozen: bool = False) -> PipelineOptions:
        """Those that a config asks for; `frozen` depends on what is done with the pipeline."""
        model, sampler = config.model, config.sampler
        output = config.output
        return cls(
            compute=config.precision.compute,
            guidance_scale=sampler.guidance_scale,
            negative_prompt=sampler.negative_prompt,
            height=model.height,
            width=model.width,
            text_encoder=model.text_encoder,
            max_sequence_length=model.max_sequence_length,
            embedding_cache_gb=output.embedding_cache_gb if output.embedding_cache else 0.0,
            frozen=frozen,
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
        self._dropped = False

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
        if self.embedding_cache is not None:
            stored = {prompt: self.embedding_cache.get(_entry(prompt)) for prompt in new}
            known |= {prompt: arrays for prompt, arrays in stored.items() if arrays is not None}
            new = [prompt for prompt in new if prompt not in known]
        if new:
            known |= self._encode_new(new)
        self._remember(known)
        columns = tuple(np.stack(column) for column in zip(*(known[p] for p in prompts), strict=True))
        if not self.guided:
            return columns
        return tuple(
            np.stack((column, np.broadcast_to(other, column.shape)), axis=1)
            for column, other in zip(columns, self._encode_second(), strict=True)
        )

    def prepare_prompts(self, prompts: Sequence[str], drop: bool = False) -> None:
        """To be called once before training on a list of prompts.

        One prompt is encoded whether it is on disk or not: so the encoder's graph is always compiled now and never in
        the middle of a run, and what is on disk is compared with what the encoder says today.

        Args:
            prompts: the list.
            drop: encode all of them now, with a progress bar, and give the text encoder's memory back. It is loaded
                again when another prompt comes.

        Raises:
            ConfigError: with `drop`, encodings are not kept on disk, or do not fit there.
        """
        cache, first = self.embedding_cache, prompts[0]
        if cache is None:
            if drop and self.text_key() is not None:
                raise ConfigError("model.drop_text_encoder needs output.embedding_cache: true")
            return
        fresh = tuple(array[0] for array in self._encode([first]))
        stored = cache.get(_entry(first))
        if stored is not None and not _alike(stored, fresh):
            print(
                f"warning: encoded prompts in {cache.folder} are not this encoder's; they are removed",
                file=sys.stderr,
            )
            cache.clear()
            stored = None
        if stored is None:
            cache.put(_entry(first), fresh)
        self._remember({first: stored or fresh})
        if drop:
            self._encode_ahead(list(dict.fromkeys(prompts)), cache)
            self._dropped = True
            self.free_text_encoder()

    def _encode_ahead(self, prompts: list[str], cache: EmbeddingCache) -> None:
        """Everything that training on the prompts needs goes to the disk."""
        size = sum(array.nbytes for array in self._encoded[prompts[0]])
        if size * len(prompts) > cache.safe_limit:
            needed = size * len(prompts) / cache.safe_limit * cache.limit / 1e9
            raise ConfigError(
                f"model.drop_text_encoder: the {len(prompts)} prompts need {needed:.1f} GB when encoded, but "
                f"output.embedding_cache_gb is {cache.limit / 1e9:g}; raise it, or keep the text encoder"
            )
        if self.guided:
            self._encode_second()
        missing = [prompt for prompt in prompts if not cache.touch(_entry(prompt))]
        with tqdm(total=len(missing), desc="encoding prompts", unit="prompt", disable=None) as progress:
            for start in range(0, len(missing), _AHEAD):
                part = missing[start : start + _AHEAD]
                self._encode_new(part)
                progress.update(len(part))
        lost = [prompt for prompt in prompts if not cache.touch(_entry(prompt))]
        if lost:
            raise ConfigError(
                f"model.drop_text_encoder: {len(lost)} of {len(prompts)} encoded prompts could not be kept in "
                f"{cache.root}; set it to false, or make room there"
            )

    def _encode_new(self, prompts: list[str]) -> dict[str, PromptEncoding]:
        """Encodings of distinct prompts, which go to the disk as well."""
        if self._dropped:
            print(
                f"warning: {len(prompts)} prompts are new: the text encoder is loaded again", file=sys.stderr
            )
        arrays = self._encode(prompts)
        encoded = {prompt: tuple(np.array(a[i]) for a in arrays) for i, prompt in enumerate(prompts)}
        if self.embedding_cache is not None:
            for prompt, encoding in encoded.items():
                self.embedding_cache.put(_entry(prompt), encoding)
        if self._dropped:
            self.free_text_encoder()
        return encoded

    def _encode_second(self) -> PromptEncoding:
        """What the second branch of guidance is given, arrays (1, ...), remembered and kept on disk."""
        cache, entry = self.embedding_cache, f"second {self.options.negative_prompt!r}"
        if self._unconditional is None and cache is not None:
            self._unconditional = cache.get(entry)
        if self._unconditional is None:
            self._unconditional = self._encode_unconditional()
            if cache is not None:
                cache.put(entry, self._unconditional)
        return self._unconditional

    @cached_property
    def embedding_cache(self) -> EmbeddingCache | None:
        """Encodings on disk; None where they are off, or there is nothing to encode."""
        if not self.options.embedding_cache_gb:
            return None
        key = self.text_key()
        return None if key is None else EmbeddingCache(key, int(self.options.embedding_cache_gb * 1e9))

    def text_key(self) -> str | None:
        """All that an encoding follows from besides the prompt; None: there is no text encoder."""
        return None

    def free_text_encoder(self) -> None:  # noqa: B027, there may be none
        """Gives its memory back; `_encode` loads it again."""

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


def _entry(prompt: str) -> str:
    return f"prompt {prompt}"


def _alike(first: PromptEncoding, second: PromptEncoding) -> bool:
    """Whether both are what one encoder says of one prompt."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and np.linalg.norm(a - b) <= _ALIKE * np.linalg.norm(b)
        for a, b in zip(first, second, strict=True)
    )


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
