"""Advantages, losses, EMA, AdamW and a whole policy update against numbers from public implementations."""

import dataclasses

import numpy as np
import pytest

from dancegrpo.config import Config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from golden_cases import assert_near, golden  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

from dancegrpo.diffusion import PolicyStep, Sampler, Schedule, make_transition  # noqa: E402
from dancegrpo.rl.advantages import group_advantages, shuffle_in_groups  # noqa: E402
from dancegrpo.rl.clipping import ClipRange  # noqa: E402
from dancegrpo.rl.ema import DECAYS, ema_update, make_decay  # noqa: E402
from dancegrpo.rl.objectives import (  # noqa: E402
    clipped_surrogate,
    half_squared_log_ratio,
    kl_on_means,
    make_objective,
)
from dancegrpo.rl.optim import (  # noqa: E402
    ApplyGradients,
    FlatParameters,
    LossScale,
    make_adamw,
    make_learning_rate,
)
from dancegrpo.rl.trajectory import select_transitions  # noqa: E402
from dancegrpo.rl.update import PolicyUpdater, TransitionBatch  # noqa: E402


def train_config(**settings) -> Config:
    return dataclasses.replace(Config(), train=dataclasses.replace(Config().train, **settings))


class Surrogate(nn.Cell):
    def __init__(self, low, high, divisor=1.0):
        super().__init__()
        self.low, self.high, self.divisor = low, high, divisor

    def construct(self, new, old, advantages):
        return clipped_surrogate(new, old, advantages, self.low, self.high).mean() / self.divisor


class SurrogateWithKL(nn.Cell):
    def __init__(self, clip, beta):
        super().__init__()
        self.clip, self.beta = clip, beta

    def construct(self, mean, new, mean_reference, std, old, advantages):
        policy = clipped_surrogate(new, old, advantages, self.clip).mean()
        kl = kl_on_means(mean, mean_reference, std).mean()
        return policy + self.beta * kl, policy, kl


def test_group_advantages():
    case = golden("D_adv_group_sample_std")
    size = int(case["hp_group_size"])
    free = group_advantages(case["in_rewards"], size, clip=np.inf)
    clipped = group_advantages(case["in_rewards"], size, clip=float(case["hp_adv_clip_max"]))
    assert free.dtype == np.float32
    assert_near(free, case["out_advantages"], 1e-5)
    assert_near(clipped, case["out_advantages_clipped"], 1e-5)


def test_equal_rewards_give_no_advantage_in_float32():
    rewards = np.full(24, 0.3, np.float32)  # not representable: the mean of twelve differs from each of them
    rewards[12:] += np.arange(12, dtype=np.float32)
    advantages = group_advantages(rewards, 12)
    assert not advantages[:12].any()
    assert advantages[12:].all()
    assert abs(advantages[12:].std(ddof=1) - 1) < 1e-5
    for wrong in (np.ones(25), np.array([0.0, np.nan])):
        with pytest.raises(ValueError):
            group_advantages(wrong, 2 if wrong.size == 2 else 12)


def test_shuffled_control_keeps_groups():
    values = np.arange(12, dtype=np.float32)
    shuffled = shuffle_in_groups(values, 4, np.random.default_rng(0))
    assert not np.array_equal(shuffled, values)
    assert np.array_equal(np.sort(shuffled.reshape(3, 4), axis=1), values.reshape(3, 4))


def test_symmetric_clipped_surrogate():
    case = golden("E_clip_surrogate_symmetric")
    divisor = float(case["hp_grad_accum"] * case["hp_train_timesteps"])
    limit = case["hp_adv_clip_max"]
    old, advantages = Tensor(case["in_log_prob_old"]), Tensor(np.clip(case["in_advantages"], -limit, limit))
    for k, clip in enumerate(case["hp_clip_range"].tolist()):
        new = Tensor(case["in_log_prob_new"][k])
        loss, grad = ms.value_and_grad(Surrogate(clip, None, divisor), 0)(new, old, advantages)
        assert_near(loss, case["out_loss"][k], 1e-5)
        assert_near(grad, case["out_grad_log_prob_new"][k], 5e-5)
        assert np.array_equal(grad.asnumpy() == 0, case["out_grad_log_prob_new"][k] == 0)
        ends = (Tensor(end, ms.float32) for end in ClipRange(clip).bounds())
        same, ratio, clipped = make_objective("clipped_surrogate")(new, old, advantages, *ends)
        assert np.array_equal(same.mean().asnumpy() / np.float32(divisor), loss.asnumpy())
        assert_near(ratio, case["out_ratio"][k], 1e-5)
        assert_near(clipped.mean(), case["out_clip_fraction"][k], 1e-5)


def test_asymmetric_clipped_surrogate():
    case = golden("E_clip_surrogate_asymmetric")
    advantages = Tensor(np.clip(case["in_advantages"], *case["hp_adv_clip_low_high"]))
    for k, (low, high) in enumerate(case["hp_clip_low_high"].tolist()):
        loss, grad = ms.value_and_grad(Surrogate(low, high), 0)(
            Tensor(case["in_log_prob_new"][k]), Tensor(case["in_log_prob_old"]), advantages
        )
        assert_near(loss, case["out_loss"][k], 1e-5)
        assert_near(grad, case["out_grad_log_prob_new"][k], 5e-5)


def test_kl_on_means():
    case = golden("E_kl_mean_closed_form")
    limit = case["hp_adv_clip_max"]
    cell = SurrogateWithKL(float(case["hp_clip_range"]), float(case["hp_beta"]))
    (loss, policy, kl), (grad_mean, grad_new) = ms.value_and_grad(cell, (0, 1), has_aux=True)(
        *(
            Tensor(case[f"in_{name}"])
            for name in ("prev_mean", "log_prob_new", "prev_mean_ref", "std_dev_t", "log_prob_old")
        ),
        Tensor(np.clip(case["in_advantages"], -limit, limit)),
    )
    assert_near(loss, case["out_loss"], 1e-5)
    assert_near(policy, case["out_policy_loss"], 1e-5)
    assert_near(kl, case["out_kl"], 1e-5)
    assert_near(grad_mean, case["out_grad_prev_mean"], 5e-5)
    assert_near(grad_new, case["out_grad_log_prob_new"], 5e-5)
    half = half_squared_log_ratio(Tensor(case["in_log_prob_new"]), Tensor(case["in_log_prob_old"])).mean()
    assert_near(half, case["out_half_sq_logratio"], 1e-5)


def test_ema():
    case = golden("F_ema")
    for name in DECAYS.names():
        settings = {key.split("__")[1]: float(case[key]) for key in case if key.startswith(f"hp_{name}__")}
        decay_at = make_decay(name, **settings)
        assert_near([decay_at(step) for step in range(45)], case[f"out_schedule_{name}"], 1e-5)
    for name, kind in (("warmup", "power"), ("constant", "constant")):
        decay_at, average = make_decay(kind, decay=float(case["hp_decay"])), case["in_param0"]
        for step, value in enumerate(case["in_params"]):
            average = ema_update(average, value, np.float32(decay_at(step)))
            assert_near(average, case[f"out_ema_{name}"][step], 1e-5)


def test_adamw_with_global_norm_clipping():
    case = golden("adamw")
    parameters = [Parameter(Tensor(case[f"{name}0"].astype(np.float32)), name=name) for name in "wb"]
    flat = FlatParameters(parameters)
    train = train_config(
        learning_rate=float(case["lr"]),
        weight_decay=float(case["weight_decay"]),
        beta1=float(case["beta1"]),
        beta2=float(case["beta2"]),
        adam_epsilon=float(case["eps"]),
    ).train
    gradients = Parameter(Tensor(np.zeros(flat.size, np.float32)), name="gradients")
    average = Parameter(Tensor(flat.weights.asnumpy().copy()), name="average")
    apply = ApplyGradients(
        flat, make_adamw(flat, train, 6, 0), gradients, float(case["max_grad_norm"]), average
    )
    expected_average = flat.weights.asnumpy().copy()
    scale = 4.0  # of the loss: must not show
    for step in range(6):
        raw = np.concatenate([case[f"grad_{name}"][step].ravel() for name in "wb"]).astype(np.float32)
        gradients.set_data(Tensor(scale * raw))
        norm = float(case["grad_norm"][step])
        assert abs(np.linalg.norm(raw) - norm) < 1e-5 * norm
        rate = apply(Tensor(norm, ms.float32), Tensor(scale, ms.float32), Tensor(0.75, ms.float32))
        assert abs(float(rate) - train.learning_rate) < 1e-9
        for parameter in parameters:
            assert np.abs(parameter.asnumpy() - case[parameter.name][step]).max() < 1e-6
        expected_average = 0.75 * expected_average + 0.25 * flat.weights.asnumpy()
        assert_near(average, expected_average, 1e-6)


def test_learning_rate_schedules():
    def rates(name, warmup):
        schedule = make_learning_rate(name, 0.5, total_steps=10, warmup_steps=warmup)
        return np.array([float(schedule(Tensor([step], ms.int32))) for step in range(10)])

    warm = np.array([0.125, 0.21875, 0.3125, 0.40625])
    assert np.allclose(rates("constant", 0), 0.5)
    assert np.allclose(rates("constant", 4), [*warm, *[0.5] * 6])
    assert np.allclose(rates("linear", 4), [*warm, *(0.5 * np.arange(6, 0, -1) / 6)])
    assert np.allclose(rates("cosine", 4), [*warm, *(0.25 * (1 + np.cos(np.pi * np.arange(6) / 6)))])


def test_loss_scale():
    scale = LossScale.of("float16")
    assert scale.value == 65536 and LossScale.of("float32").value == 1
    scale.step(finite=False)
    assert scale.value == 32768
    for _ in range(scale.growth_interval):
        scale.step(finite=True)
    assert scale.value == 65536
    off = LossScale.of("float32")
    off.step(finite=False)
    assert off.value == 1


def test_selected_transitions():
    images, steps, per_image = 20, 8, 4
    chosen = select_transitions(np.arange(images), steps - 1, per_image, seed=3, iteration=5)
    assert chosen.shape == (images * per_image, 2)
    pairs = {tuple(pair) for pair in chosen.tolist()}
    assert len(pairs) == len(chosen)  # none twice
    assert np.array_equal(np.bincount(chosen[:, 0]), np.full(images, per_image))
    assert set(chosen[:, 1]) == set(range(steps - 1))  # every step but the last
    assert np.array_equal(
        chosen, select_transitions(np.arange(images), steps - 1, per_image, seed=3, iteration=5)
    )
    for seed, iteration in ((4, 5), (3, 6)):
        assert not np.array_equal(
            chosen, select_transitions(np.arange(images), steps - 1, per_image, seed, iteration)
        )
    # A candidate's steps do not depend on how many others there are.
    few = select_transitions(np.arange(2), steps - 1, per_image, seed=3, iteration=5)
    assert {tuple(pair) for pair in few.tolist()} <= pairs
    # "first" trains the noisiest steps of every image.
    first = select_transitions(
        np.arange(images), steps - 1, per_image, seed=3, iteration=5, selection="first"
    )
    assert sorted(map(tuple, first.tolist())) == [(i, k) for i in range(images) for k in range(per_image)]


class TinyPolicy(nn.Cell):
    """v(x, t) = tanh(x W + b t)."""

    def __init__(self, weight, bias):
        super().__init__()
        self.W = Parameter(Tensor(weight), name="W")
        self.b = Parameter(Tensor(bias), name="b")

    def construct(self, latents, timestep):
        time = (timestep / 1000.0).reshape((-1, 1, 1))
        return 2.0 * ops.sigmoid(2.0 * (ops.matmul(latents, self.W) + self.b * time)) - 1.0


def test_policy_update_end_to_end():
    case = golden("C_policy_update_end_to_end")
    policy = TinyPolicy(case["in_W0"], case["in_b0"])
    step = PolicyStep(policy, make_transition("dance_sde", eta=float(case["hp_eta"])))
    schedule = Schedule(case["hp_sigmas"], case["hp_timesteps_int"].astype(np.float32))
    images, steps = 8, 6
    chain = Sampler(step, schedule, images).sample(case["in_latents0"], (), case["in_noise"], keep=True)
    latents = np.stack([t.asnumpy() for t in chain.latents])
    log_probs = np.stack([t.asnumpy() for t in chain.log_probs])
    assert_near(latents.swapaxes(0, 1), case["out_all_latents"], 2e-5)
    assert_near(log_probs.T, case["out_all_log_probs"], 2e-5)
    assert_near(chain.final, case["out_final_pred_x0"], 2e-5)

    size = int(case["hp_group_size"])
    targets = np.repeat(case["in_target"], size, axis=0)
    rewards = -((chain.final.asnumpy() - targets) ** 2).mean(axis=(1, 2))
    assert_near(rewards, case["out_rewards"], 2e-5)
    advantages = group_advantages(rewards, size, clip=float(case["hp_adv_clip_max"]))
    assert_near(advantages, case["out_advantages"], 2e-5)

    config = train_config(
        learning_rate=float(case["hp_lr"]),
        weight_decay=float(case["hp_weight_decay"]),
        beta1=float(case["hp_betas"][0]),
        beta2=float(case["hp_betas"][1]),
        adam_epsilon=float(case["hp_adam_eps"]),
        max_grad_norm=float(case["hp_max_grad_norm"]),
        clip_range=(clip := float(case["hp_clip_range"])),
    )
    updater = PolicyUpdater(
        step,
        policy.trainable_params(),
        make_objective("clipped_surrogate"),
        config,
        images * (steps - 1),
    )
    for k in range(3):
        for i in range(steps - 1):  # gradients accumulate over the timesteps
            column = np.ones(images, np.float32)
            updater.accumulate(
                TransitionBatch(
                    latents[i],
                    latents[i + 1],
                    column * schedule.sigmas[i],
                    column * schedule.sigmas[i + 1],
                    column * schedule.timesteps[i],
                    log_probs[i],
                    advantages,
                    (),
                )
            )
        stats = updater.stats()
        gradients = updater.flat.split(updater.gradients.asnumpy())
        for name in "Wb":
            assert_near(gradients[name], case[f"out_grad_{name}"][k], 1e-3)
        assert abs(stats.policy_loss - case["out_loss"][k]) < 5e-6
        assert abs(stats.ratio_deviation - np.abs(case["out_ratio"][k] - 1).max()) < 2e-5
        assert abs(stats.ratio_mean - case["out_ratio"][k].mean()) < 2e-5
        assert abs(stats.clip_fraction - (np.abs(case["out_ratio"][k] - 1) > clip).mean()) < 1e-6
        assert abs(stats.grad_norm - case["out_grad_norm"][k]) < 1e-3 * case["out_grad_norm"][k]
        assert k or stats.ratio_deviation == 0.0
        updater.apply()
        assert_near(policy.W, case["out_W"][k], 1e-4)
        assert_near(policy.b, case["out_b"][k], 1e-4)
