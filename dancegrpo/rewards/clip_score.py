"""CLIP score: how close an image lies to its prompt in the common space of an image and a text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, load_tokenizer
from dancegrpo.models.preprocess import to_square
from dancegrpo.rewards.cell import RewardCell
from dancegrpo.runtime.batching import run_batched

SHIPPED = "small-flux"
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_TEXTS_PER_CALL = 16


class ClipScoreReward(RewardCell):
    """Cosine similarity of image and prompt (Radford et al., 2021; as a metric: Hessel et al., "CLIPScore",
    EMNLP 2021, there clipped at 0 and scaled by 2.5).

    construct: images (N, 3, H, W) float in [0, 1], of any size, and text features (N, D) of unit length to (N,)
    float32 in [-scale, scale].
    """

    def __init__(self, model: str = SHIPPED, scale: float = 1.0):
        """
        Args:
            model: `small-flux` for the small CLIP that is shipped, or a folder with a CLIPModel (config.json,
                safetensors, tokenizer files), or a folder that holds such a folder as `reward_clip`.
            scale: factor on the similarity.

        Raises:
            ConfigError: no CLIP there, or a negative scale.
        """
        super().__init__()
        if scale <= 0:
            raise ConfigError(f"reward.terms: clip_score: scale must be above 0, not {scale}.")
        folder = _find_folder(model)
        self.folder = str(folder)
        _tokenizer(self.folder)  # what is wrong with it shall show now
        self.towers = _Towers(load_model(folder))
        self.scale = float(scale)
        for parameter in self.get_parameters():
            parameter.requires_grad = False

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor]:
        """Text features (len(prompts), D), in calls of one fixed shape."""
        ids = _tokenizer(self.folder)(list(prompts))
        return (Tensor(run_batched(lambda rows: self.towers(Tensor(rows)), [ids], _TEXTS_PER_CALL)),)

    def image_features(self, images: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1] to features (N, D) of unit length; for use inside a graph."""
        return self.towers.image_features(images)

    def construct(self, images: Tensor, text_features: Tensor) -> Tensor:
        return self.scale * (self.image_features(images) * text_features).sum(-1)


class _Towers(nn.Cell):
    """CLIP with its text tower as the graph; the image tower is reached as a method."""

    def __init__(self, clip: nn.Cell):
        super().__init__()
        self.clip = clip
        self.set_train(False)

    def image_features(self, images: Tensor) -> Tensor:
        square = to_square(images, self.clip.config.vision_config.image_size)
        return self.clip.get_image_features(self.clip.preprocess(square))

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.clip.get_text_features(input_ids)


class ClipImageFeatures(nn.Cell):
    """The image tower of a `ClipScoreReward` as a graph of its own: images to features of unit length."""

    def __init__(self, reward: ClipScoreReward):
        super().__init__(auto_prefix=False)  # the parameters keep the names that they have in the reward
        self.towers = reward.towers
        self.set_train(False)

    def construct(self, images: Tensor) -> Tensor:
        return self.towers.image_features(images)


# Not an attribute of the cell: the compile cache only keeps graphs of cells whose content it can tell.
_tokenizer = cache(load_tokenizer)


def _find_folder(model: str) -> Path:
    folder = _ASSETS / SHIPPED if model == SHIPPED else Path(model)
    for candidate in (folder / "reward_clip", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigError(
        f"reward.terms: clip_score: there is no CLIP model (config.json) in {folder}; "
        f"model is a folder with one, or {SHIPPED!r} for the one that is shipped"
    )
