"""Pictures of a run's progress: the same prompts and the same noise every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dancegrpo.config import Config
from dancegrpo.data import PromptSet
from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest
from dancegrpo.runtime.images import make_grid

if TYPE_CHECKING:
    from dancegrpo.pipelines import Pipeline

_COLUMNS = 4


class SampleGrid:
    """Images of a few fixed prompts from fixed noise, so that grids of different iterations compare."""

    def __init__(self, config: Config, pipeline: Pipeline, prompt_set: PromptSet) -> None:
        count = min(config.output.sample_prompts, len(prompt_set.prompts))
        rows = np.linspace(0, len(prompt_set.prompts) - 1, count).astype(int)
        self.prompts = [prompt_set.prompts[row] for row in rows]
        self.seed = config.train.seed
        self._requests = [ImageRequest(prompt, index) for index, prompt in enumerate(self.prompts)]
        self._generator = ImageGenerator(
            pipeline, num_steps=config.evaluation.num_steps, batch=count, shift=config.sampler.shift
        )

    def images(self) -> np.ndarray:
        """Uint8 (n, H, W, 3), with the weights that the model has now."""
        return self._generator.images(self._requests, self.seed)

    def grid(self, images: np.ndarray) -> Image.Image:
        """The picture of them, with captions."""
        return make_grid(images, _COLUMNS, self.prompts)
