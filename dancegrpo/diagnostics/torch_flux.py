"""The other side of the `iteration` benchmark: the same work in PyTorch, on the FLUX of diffusers.

Written as one would write it in PyTorch: diffusers' own modules, inference mode in the rollout, tensors that
stay where they are. The public trainer of DanceGRPO runs both halves at batch 1 and accumulates gradients.
This module needs the extra `parity`, and never loads MindSpore.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import numpy as np
import torch

warnings.filterwarnings("ignore", module=r"(diffusers|torch)(\.|$)")  # about CUDA, and about tracing
from diffusers import FluxTransformer2DModel  # noqa: E402

from dancegrpo.config import Config, derive_counts  # noqa: E402
from dancegrpo.diagnostics.iteration import TorchSetting  # noqa: E402


def load_flux(folder: str) -> FluxTransformer2DModel:
    """diffusers' transformer with the weights of `folder`, in float32, in training mode."""
    model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32, low_cpu_mem_usage=False)
    return model.train()


def image_ids(tokens: int) -> torch.Tensor:
    """Positions (tokens, 3) of a square grid of image tokens: 0, row, column."""
    side = math.isqrt(tokens)
    ids = torch.zeros(side, side, 3)
    ids[..., 1] += torch.arange(side)[:, None]
    ids[..., 2] += torch.arange(side)[None, :]
    return ids.reshape(tokens, 3)


def make_adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """PyTorch's AdamW with the config's settings."""
    train = config.train
    return torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
    )


def sde_step(velocity, sample, sigma, sigma_next, eta, following=None):
    """DanceGRPO's `flux_step`: the next latents (drawn, or `following`) and their mean log-probability.

    velocity, sample: (B, S, C). sigma, sigma_next: (B, 1, 1) or (). Returns (B, S, C) and (B,).
    """
    dt = sigma_next - sigma
    pred_x0 = sample - sigma * velocity
    score = -(sample - (1.0 - sigma) * pred_x0) / sigma**2
    mean = sample + velocity * dt - 0.5 * eta**2 * score * dt
    std = eta * torch.sqrt(-dt)
    if following is None:
        following = mean + std * torch.randn_like(mean)
    log_prob = (
        -((following.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    )
    return following, log_prob.mean(dim=(1, 2))


class TorchIteration:
    """An iteration in PyTorch; for `workers.Worker`."""

    def __init__(self, setting: TorchSetting) -> None:
        torch.set_num_threads(setting.threads)
        torch.manual_seed(setting.config.train.seed)
        self.setting, self.config = setting, setting.config
        self.counts, self.batch = derive_counts(setting.config), setting.batch
        with np.load(setting.reference) as file:
            self.reference = dict(file)
        self.model = load_flux(setting.folder)
        self.forward = torch.compile(self.model, dynamic=False) if setting.compiled else self.model
        self.optimizer = make_adamw(self.model, self.config)
        tensor = {name: torch.from_numpy(array) for name, array in self.reference.items() if array.ndim}
        self.sigmas, self.timesteps = tensor["sigmas"], tensor["timesteps"]
        self.advantages, self.chosen = tensor["advantages"], tensor["chosen"]
        self.tokens, self.channels = self.reference["latents"].shape[2:]
        # Repeated for each image once: the rollout then only takes slices.
        prompt = torch.arange(self.counts.images) // self.counts.candidates
        self.text, self.pooled = tensor["conditions_0"][prompt], tensor["conditions_1"][prompt]
        self.img_ids, self.txt_ids = image_ids(self.tokens), torch.zeros(self.text.shape[1], 3)

    def velocity(self, latents, timestep, images):
        """(B, S, C) of the model at latents (B, S, C), timestep (B,) = 1000 sigma, for images (slice or (B,))."""
        guidance = None
        if self.setting.guidance_scale is not None:
            guidance = torch.full_like(timestep, self.setting.guidance_scale)
        return self.forward(
            hidden_states=latents,
            encoder_hidden_states=self.text[images],
            pooled_projections=self.pooled[images],
            timestep=timestep / 1000,
            img_ids=self.img_ids,
            txt_ids=self.txt_ids,
            guidance=guidance,
            return_dict=False,
        )[0]

    # ---- what is measured

    def run(self) -> float:
        """Seconds of one iteration."""
        start = time.perf_counter()
        latents, log_probs = self.rollout()
        self.update(latents, log_probs)
        return time.perf_counter() - start

    @torch.inference_mode()
    def rollout(self):
        """Latents (T+1, N, S, C) and log-probabilities (T, N) of all images, chain after chain."""
        shape = (self.counts.images, self.tokens, self.channels)
        initial = torch.randn(shape)
        if self.config.train.shared_noise:
            group = torch.arange(self.counts.images) // self.counts.candidates * self.counts.candidates
            initial = initial[group]
        chains, scores = [], []
        for start in range(0, self.counts.images, self.batch):
            part = slice(start, start + self.batch)
            kept, log_probs = [initial[part]], []
            for step in range(self.counts.steps):
                timestep = self.timesteps[step].expand(self.batch)
                following, log_prob = sde_step(
                    self.velocity(kept[-1], timestep, part),
                    kept[-1],
                    self.sigmas[step],
                    self.sigmas[step + 1],
                    self.config.sampler.eta,
                )
                kept.append(following)
                log_probs.append(log_prob)
            chains.append(torch.stack(kept))
            scores.append(torch.stack(log_probs))
        return torch.cat(chains, dim=1), torch.cat(scores, dim=1)

    def update(self, latents, log_probs) -> None:
        """All optimizer steps of the iteration."""
        for number in range(self.counts.updates):
            self._step(latents, log_probs, number)

    def _step(self, latents, log_probs, number: int) -> tuple[float, float]:
        """One optimizer step; returns loss and gradient norm."""
        size = self.counts.transitions_per_update
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in self.chosen[number * size : (number + 1) * size].split(self.batch):
            image, step = rows[:, 0], rows[:, 1]
            new = self._score(latents[step, image], latents[step + 1, image], image, step)
            ratio = torch.exp(new - log_probs[step, image])
            advantages, clip = self.advantages[image], self.config.train.clip_range
            clipped = torch.clamp(ratio, 1.0 - clip, 1.0 + clip)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped).sum() / size
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.max_grad_norm)
        self.optimizer.step()
        return total, norm.item()

    def _score(self, sample, following, image, step):
        sigma, sigma_next = self.sigmas[step][:, None, None], self.sigmas[step + 1][:, None, None]
        velocity = self.velocity(sample, self.timesteps[step], image)
        return sde_step(velocity, sample, sigma, sigma_next, self.config.sampler.eta, following)[1]

    # ---- what is checked

    def check(self) -> dict[str, float]:
        """How far this contender is from the reference, on the reference's inputs.

        `velocity` and `log_prob`: largest absolute differences, over a rollout; `loss`, `grad_norm` and
        `update_norm`: relative, of the first update. Changes the weights by that update, as the reference did.
        """
        want = self.reference
        latents = torch.from_numpy(want["latents"])
        found = {"velocity": 0.0, "log_prob": 0.0}
        with torch.inference_mode():
            for step in range(self.counts.steps):
                for start in range(0, self.counts.images, self.batch):
                    image = torch.arange(start, start + self.batch)
                    steps = torch.full_like(image, step)
                    new = self._score(latents[step, image], latents[step + 1, image], image, steps)
                    error = np.abs(new.numpy() - want["log_probs"][step, image.numpy()]).max()
                    found["log_prob"] = max(found["log_prob"], float(error))
                for start in range(0, want["velocities"].shape[1], self.batch):
                    image = torch.arange(start, start + self.batch)
                    timestep = self.timesteps[step].expand(self.batch)
                    velocity = self.velocity(latents[step, image], timestep, image)
                    error = np.abs(velocity.numpy() - want["velocities"][step, image.numpy()]).max()
                    found["velocity"] = max(found["velocity"], float(error))
        before = self._weights()
        loss, norm = self._step(latents, torch.from_numpy(want["old_log_probs"]), 0)
        moved = (self._weights() - before).double().norm().item()
        for name, value in (("loss", loss), ("grad_norm", norm), ("update_norm", moved)):
            expected = float(want[name])
            found[name] = abs(value - expected) / abs(expected)
        return found

    def _weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def facts(self) -> dict[str, Any]:
        """Versions and the threads that PyTorch says it uses."""
        import diffusers
        import transformers

        versions = {module.__name__: module.__version__ for module in (torch, diffusers, transformers)}
        return {"versions": versions, "threads": torch.get_num_threads()}
