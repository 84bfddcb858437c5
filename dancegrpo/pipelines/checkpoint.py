"""What pipelines from a checkpoint folder have in common, and the kind that most families are."""

from __future__ import annotations

import gc
import platform
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo import __version__
from dancegrpo.config import ConfigError
from dancegrpo.diffusion import process_of, read_scheduler
from dancegrpo.diffusion.scheduler_config import SchedulerSettings
from dancegrpo.models import load_model
from dancegrpo.pipelines.base import Pipeline, PipelineOptions
from dancegrpo.pipelines.guidance import GuidedDenoiser, guidance_scale
from dancegrpo.pipelines.sizes import image_size, vae_factor
from dancegrpo.pipelines.text import TextTower
from dancegrpo.runtime.compile_cache import installed_version, source_digest
from dancegrpo.runtime.files import read_json
from dancegrpo.runtime.precision import compute_dtype


class CheckpointPipeline(Pipeline):
    """Components from the sub-folders of a folder in the diffusers layout.

    Attributes:
        towers: the text encoders, empty where there is no text.
        vae: the frozen autoencoder.
    """

    backbone_class: ClassVar[str]
    """Name of the trained model's class."""
    takes_text_encoder: ClassVar[bool] = False
    """Whether `model.text_encoder` has a meaning."""
    takes_sequence_length: ClassVar[bool] = False
    """Whether `model.max_sequence_length` has one."""
    scheduler_changes: ClassVar[Mapping[str, Any]] = {}
    """Scheduler options that diffusers' pipeline sets whatever the checkpoint says."""

    def __init__(self, folder: str | Path, options: PipelineOptions | None = None):
        super().__init__(Path(folder), options)
        self.check_options()
        self.index = read_json(self.folder / "model_index.json")
        self.scheduler = self.read_scheduler(self.folder)
        self.dtype = compute_dtype(self.options.compute)
        self.towers: list[TextTower] = []
        self.vae = load_model(self.folder / "vae", self.dtype, parameters_dtype=self.dtype)
        held = self.dtype if self.options.frozen else None
        self.backbone = load_model(self.folder / self.component, self.dtype, parameters_dtype=held)
        self._check_classes()
        for parameter in self.vae.get_parameters():
            parameter.requires_grad = False

    def _check_classes(self) -> None:
        backbone, vae = self.backbone.class_name, self.vae.class_name
        if backbone != self.backbone_class:
            raise ConfigError(
                f"{self.folder / self.component} is a {backbone}; {self.family} needs a {self.backbone_class}"
            )
        if not hasattr(self.vae, "decode"):
            raise ConfigError(f"{self.folder / 'vae'} is a {vae}; {self.family} needs an autoencoder")

    def check_options(self) -> None:
        """Refuses options that the family cannot follow, before anything is loaded."""
        for key, taken in (
            ("text_encoder", self.takes_text_encoder),
            ("max_sequence_length", self.takes_sequence_length),
        ):
            asked = getattr(self.options, key)
            if asked is not None and not taken:
                raise ConfigError(
                    f"model.{key} is {asked!r}, but {self.family} only takes its own; set it to null"
                )

    @classmethod
    def read_scheduler(cls, folder: Path) -> SchedulerSettings:
        """What a checkpoint's scheduler says, without loading a model.

        Raises:
            ConfigError: it cannot be read, is not supported, or is of another process than the family's.
        """
        scheduler = read_scheduler(folder / "scheduler", cls.scheduler_changes)
        if process_of(scheduler) != cls.process:
            raise ConfigError(
                f"{folder / 'scheduler'} is of a {process_of(scheduler)} process, but {cls.family} is a model of a "
                f"{cls.process} process"
            )
        return scheduler

    def has(self, name: str) -> bool:
        """Whether the checkpoint has that component."""
        entry = self.index.get(name)
        return isinstance(entry, list) and bool(entry) and entry[0] is not None

    def tower(
        self,
        name: str,
        tokenizer: str,
        outputs: Sequence[str],
        context: int | None = None,
        masked: bool = False,
    ) -> TextTower:
        """Loads a text encoder and adds it to `towers`."""
        tower = TextTower(self.folder / name, self.folder / tokenizer, outputs, self.dtype, context, masked)
        self.towers.append(tower)
        return tower

    def text_key(self) -> str | None:
        if not self.towers:
            return None
        # Entries of the index that are no component are options, some of which decide how text is encoded.
        options = {
            name: value
            for name, value in self.index.items()
            if not name.startswith("_") and not (isinstance(value, list) and len(value) == 2)
        }
        libraries = ("mindspore", "numpy", "tokenizers", "sentencepiece", "ftfy")
        computed_by = (__version__, source_digest(), *map(installed_version, libraries))
        device = (ms.get_context("device_target"), platform.machine())
        made_for = (self.family, sorted(options.items()), repr(self.backbone.config))
        return repr((computed_by, device, made_for, [tower.key() for tower in self.towers]))

    def free_text_encoder(self) -> None:
        for tower in self.towers:
            tower.drop()
        gc.collect()  # cells are in cycles

    def check_fit(self, *pairs: tuple[str, int, str, int]) -> None:
        """Refuses components that do not fit together: (option, its value, what it must equal, that value)."""
        for name, value, other, expected in pairs:
            if value != expected:
                raise ConfigError(
                    f"{self.folder}: {self.component} {name} is {value}, but {other} is {expected}"
                )

    def unknown_words(self, prompt: str) -> list[str]:
        words = [tower.tokenizer.unknown_words(prompt) for tower in self.towers]
        return [word for word in words[0] if all(word in other for other in words[1:])] if words else []

    def is_truncated(self, prompt: str) -> bool:
        return bool(self.towers) and all(tower.tokenizer.is_truncated(prompt) for tower in self.towers)


class LatentDecoder(nn.Cell):
    """Latents (B, C, h, w) as the sampler has them to images (B, 3, H, W) in [0, 1]."""

    def __init__(self, vae: nn.Cell):
        super().__init__(auto_prefix=False)
        self.vae = vae
        self.scale, self.shift = 1.0 / vae.config.scaling_factor, float(vae.config.shift_factor or 0.0)

    def construct(self, latents: Tensor) -> Tensor:
        return ops.clamp(self.vae.decode(latents * self.scale + self.shift) * 0.5 + 0.5, 0.0, 1.0)


class GuidedPipeline(CheckpointPipeline):
    """A backbone on latents (C, h, w) with classifier-free guidance: every family but FLUX."""

    default_guidance: ClassVar[float]
    default_sample_size: ClassVar[int] = 64
    """Latents of a side where the backbone's config is silent."""
    takes_negative_prompt: ClassVar[bool] = True

    def __init__(self, folder: str | Path, options: PipelineOptions | None = None):
        super().__init__(folder, options)
        config = self.backbone.config
        size = config.sample_size or self.default_sample_size
        multiple = getattr(config, "patch_size", 1)
        self.image_size = image_size(self.options, self.vae, size, multiple, self.largest_side())
        rows, columns = (side // vae_factor(self.vae) for side in self.image_size)
        self.latent_shape = (config.in_channels, rows, columns)
        self.check_fit(
            ("in_channels", config.in_channels, "VAE latent_channels", self.vae.config.latent_channels)
        )
        if self.process == "flow":
            name, settings, _ = self.scheduler
            tokens = rows * columns // multiple**2
            self.scheduler = (name, settings | {"image_seq_len": tokens, "explicit_sigmas": False}, {})
        self.load_text()
        self.guided = self._scale > 1
        denoiser = self.make_denoiser()
        self.denoiser = GuidedDenoiser(denoiser, self._scale) if self.guided else denoiser
        self._decoder = LatentDecoder(self.vae)

    def check_options(self) -> None:
        super().check_options()
        self._scale = guidance_scale(
            self.options, self.default_guidance, self.family, self.takes_negative_prompt
        )

    def largest_side(self) -> int | None:
        """Latents of the largest side that the backbone takes; None: any."""
        return None

    def load_text(self) -> None:
        """Loads text encoders and checks that they fit the backbone."""

    @abstractmethod
    def make_denoiser(self) -> nn.Cell:
        """The backbone behind the denoiser's interface, for one branch."""

    def decode(self, latents: Tensor) -> Tensor:
        return self._decoder(latents)
