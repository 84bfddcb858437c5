"""Pictures that the flow model paints itself, as evaluation and as RL rollouts do, kept in files of a work folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dancegrpo.diffusion import PolicyStep, Sampler, make_schedule, make_transition
from dancegrpo.pipelines import Pipeline
from dancegrpo.runtime import noise
from dancegrpo.runtime.files import write_atomic
from dancegrpo.runtime.pixels import to_uint8

PROMPTS_PER_FILE = 64
_BATCH = 64


@dataclass(frozen=True)
class Way:
    """How a picture is painted: `eta` above 0 is the SDE of rollouts, whose candidates share their initial noise.

    `stochastic_steps` of them draw noise (None: all), see `diffusion.Sampler`.
    """

    name: str
    num_steps: int
    eta: float = 0.0
    stochastic_steps: int | None = None


# As flux_small.yaml has it in its sampler and evaluation sections; and rollouts with noise in every step, whose
# pictures are rougher.
ROLLOUT, NOISY_ROLLOUT, EVALUATION = Way("rollout", 6, 0.6, 3), Way("noisy", 6, 0.6), Way("evaluation", 16)


class Painter:
    """Paints prompts with a pipeline; picture k of prompt i in a set depends on seed, set, i and k only."""

    def __init__(self, pipeline: Pipeline, seed: int):
        self.pipeline, self.seed = pipeline, seed
        self._samplers: dict[Way, Sampler] = {}

    def paint(self, way: Way, set_name: str, first: int, prompts: Sequence[str], images: int) -> np.ndarray:
        """Pictures of `prompts`, which are number `first` and following of their set.

        Returns uint8 (len(prompts), images, H, W, 3).
        """
        if way not in self._samplers:
            self._samplers[way] = self._sampler(way)
        sampler, shape = self._samplers[way], self.pipeline.latent_shape
        conditions = self.pipeline.encode_prompts(prompts)
        parts = []
        for start in range(0, len(prompts) * images, _BATCH):
            rows = np.minimum(np.arange(start, start + _BATCH), len(prompts) * images - 1)
            places = [divmod(int(row), images) for row in rows]
            names = [(self.seed, set_name, way.name, first + prompt) for prompt, _ in places]
            shared = way.eta > 0
            initial = [
                noise.generator("paint", *name, -1 if shared else image).standard_normal(shape, np.float32)
                for name, (_, image) in zip(names, places, strict=True)
            ]
            drawn = [
                noise.generator("steps", *name, image).standard_normal((way.num_steps, *shape), np.float32)
                for name, (_, image) in zip(names, places, strict=True)
            ]
            chain = sampler.sample(
                np.stack(initial),
                [array[[prompt for prompt, _ in places]] for array in conditions],
                np.ascontiguousarray(np.stack(drawn, axis=1)) if shared else None,
            )
            parts.append(to_uint8(self.pipeline.decode(chain.final).asnumpy()))
        pictures = np.concatenate(parts)[: len(prompts) * images]
        return pictures.reshape(len(prompts), images, *pictures.shape[1:])

    def _sampler(self, way: Way) -> Sampler:
        transition = make_transition("dance_sde", eta=way.eta) if way.eta > 0 else make_transition("ode")
        schedule = make_schedule("flow_match", way.num_steps)
        step = PolicyStep(self.pipeline.denoiser, transition)
        return Sampler(step, schedule, _BATCH, way.stochastic_steps)

    def paint_set(
        self, folder: Path, set_name: str, prompts: Sequence[str], images: dict[Way, int]
    ) -> dict[Way, np.ndarray]:
        """All pictures of a set, uint8 (len(prompts), images, H, W, 3) by way.

        Files of `PROMPTS_PER_FILE` prompts are written into `folder` whole and never painted twice, so an
        interrupted set goes on where it stopped.
        """
        folder.mkdir(parents=True, exist_ok=True)
        result = {}
        starts = range(0, len(prompts), PROMPTS_PER_FILE)
        with tqdm(total=len(starts) * len(images), desc=f"painting {set_name}", unit="file") as progress:
            for way, count in images.items():
                parts = []
                for start in starts:
                    file = folder / f"{set_name}_{way.name}_{start:05d}.npy"
                    if not file.is_file():
                        part = prompts[start : start + PROMPTS_PER_FILE]
                        _write_array(file, self.paint(way, set_name, start, part, count))
                    parts.append(np.load(file))
                    progress.update()
                result[way] = np.concatenate(parts)
        return result


def _write_array(file: Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomic(file, buffer.getvalue())
