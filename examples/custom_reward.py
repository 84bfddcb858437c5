r"""Two rewards of your own, each used from config alone:

    python tools/train_grpo.py --output runs/red \
        --set 'reward.terms=[{name: "examples/custom_reward.py:RednessReward", weight: 1.0}]'
    python tools/train_grpo.py --output runs/simple \
        --set 'reward.terms=[{name: "examples/custom_reward.py:jpeg_size", weight: -1.0, quality: 80}]'

Keys beside name, weight and label go to the constructor, or to the function.
"""

import io

import numpy as np
from PIL import Image

from dancegrpo.rewards import RewardCell


class RednessReward(RewardCell):
    """A reward that is a graph: how much redder than green and blue an image is, times `scale`.

    It does not look at the prompt, so it needs no `encode`; see `ClipScoreReward` for one that does.
    """

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def construct(self, images):  # (N, 3, H, W) float in [0, 1] -> (N,)
        means = images.mean((2, 3))  # (N, 3)
        return self.scale * (means[:, 0] - 0.5 * (means[:, 1] + means[:, 2]))


def jpeg_size(images, prompts, metadata=None, quality=95):
    """A reward on the host: kilobytes of the JPEG file of each uint8 image (N, H, W, 3). Rewards detail."""
    sizes = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        sizes.append(file.tell() / 1000)
    return np.array(sizes, np.float32)
