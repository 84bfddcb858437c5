"""What each stage minimises."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from dancegrpo.models.autoencoder import PatchAutoencoder
from dancegrpo.models.clip import CLIPModel
from dancegrpo.models.flux import FluxTransformer2DModel


class AutoencoderLoss(nn.Cell):
    """Mean squared error of the reconstruction + kl_weight * KL(q || N(0, 1)), both means per element."""

    def __init__(self, model: PatchAutoencoder, kl_weight: float):
        super().__init__()
        self.model = model
        self.kl_weight = kl_weight

    def construct(self, pixels: Tensor, noise: Tensor) -> Tensor:
        mean, logvar = self.model.encode(pixels)
        reconstruction = self.model.decode(mean + ops.exp(0.5 * logvar) * noise)
        kl = 0.5 * (mean * mean + ops.exp(logvar) - 1.0 - logvar).mean()
        difference = reconstruction - pixels
        return (difference * difference).mean() + self.kl_weight * kl


class ClipLoss(nn.Cell):
    """Symmetric contrastive loss (Radford et al., 2021) with one near-miss caption an image.

    Image to text chooses among the captions of the batch and their near misses, text to image among the images.
    The temperature is fixed (`logit_scale` is not trained). `excluded` (B, 2B) is large where a caption that is
    not the image's own is true of it all the same.
    """

    def __init__(self, model: CLIPModel):
        super().__init__()
        self.model = model

    def construct(self, pixels: Tensor, ids: Tensor, excluded: Tensor) -> Tensor:
        image = self.model.get_image_features(self.model.preprocess(pixels))
        text = self.model.get_text_features(ids)
        logits = ops.exp(self.model.logit_scale) * ops.matmul(image, text.transpose((1, 0))) - excluded
        batch = pixels.shape[0]
        own = logits[:, :batch]
        target = ops.eye(batch, batch, ms.float32)
        to_text = -(target * (own - ops.logsumexp(logits, 1, True))).sum()
        to_image = -(target * (own - ops.logsumexp(own, 0, True))).sum()
        return 0.5 * (to_text + to_image) / batch


class JudgeLoss(nn.Cell):
    """Weighted binary cross entropy over pairs of pictures and captions (SigLIP: Zhai et al., 2023).

    The logit of "this caption is true of this picture" is (cosine - threshold) / temperature with both constants
    fixed, so that the cosine alone stays the score.
    """

    def __init__(self, model: CLIPModel, threshold: float, temperature: float):
        super().__init__()
        self.model = model
        self.threshold, self.slope = threshold, 1.0 / temperature

    def construct(self, pixels: Tensor, ids: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """pixels (N, 3, H, W), ids (M, L), target (N, M) in [0, 1], weight (N, M) with sum 1."""
        image = self.model.get_image_features(self.model.preprocess(pixels))
        text = self.model.get_text_features(ids)
        logits = (ops.matmul(image, text.transpose((1, 0))) - self.threshold) * self.slope
        entropy = ops.relu(logits) + ops.log1p(ops.exp(-ops.abs(logits))) - target * logits
        return (weight * entropy).sum()


class FlowLoss(nn.Cell):
    """Rectified flow (Liu et al., 2022): mean squared error of the velocity eps - x0 at x = (1-s) x0 + s eps."""

    def __init__(self, model: FluxTransformer2DModel, img_ids: Tensor, txt_ids: Tensor):
        super().__init__()
        self.model = model
        self.img_ids, self.txt_ids = img_ids, txt_ids

    def construct(
        self, x0: Tensor, noise: Tensor, sigma: Tensor, prompt_embeds: Tensor, pooled: Tensor
    ) -> Tensor:
        s = sigma.reshape((-1, 1, 1))
        velocity = self.model(
            (1.0 - s) * x0 + s * noise, prompt_embeds, pooled, sigma, self.img_ids, self.txt_ids
        )[0]
        difference = velocity - (noise - x0)
        return (difference * difference).mean()
