"""The same work as `torch_flux`, as a plain loop that shares none of its code but the loading of the model.

It is the control of the `iteration` benchmark: run alone, in a fresh process, it must be as fast as the
contender of the same batch was between its neighbours. If it is not, the benchmark slows PyTorch down.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from dancegrpo.diagnostics.iteration import TorchSetting
from dancegrpo.diagnostics.torch_flux import image_ids, load_flux, make_adamw


class PlainLoop:
    """Runs the loop; for `workers.Worker`."""

    def __init__(self, setting: TorchSetting) -> None:
        torch.set_num_threads(setting.threads)
        self.setting, self.model = setting, load_flux(setting.folder)
        self.optimizer = make_adamw(self.model, setting.config)
        with np.load(setting.reference) as file:
            self.data = {name: torch.from_numpy(array) for name, array in file.items() if array.ndim}

    def run(self) -> float:
        """Seconds of one iteration."""
        data, config, model, batch = self.data, self.setting.config, self.model, self.setting.batch
        eta, clip, group = config.sampler.eta, config.train.clip_range, config.train.candidates
        sigmas, scale = data["sigmas"], self.setting.guidance_scale
        count, (tokens, channels) = data["latents"].shape[1], data["latents"].shape[2:]
        fixed = {
            "img_ids": image_ids(tokens),
            "txt_ids": torch.zeros(data["conditions_0"].shape[1], 3),
            "return_dict": False,
        }

        def predict(x, t, images):
            prompts = images // group
            return model(
                x, data["conditions_0"][prompts], data["conditions_1"][prompts], t / 1000.0,
                guidance=None if scale is None else torch.full_like(t, scale), **fixed,
            )[0]  # fmt: skip

        def gaussian(x, v, s, s_next):
            dt, eps = s_next - s, x + (1 - s) * v  # v = eps - x0, so eps = x + (1 - sigma) v
            return x + v * dt + eta * eta / 2 * (eps / s) * dt, eta * (-dt) ** 0.5

        def density(x, mean, std):
            return torch.distributions.Normal(mean, std).log_prob(x).mean((1, 2))

        start = time.perf_counter()
        states = torch.empty(len(sigmas), count, tokens, channels)
        old = torch.empty(len(sigmas) - 1, count)
        with torch.inference_mode():
            for images in torch.arange(count).split(batch):
                x = torch.randn(batch, tokens, channels)
                states[0, images] = x
                for i in range(len(sigmas) - 1):
                    t = torch.full((batch,), float(data["timesteps"][i]))
                    mean, std = gaussian(x, predict(x, t, images), sigmas[i], sigmas[i + 1])
                    x = mean + std * torch.randn_like(mean)
                    states[i + 1, images], old[i, images] = x, density(x, mean, std)
        for update in data["chosen"].chunk(config.train.updates_per_rollout):
            model.zero_grad()
            for rows in update.split(batch):
                images, i = rows.unbind(1)
                x, s, s_next = states[i, images], sigmas[i, None, None], sigmas[i + 1, None, None]
                mean, std = gaussian(x, predict(x, data["timesteps"][i], images), s, s_next)
                ratio = (density(states[i + 1, images], mean, std) - old[i, images]).exp()
                gain = data["advantages"][images]
                worst = torch.min(gain * ratio, gain * ratio.clip(1 - clip, 1 + clip))
                (-worst.sum() / len(update)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
            self.optimizer.step()
        return time.perf_counter() - start
