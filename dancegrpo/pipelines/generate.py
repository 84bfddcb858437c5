"""Prompts to pictures with any pipeline: the noise-free chain, in calls of one fixed shape."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from mindspore import Tensor
from tqdm import tqdm

from dancegrpo.config import Config, ConfigError
from dancegrpo.data import load_prompts
from dancegrpo.diffusion import PolicyStep, Sampler
from dancegrpo.pipelines.base import Pipeline, PipelineOptions
from dancegrpo.pipelines.loading import load_pipeline
from dancegrpo.runtime import noise
from dancegrpo.runtime.files import TEMPORARY_PREFIX
from dancegrpo.runtime.images import make_grid, save_png
from dancegrpo.runtime.pixels import to_uint8

GRID, RECORDS = "grid.png", "prompts.jsonl"
_GRID_IMAGES, _GRID_COLUMNS, _GRID_CELL = 64, 8, 128
_SHOWN = 60  # characters of a long prompt in a warning
_ITERATION = 0  # training counts from 1, so its noise is never drawn here


@dataclass(frozen=True)
class ImageRequest:
    """One image to make; its noise depends on seed, prompt index and candidate, and on nothing else."""

    prompt: str
    prompt_index: int
    candidate: int = 0


@dataclass(frozen=True)
class ImageBatch:
    """One call's images: `images` (B, 3, H, W) in [0, 1] on the device, for `requests`.

    B is the fixed batch: `requests` is padded with its last entry, only the first `count` are real.
    """

    images: Tensor
    requests: tuple[ImageRequest, ...]
    count: int


class ImageGenerator:
    """A pipeline with a schedule and a batch size: requests in, images out.

    Every call has the same shape, so an image does not depend on how many others are made, and nothing is
    compiled after the first call.
    """

    def __init__(self, pipeline: Pipeline, *, num_steps: int, batch: int, shift: float | None = None):
        """
        Args:
            pipeline: from `load_pipeline`.
            num_steps: steps of the chain.
            batch: images per call.
            shift: timestep shift in place of that of the checkpoint's scheduler.

        Raises:
            ConfigError: a number is out of range.
        """
        if batch < 1:
            raise ConfigError(f"the batch (--batch, evaluation.batch) must be at least 1, got {batch}")
        self.pipeline = pipeline
        self.batch = batch
        step = PolicyStep(pipeline.denoiser, pipeline.deterministic_transition())
        self._sampler = Sampler(step, pipeline.schedule(num_steps, shift), batch)

    def stream(
        self, requests: Sequence[ImageRequest], seed: int, title: str = "sampling"
    ) -> Iterator[ImageBatch]:
        """Batches of images in the order of the requests, with a progress bar on standard error."""
        self.pipeline.check_prompts([request.prompt for request in requests])
        total = len(requests)
        # A bar on a terminal only, and none for a single call.
        hidden = None if total > self.batch else True
        with tqdm(total=total, desc=title, unit="image", disable=hidden, leave=False) as progress:
            for start in range(0, total, self.batch):
                rows = np.minimum(np.arange(start, start + self.batch), total - 1)
                part = tuple(requests[row] for row in rows)
                # Batch by batch: those of a thousand prompts of a large text encoder do not fit into memory.
                conditions = self.pipeline.encode_prompts([request.prompt for request in part])
                chain = self._sampler.sample(self._initial(part, seed), conditions)
                count = min(self.batch, total - start)
                yield ImageBatch(self.pipeline.decode(chain.final), part, count)
                progress.update(count)

    def images(self, requests: Sequence[ImageRequest], seed: int, title: str = "sampling") -> np.ndarray:
        """All images at once, (N, H, W, 3) uint8."""
        return np.concatenate(
            [to_uint8(batch.images.asnumpy()[: batch.count]) for batch in self.stream(requests, seed, title)]
        )

    def _initial(self, requests: Sequence[ImageRequest], seed: int) -> np.ndarray:
        return noise.batch(
            self.pipeline.latent_shape,
            seed=seed,
            iteration=_ITERATION,
            prompts=[request.prompt_index for request in requests],
            candidates=[request.candidate for request in requests],
            steps=noise.INITIAL_STEP,
        )


def requests_for(prompts: Sequence[str], images_per_prompt: int = 1) -> list[ImageRequest]:
    """`images_per_prompt` candidates of each prompt, prompt after prompt.

    Raises:
        ConfigError: no prompts, or fewer than one image.
    """
    if not prompts:
        raise ConfigError("there is no prompt to make an image of")
    if images_per_prompt < 1:
        raise ConfigError(f"--num-images must be at least 1, got {images_per_prompt}")
    return [
        ImageRequest(prompt, index, candidate)
        for index, prompt in enumerate(prompts)
        for candidate in range(images_per_prompt)
    ]


def check_output(folder: str | Path, overwrite: bool = False) -> Path:
    """The output folder, looked at but not touched.

    Raises:
        ConfigError: it is a file, or holds images of an earlier call and `overwrite` is False.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file, not a folder")
    earlier = _earlier(folder)
    if earlier and not overwrite:
        raise ConfigError(
            f"{folder} already holds {earlier[0].name}; choose another --output, or --overwrite it"
        )
    return folder


def _earlier(folder: Path) -> list[Path]:
    others = (folder / GRID, folder / RECORDS)
    return [*sorted(folder.glob("image_*.png")), *(path for path in others if path.exists())]


def warn_of_words(pipeline: Pipeline, prompts: Sequence[str]) -> None:
    """Says once, on standard error, what the text encoder will not see of the prompts."""
    unknown = list(dict.fromkeys(word for prompt in prompts for word in pipeline.unknown_words(prompt)))
    if unknown:
        print(
            f"warning: the model's tokenizer does not know {', '.join(map(repr, unknown))}", file=sys.stderr
        )
    for prompt in dict.fromkeys(prompts):
        if pipeline.is_truncated(prompt):
            shown = prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}..."
            print(f"warning: the end of {shown!r} is cut off, it is too long for the model", file=sys.stderr)


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` makes; None takes the config's value.

    Attributes:
        output: folder for the images.
        prompts, prompts_file: prompts themselves, and a source of more of them (see `load_prompts`).
        images_per_prompt, num_steps, batch, seed: how many, in which steps, images per call, of which noise.
        negative_prompt: see `config.SamplerConfig`.
        checkpoint, weights: see `load_pipeline`.
        overwrite: replace the images of an earlier call.
    """

    output: str
    prompts: tuple[str, ...] = ()
    prompts_file: str | None = None
    images_per_prompt: int = 1
    num_steps: int | None = None
    batch: int = 8
    seed: int = 0
    negative_prompt: str | None = None
    checkpoint: str | None = None
    weights: str | None = None
    overwrite: bool = False


def generate(config: Config, options: GenerateOptions) -> tuple[int, Path]:
    """Everything that `tools/generate.py` does; returns the number of images and their folder.

    Raises:
        ConfigError: bad prompts, numbers, checkpoint or output folder; an earlier output is then untouched.
    """
    listed: tuple[str, ...] = ()
    if options.prompts_file:
        listed = load_prompts(options.prompts_file, config.data.prompt_column).prompts
    requests = requests_for([*options.prompts, *listed], options.images_per_prompt)
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed must lie in 0 ... 2**63 - 1, got {options.seed}")
    steps = config.evaluation.num_steps if options.num_steps is None else options.num_steps
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    folder = check_output(options.output, options.overwrite)
    asked = PipelineOptions.of(config, frozen=True)
    if options.negative_prompt is not None:
        asked = replace(asked, negative_prompt=options.negative_prompt)
    checkpoint = options.checkpoint or config.model.checkpoint
    pipeline = load_pipeline(checkpoint, asked, options.weights, config.model.lora)
    generator = ImageGenerator(pipeline, num_steps=steps, batch=options.batch, shift=config.sampler.shift)
    texts = [request.prompt for request in requests]
    pipeline.check_prompts(texts)
    warn_of_words(pipeline, texts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from error
    if _earlier(folder):
        _replace_images(generator, requests, options.seed, folder)
    else:
        write_images(generator, requests, options.seed, folder)
    return len(requests), folder


def _replace_images(
    generator: ImageGenerator, requests: Sequence[ImageRequest], seed: int, folder: Path
) -> None:
    """The earlier images go only when all new ones are there."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as new:
        write_images(generator, requests, seed, Path(new))
        for path in _earlier(folder):
            path.unlink()
        for path in sorted(Path(new).iterdir()):
            path.replace(folder / path.name)


def write_images(
    generator: ImageGenerator, requests: Sequence[ImageRequest], seed: int, folder: Path
) -> None:
    """Makes the images and writes `image_0000.png` ..., `grid.png` and `prompts.jsonl`.

    A line of prompts.jsonl: file, prompt, prompt_index, candidate, seed. Files appear as they are made; the
    grid shows the first 64 images.
    """
    shown, done = [], 0
    for batch in generator.stream(requests, seed):
        records = []
        images = to_uint8(batch.images.asnumpy()[: batch.count])
        for index, (image, request) in enumerate(zip(images, batch.requests, strict=False), start=done):
            file = f"image_{index:04d}.png"
            save_png(folder / file, image)
            record = {"file": file, **asdict(request), "seed": seed}
            records.append(json.dumps(record, ensure_ascii=False) + "\n")
        with (folder / RECORDS).open("a" if done else "w", encoding="utf-8") as lines:
            lines.writelines(records)
        shown.extend(images[: max(0, _GRID_IMAGES - done)])
        done += batch.count
    per_prompt = 1 + max(request.candidate for request in requests)
    columns = min(_GRID_COLUMNS, per_prompt if per_prompt > 1 else len(requests))
    captions = [request.prompt for request in requests[: len(shown)]]
    scale = max(1, _GRID_CELL // shown[0].shape[0])  # small images are shown larger
    save_png(folder / GRID, make_grid(np.stack(shown), columns, captions=captions, scale=scale))
