"""The first three stages: autoencoder, CLIP, FLUX. Each needs what the earlier ones exported."""

import dataclasses
import math
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from dancegrpo.data.shapes_world import Scene, hard_negative, sample_batch, vocabulary
from dancegrpo.models import load_model, load_tokenizer, save_model
from dancegrpo.models.autoencoder import PatchAutoencoder, PatchAutoencoderConfig
from dancegrpo.models.clip import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, CLIPVisionConfig
from dancegrpo.models.flux import FluxConfig, FluxTransformer2DModel
from dancegrpo.models.saving import parameter_arrays
from dancegrpo.models.tokenizers import save_word_tokenizer
from dancegrpo.pipelines.latents import image_ids, pack_latents
from dancegrpo.pretraining.loop import Stage
from dancegrpo.pretraining.losses import AutoencoderLoss, ClipLoss, FlowLoss
from dancegrpo.pretraining.recipe import Recipe
from dancegrpo.pretraining.scoring import near_miss_accuracy, pair_score, to_pixels
from dancegrpo.runtime import noise
from dancegrpo.runtime.batching import run_batched

SHIPPED_DTYPE = "float16"
_LATENT_SAMPLES = 2048  # images over which the latent statistics are taken


def _initialize(cell: nn.Cell, seed: int, name: str) -> None:
    """Redraw every random weight from the run's own noise source: MindSpore's initialisers use a global state."""
    for parameter in cell.trainable_params():
        array = parameter.asnumpy()
        if array.ndim > 1:
            fan_in = int(np.prod(array.shape[1:])) if "embedding" not in parameter.name else 2500
            draw = noise.generator("weights", seed, name, parameter.name).standard_normal(
                array.shape, np.float32
            )
            parameter.set_data(Tensor(draw / math.sqrt(fan_in)))


class AutoencoderStage(Stage):
    """Trains the autoencoder, then measures the shift and scale that make its latents about unit size."""

    name = "vae"

    def __init__(self, recipe: Recipe, assets: Path):
        self.recipe, self.seed = recipe.vae, recipe.run.seed
        config = PatchAutoencoderConfig(
            encoder_width=self.recipe.encoder_width,
            decoder_width=self.recipe.decoder_width,
            decoder_bottleneck=self.recipe.decoder_bottleneck,
            decoder_blocks=self.recipe.decoder_blocks,
        )
        self.model = PatchAutoencoder(config)
        _initialize(self.model, self.seed, self.name)
        self.loss = AutoencoderLoss(self.model, self.recipe.kl_weight)
        self.latent_shape = (config.latent_channels, self.model.grid, self.model.grid)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        count = self.recipe.batch_size
        images, _, _ = sample_batch(self.seed, step * count, count)
        draw = noise.generator("vae", self.seed, step).standard_normal(
            (count, *self.latent_shape), np.float32
        )
        return to_pixels(images) * 2.0 - 1.0, draw

    def export(self, folder: Path) -> dict:
        images, _, _ = sample_batch(self.seed, 10**8, _LATENT_SAMPLES)
        pixels = to_pixels(images) * 2.0 - 1.0
        encode = _Encode(self.model)
        latents = run_batched(lambda x: encode(Tensor(x)), (pixels,), 64)
        shift, scale = float(latents.mean()), float(1.0 / latents.std())
        self.model.config = dataclasses.replace(
            self.model.config, scaling_factor=round(scale, 4), shift_factor=round(shift, 4)
        )
        decoded = run_batched(lambda x: self.model(Tensor(x))[0], (pixels[:512],), 64)
        error = np.mean((np.clip(decoded, -1, 1) - pixels[:512]) ** 2) / 4.0
        save_model(self.model, folder / "vae", dtype=SHIPPED_DTYPE)
        return {"psnr_db": round(float(-10.0 * np.log10(error)), 2)}


class _Encode(nn.Cell):
    """Mean latents as a graph of their own."""

    def __init__(self, vae: PatchAutoencoder):
        super().__init__()
        self.vae = vae

    def construct(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels)[0]


class ClipStage(Stage):
    """Trains CLIP; its text tower becomes the pipeline's text encoder, both towers the reward."""

    name = "clip"

    def __init__(self, recipe: Recipe, assets: Path):
        self.recipe, self.seed = recipe.clip, recipe.run.seed
        save_word_tokenizer(vocabulary(), self.recipe.context, assets / "tokenizer")
        self.tokenizer = load_tokenizer(assets / "tokenizer")
        width, end = self.recipe.width, len(vocabulary()) + 2
        text = CLIPTextConfig(
            end + 1,
            width,
            4 * width,
            self.recipe.text_layers,
            self.recipe.heads,
            self.recipe.context,
            "gelu_pytorch_tanh",
            1e-5,
            1,
            end,
            end,
        )
        vision = CLIPVisionConfig(
            width,
            4 * width,
            self.recipe.vision_layers,
            self.recipe.heads,
            3,
            64,
            self.recipe.patch_size,
            "gelu_pytorch_tanh",
        )
        self.model = CLIPModel(CLIPConfig(text, vision, width, math.log(1.0 / self.recipe.temperature)))
        self.model.logit_scale.requires_grad = False
        _initialize(self.model, self.seed, self.name)
        self.loss = ClipLoss(self.model)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        count = self.recipe.batch_size
        images, captions, scenes = sample_batch(self.seed, 10**9 + step * count, count)
        rng = noise.generator("clip", self.seed, step)
        ids = self.tokenizer(captions + [hard_negative(scene, rng) for scene in scenes])
        return to_pixels(images), ids, 1e4 * _also_true(scenes, count)

    def export(self, folder: Path) -> dict:
        save_model(self.model, folder / "reward_clip", dtype=SHIPPED_DTYPE)
        save_word_tokenizer(vocabulary(), self.recipe.context, folder / "reward_clip")
        text = CLIPTextModel(self.model.config.text_config)
        arrays = {
            name: array
            for name, array in parameter_arrays(self.model).items()
            if name.startswith("text_model.")
        }
        save_model(text, folder / "text_encoder", dtype=SHIPPED_DTYPE, weights=arrays)
        return near_miss_accuracy(pair_score(self.model, self.tokenizer), self.seed)


def _may_both_hold(a: Scene, b: Scene) -> bool:
    """Whether a picture of scene `a` may satisfy caption `b` too (objects alike, nothing contradicted)."""
    if a.relation and b.relation and (a.relation, a.objects) != (b.relation, b.objects):
        opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
        same_order = [o.shape for o in a.objects] == [o.shape for o in b.objects]
        if (a.relation if same_order else opposite[a.relation]) != b.relation:
            return False
    colors = {o.shape: o.color for o in b.objects}
    return all(o.color is None or colors[o.shape] in (None, o.color) for o in a.objects)


def _also_true(scenes: list[Scene], count: int) -> np.ndarray:
    """float32 (count, 2 count), 1 where the caption of another scene may be true of this scene's picture.

    The near misses (second half) are false of their own picture by construction; those of other scenes are
    hardly ever true of it and are left in.
    """
    keys = [tuple(sorted((o.shape, o.count) for o in scene.objects)) for scene in scenes]
    mask = np.zeros((count, 2 * count), np.float32)
    for i in range(count):
        for j in range(count):
            if i != j and keys[i] == keys[j] and _may_both_hold(scenes[i], scenes[j]):
                mask[i, j] = 1.0
    return mask


class FlowStage(Stage):
    """Trains the FLUX transformer on latents of rendered pictures."""

    name = "flow"

    def __init__(self, recipe: Recipe, assets: Path):
        self.recipe, self.seed = recipe.flow, recipe.run.seed
        vae, text = load_model(assets / "vae"), load_model(assets / "text_encoder")
        self.encode, self.text = _Encode(vae), text
        self.shift, self.scale = vae.config.shift_factor, vae.config.scaling_factor
        self.tokenizer = load_tokenizer(assets / "tokenizer")
        channels = 4 * vae.config.latent_channels
        width = text.config.hidden_size
        config = FluxConfig(
            in_channels=channels,
            num_layers=self.recipe.double_layers,
            num_single_layers=self.recipe.single_layers,
            attention_head_dim=self.recipe.head_dim,
            num_attention_heads=self.recipe.heads,
            joint_attention_dim=width,
            pooled_projection_dim=width,
            axes_dims_rope=_rotary_axes(self.recipe.head_dim),
        )
        self.model = FluxTransformer2DModel(config)
        _initialize(self.model, self.seed, self.name)
        _zero_gates(self.model)
        grid = vae.grid // 2
        self.loss = FlowLoss(
            self.model,
            Tensor(image_ids(grid, grid)),
            Tensor(np.zeros((self.tokenizer.context, 3), np.float32)),
        )
        self.shape = (grid * grid, channels)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        count = self.recipe.batch_size
        images, captions, _ = sample_batch(self.seed, 3 * 10**9 + step * count, count)
        latents = self.encode(Tensor(to_pixels(images) * 2.0 - 1.0)).asnumpy()
        states, pooled = self.text(Tensor(self.tokenizer(captions)))
        rng = noise.generator("flow", self.seed, step)
        draw = rng.standard_normal((count, *self.shape), np.float32)
        # Logit-normal times (Esser et al., 2024): most practice where the picture is decided.
        sigma = 1.0 / (1.0 + np.exp(-rng.standard_normal(count)))
        return (
            pack_latents((latents - self.shift) * self.scale),
            draw,
            sigma.astype(np.float32),
            states.asnumpy(),
            pooled.asnumpy(),
        )

    def export(self, folder: Path) -> dict:
        save_model(self.model, folder / "transformer", dtype=SHIPPED_DTYPE)
        return {"parameters": int(sum(p.size for p in self.model.get_parameters()))}


def _rotary_axes(head_dim: int) -> tuple[int, int, int]:
    """A quarter of the head for FLUX's first axis, three eighths each for row and column."""
    return head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8


def _zero_gates(model: FluxTransformer2DModel) -> None:
    """Start from the identity (adaLN-Zero, Peebles and Xie, 2023): modulations and the last layer are zero."""
    for name, parameter in model.parameters_and_names():
        if ".linear.weight" in name and "norm" in name or name == "proj_out.weight":
            parameter.set_data(Tensor(np.zeros(parameter.shape, np.float32), ms.float32))
