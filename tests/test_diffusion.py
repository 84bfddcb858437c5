"""Schedules, transitions and the sampler against numbers from public implementations (tests/golden)."""

import numpy as np
import pytest

from dancegrpo.config import ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from golden_cases import ToyDenoiser, WeightedLogProb, assert_near, golden  # noqa: E402
from mindspore import Tensor  # noqa: E402

from dancegrpo.diffusion import PolicyStep, Sampler, Schedule, make_schedule, make_transition  # noqa: E402
from dancegrpo.diffusion.schedules import timesteps_of  # noqa: E402


def toy_sampler(case, transition, timesteps):
    step = PolicyStep(ToyDenoiser(case["hp_toy_a"], case["hp_toy_b"]), transition)
    schedule = Schedule(case["hp_sigmas"], timesteps.astype(np.float32))
    return Sampler(step, schedule, len(case["in_latents0"]))


def stacked(tensors):
    return np.stack([t.asnumpy() for t in tensors], axis=1)


def test_runs_in_graph_mode():
    assert ms.get_context("mode") == ms.GRAPH_MODE


def test_flow_match_schedule():
    case = golden("A_sigma_shift_linspace")
    for k, (steps, shift) in enumerate(zip(case["hp_num_steps"], case["hp_shift"], strict=True)):
        schedule = make_schedule("flow_match", int(steps), shift=float(shift))
        sigmas, integers = case[f"out_sigmas_{k:02d}"], case[f"out_timesteps_int_{k:02d}"]
        assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float32
        assert_near(schedule.sigmas, sigmas, 1e-5)
        assert_near(schedule.timesteps, 1000 * sigmas[:-1], 1e-5)
        assert np.array_equal(timesteps_of(sigmas[:-1], truncate=True), integers)
        truncated = make_schedule("flow_match", int(steps), shift=float(shift), truncate_timesteps=True)
        assert np.abs(truncated.timesteps - integers).max() <= 1


def test_unknown_names_and_settings_are_config_errors():
    with pytest.raises(ConfigError, match="flow_match"):
        make_schedule("flow_mach", 4)
    with pytest.raises(ConfigError, match="did you mean 'dance_sde'.*ode"):
        make_transition("dance_sd")
    with pytest.raises(ConfigError, match="shift"):
        make_schedule("flow_match", 4, shfit=3.0)
    with pytest.raises(ConfigError, match="sampler.eta"):
        make_transition("dance_sde", eta=0.0)


def test_dance_sde_step_and_gradient():
    case = golden("B_dance_sde_step")
    sde, ode = make_transition("dance_sde", eta=float(case["hp_eta"])), make_transition("ode")
    gradient = ms.value_and_grad(WeightedLogProb(sde), 0, has_aux=True)
    for k, index in enumerate(case["hp_index"]):
        sigma, sigma_next = (Tensor(s) for s in case["hp_sigmas"][index : index + 2])
        sample, output, noise, new = (
            Tensor(case[f"in_{name}"][k]) for name in ("latents", "model_output", "noise", "model_output_new")
        )
        following, mean, std, pred_x0, log_prob = sde(output, sample, sigma, sigma_next, noise)
        assert_near(following, case["out_prev_sample"][k], 1e-5)
        assert_near(mean, case["out_prev_mean"][k], 1e-5)
        assert_near(std, case["out_std"][k], 1e-5)
        assert_near(pred_x0, case["out_pred_x0"][k], 1e-5)
        assert_near(log_prob, case["out_log_prob"][k], 2e-5)
        stored = Tensor(case["out_prev_sample"][k])
        assert_near(sde(new, sample, sigma, sigma_next, None, stored)[4], case["out_log_prob_new"][k], 2e-5)
        _, grad = gradient(new, sample, sigma, sigma_next, stored, Tensor(case["in_logprob_weight"]))
        assert_near(grad, case["out_grad_model_output_new"][k], 5e-5)
        assert_near(ode(output, sample, sigma, sigma_next)[0], case["out_ode_prev_sample"][k], 1e-5)


def test_dance_sde_per_sample_sigmas():
    case = golden("B_dance_sde_step_batched")
    sde = make_transition("dance_sde", eta=float(case["hp_noise_level"]))
    sigma = Tensor(case["hp_sigmas"][case["hp_step_index"]])
    sigma_next = Tensor(case["hp_sigmas"][case["hp_step_index"] + 1])
    sample, output, noise, new = (
        Tensor(case[f"in_{name}"]) for name in ("sample", "model_output", "noise", "model_output_new")
    )
    following, mean, std, pred_x0, log_prob = sde(output, sample, sigma, sigma_next, noise)
    assert std.shape == (6, 1, 1, 1)
    assert_near(following, case["out_prev_sample"], 1e-5)
    assert_near(mean, case["out_prev_mean"], 1e-5)
    assert_near(pred_x0, case["out_pred_x0"], 1e-5)
    assert_near(log_prob, case["out_log_prob"], 2e-5)
    stored = Tensor(case["out_prev_sample"])
    assert_near(sde(new, sample, sigma, sigma_next, None, stored)[4], case["out_log_prob_new"], 2e-5)
    _, grad = ms.value_and_grad(WeightedLogProb(sde), 0, has_aux=True)(
        new, sample, sigma, sigma_next, stored, Tensor(case["in_logprob_weight"])
    )
    assert_near(grad, case["out_grad_model_output_new"], 5e-5)


def test_euler_ode_step():
    case = golden("B_ode_euler_step")
    ode = make_transition("ode")
    sigma = Tensor(case["hp_sigmas"][case["hp_step_index"]])
    sigma_next = Tensor(case["hp_sigmas"][case["hp_step_index"] + 1])
    sample, output = Tensor(case["in_sample"]), Tensor(case["in_model_output"])
    following, _, std, _, log_prob = ode(output, sample, sigma, sigma_next)
    assert_near(following, case["out_prev_sample"], 1e-5)
    assert not std.asnumpy().any() and np.isnan(log_prob.asnumpy()).all() and not ode.stochastic


def test_log_probability_is_asked_for_in_one_way():
    sde, ode, x = make_transition("dance_sde"), make_transition("ode"), Tensor(np.ones((2, 3), np.float32))
    sigma, sigma_next = Tensor(0.5, ms.float32), Tensor(0.4, ms.float32)
    with pytest.raises(ValueError, match="exactly one of noise and prev_sample"):
        sde(x, x, sigma, sigma_next)
    with pytest.raises(ValueError, match="no density"):
        ode(x, x, sigma, sigma_next, None, x)


def test_dance_rollout():
    case = golden("C_traj_dance")
    sde = make_transition("dance_sde", eta=float(case["hp_eta"]))
    sampler = toy_sampler(case, sde, case["out_timesteps_int"])
    chain = sampler.sample(case["in_latents0"], (), case["in_noise"], keep=True)
    assert_near(stacked(chain.latents), case["out_all_latents"], 2e-5)
    assert_near(stacked(chain.log_probs), case["out_all_log_probs"], 2e-5)
    assert_near(chain.final, case["out_final_pred_x0"], 2e-5)
    assert np.array_equal(
        make_schedule("flow_match", 8, shift=float(case["hp_shift"]), truncate_timesteps=True).timesteps,
        case["out_timesteps_int"],
    )


def test_dance_rollout_with_float_timesteps():
    case = golden("C_traj_dance_sde_float_t")
    sde = make_transition("dance_sde", eta=float(case["hp_noise_level"]))
    sampler = toy_sampler(case, sde, case["hp_timesteps"])
    chain = sampler.sample(case["in_latents0"], (), case["in_noise"], keep=True)
    assert_near(stacked(chain.latents), case["out_all_latents"], 2e-5)
    assert_near(stacked(chain.log_probs), case["out_all_log_probs"], 2e-5)


def test_ode_rollout():
    case = golden("C_traj_ode")
    chain = toy_sampler(case, make_transition("ode"), case["hp_timesteps"]).sample(
        case["in_latents0"], (), keep=True
    )
    assert_near(stacked(chain.latents), case["out_all_latents"], 2e-5)
    assert chain.log_probs == ()


def test_steps_after_the_stochastic_ones_are_deterministic():
    """The first steps as in the full chain, to the bit; from there on the ODE, whatever the noise is."""
    case = golden("C_traj_dance_sde_float_t")
    sde = make_transition("dance_sde", eta=float(case["hp_noise_level"]))
    full = toy_sampler(case, sde, case["hp_timesteps"])
    whole = full.sample(case["in_latents0"], (), case["in_noise"], keep=True)
    mixed = Sampler(full.policy_step, full.schedule, full.batch, stochastic_steps=3)
    chain = mixed.sample(case["in_latents0"], (), case["in_noise"][:3], keep=True)
    for step in range(4):
        assert np.array_equal(chain.latents[step].asnumpy(), whole.latents[step].asnumpy())
    assert np.array_equal(chain.log_probs[2].asnumpy(), whole.log_probs[2].asnumpy())
    assert np.isnan(chain.log_probs[3].asnumpy()).all()
    schedule = Schedule(full.schedule.sigmas[3:], full.schedule.timesteps[3:])
    ode = Sampler(PolicyStep(full.policy_step.denoiser, make_transition("ode")), schedule, full.batch)
    rest = ode.sample(chain.latents[3].asnumpy(), (), keep=True)
    assert np.array_equal(rest.latents[-1].asnumpy(), chain.latents[-1].asnumpy())
