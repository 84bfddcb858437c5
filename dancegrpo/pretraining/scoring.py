"""What a CLIP says of pictures and captions, and the held-out figures that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.data.shapes_world import hard_negative, sample_batch
from dancegrpo.models.clip import CLIPModel
from dancegrpo.models.tokenizers import TextTokenizer
from dancegrpo.runtime import noise
from dancegrpo.runtime.batching import run_batched

PairScore = Callable[[np.ndarray, Sequence[str]], np.ndarray]
_BATCH = 96
_HELD_OUT = 2 * 10**9  # number of the first held-out sample


def to_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, 3) to float32 (N, 3, H, W) in [0, 1]."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).astype(np.float32) / 255.0


class _Cosine(nn.Cell):
    def __init__(self, model: CLIPModel):
        super().__init__()
        self.model = model

    def construct(self, pixels: Tensor, ids: Tensor) -> Tensor:
        image = self.model.get_image_features(self.model.preprocess(pixels))
        return (image * self.model.get_text_features(ids)).sum(-1)


def pair_score(model: CLIPModel, tokenizer: TextTokenizer) -> PairScore:
    """A function of pictures uint8 (N, H, W, 3) and N captions: their cosines, float32 (N,)."""
    cosine = _Cosine(model)

    def score(images: np.ndarray, captions: Sequence[str]) -> np.ndarray:
        arrays = (images, tokenizer(list(captions)))
        return run_batched(lambda x, ids: cosine(Tensor(to_pixels(x)), Tensor(ids)), arrays, _BATCH)

    return score


def near_miss_accuracy(score: PairScore, seed: int) -> dict[str, float]:
    """Share of held-out validation pictures that score their caption above a near miss of it, per category."""
    images, captions, scenes = sample_batch(seed, _HELD_OUT, 960, split="validation")
    rng = noise.generator("clip-validation", seed)
    misses = [hard_negative(scene, rng) for scene in scenes]
    better = score(images, captions) > score(images, misses)
    categories = np.array([scene.category for scene in scenes])
    return {
        f"near_miss_accuracy/{category}": round(float(better[categories == category].mean()), 4)
        for category in sorted(set(categories))
    }


def within_prompt_auc(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How well scores tell right from wrong pictures of one prompt: float (P,) from (P, K) and bool (P, K).

    The share of pairs of a right and a wrong picture in which the right one scores higher, ties half; 0.5 is
    guessing. NaN for a prompt whose pictures are all right or all wrong.
    """
    higher = scores[:, :, None] - scores[:, None, :]
    pairs = right[:, :, None] & ~right[:, None, :]
    won = np.where(pairs, (higher > 0) + 0.5 * (higher == 0), 0.0).sum((1, 2))
    return np.where(pairs.any((1, 2)), won / np.maximum(pairs.sum((1, 2)), 1), np.nan)
