"""Flow-SDE, CPS, DDIM and diffusers' schedules against numbers from public implementations (tests/golden)."""

from dataclasses import replace

import numpy as np
import pytest

from dancegrpo.config import Config, ConfigError, SamplerConfig
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from golden_cases import ToyDenoiser, WeightedLogProb, assert_near, golden  # noqa: E402
from mindspore import Tensor, ops  # noqa: E402

from dancegrpo.diffusion import (  # noqa: E402
    PolicyStep,
    Sampler,
    Schedule,
    make_schedule,
    make_transition,
    scheduler_settings,
)
from dancegrpo.diffusion.noise_levels import alphas_cumprod  # noqa: E402
from dancegrpo.diffusion.schedules import dynamic_shift  # noqa: E402
from dancegrpo.rl.chain import make_chain  # noqa: E402

SD15 = {
    "_class_name": "DDIMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "trained_betas": None,
}


def toy_step(case, transition):
    return PolicyStep(ToyDenoiser(case["hp_toy_a"], case["hp_toy_b"]), transition)


def stacked(tensors):
    return np.stack([t.asnumpy() for t in tensors], axis=1)


def check_step(case, transition, now, after, gradient_tolerance):
    """One step with noise, and the score and its gradient under a second model output; returns the first."""
    assert ms.get_context("mode") == ms.GRAPH_MODE
    sample, output, noise = (Tensor(case[f"in_{name}"]) for name in ("sample", "model_output", "noise"))
    result = transition(output, sample, now, after, noise)
    following, mean, std, pred_x0, log_prob = result
    assert_near(following, case["out_prev_sample"], 1e-5)
    assert_near(mean, case["out_prev_mean"], 1e-5)
    assert_near(pred_x0, case["out_pred_x0"], 1e-5)
    if transition.stochastic:
        assert_near(log_prob, case["out_log_prob"], 2e-5)
        arguments = (
            Tensor(case["in_model_output_new"]),
            sample,
            now,
            after,
            Tensor(case["out_prev_sample"]),
            Tensor(case["in_logprob_weight"]),
        )
        gradient_of = ms.value_and_grad(WeightedLogProb(transition), 0, has_aux=True)
        (_, new), gradient = gradient_of(*arguments)
        assert_near(new, case["out_log_prob_new"], 2e-5)
        assert_near(gradient, case["out_grad_model_output_new"], gradient_tolerance)
    return result


def flow_case(name):
    case, index = golden(name), golden(name)["hp_step_index"]
    return case, Tensor(case["hp_sigmas"][index]), Tensor(case["hp_sigmas"][index + 1])


def test_flow_sde_step_and_gradient_per_sample():
    case, now, after = flow_case("B_flow_sde_step")
    sde = make_transition("flow_sde", eta=float(case["hp_noise_level"]))
    std = check_step(case, sde, now, after, 1e-4)[2]
    assert_near(std.reshape(-1), case["out_std_dev_t"] * case["out_sqrt_dt"], 1e-5)
    assert_near(ops.sqrt(sde.step_size(now, after)), case["out_sqrt_dt"], 1e-5)


def test_cps_step_and_gradient_per_sample():
    case, now, after = flow_case("B_cps_step")
    cps = make_transition("cps", eta=float(case["hp_noise_level"]))
    std = check_step(case, cps, now, after, 5e-5)[2]
    assert_near(std.reshape(-1), case["out_std_dev_t"], 1e-5)
    assert (case["hp_sigmas"][-1] == 0) and cps.step_size(now, after).asnumpy().tolist() == [1.0] * 6


@pytest.mark.parametrize("prediction", ["eps", "vpred"])
@pytest.mark.parametrize("eta, tolerance", [("0p0", 0), ("0p3", 2e-4), ("1p0", 2e-4)])
def test_ddim_step_and_gradient_per_sample(prediction, eta, tolerance):
    case = golden(f"B_ddim_step_{prediction}_eta{eta}")
    settings = {} if prediction == "eps" else {"prediction_type": "v_prediction"}
    ddim = make_transition("ddim", eta=float(case["hp_eta"]), **settings)
    now, after = (Tensor(case[name].astype(np.float32)) for name in ("in_timestep", "out_prev_timestep"))
    if prediction == "eps" and eta == "1p0":
        tolerance = 1e-4
    _, _, std, _, log_prob = check_step(case, ddim, now, after, tolerance)
    assert ddim.stochastic == (eta != "0p0") and np.isnan(log_prob.asnumpy()).all() == (eta == "0p0")
    assert np.abs(std.reshape(-1).asnumpy() - case["out_std_dev_t"]).max() <= 1e-5 * max(
        1e-3, case["out_std_dev_t"].max()
    )


def test_ddim_step_from_pure_noise():
    """Zero terminal SNR: the first level has no signal at all."""
    case = golden("B_ddim_step_vpred_zero_snr")
    steps = int(case["hp_num_steps"])
    levels = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    ddim = make_transition("ddim", eta=float(case["hp_eta"]), **levels)
    now = case["in_timestep"].astype(np.float32)
    assert now[0] == 999 and alphas_cumprod(rescale_betas_zero_snr=True)[-1] == 0
    arrays = [Tensor(case[f"in_{name}"]) for name in ("model_output", "sample")]
    following, _, _, _, log_prob = ddim(
        *arrays, Tensor(now), Tensor(now - 1000 // steps), Tensor(case["in_noise"])
    )
    assert_near(following, case["out_prev_sample"], 1e-5)
    assert_near(log_prob, case["out_log_prob"], 2e-5)
    with pytest.raises(ConfigError, match="rescale_betas_zero_snr needs prediction_type v_prediction"):
        make_transition("ddim", rescale_betas_zero_snr=True)


def test_ddim_with_all_noise_is_the_ancestral_step():
    case = golden("B_ddpm_ancestral_step")
    now = case["in_timestep"].astype(np.float32)
    arrays = [Tensor(case[f"in_{name}"]) for name in ("model_output", "sample")]
    ddim = make_transition("ddim", eta=1.0, set_alpha_to_one=True)
    after = Tensor(now - 1000 // int(case["hp_num_steps"]))
    following, _, _, pred_x0, _ = ddim(*arrays, Tensor(now), after, Tensor(case["in_noise"]))
    assert_near(pred_x0, case["out_pred_x0"], 1e-5)
    assert_near(following, case["out_prev_sample"], 2e-5)


@pytest.mark.parametrize("name", ["flow_sde", "cps"])
def test_flow_rollouts(name):
    case = golden(f"C_traj_{name}")
    step = toy_step(case, make_transition(name, eta=float(case["hp_noise_level"])))
    schedule = make_schedule("flow_match_euler", 8, shift=float(case["hp_shift"]))
    assert_near(schedule.sigmas, case["hp_sigmas"], 1e-5)
    schedule = Schedule(case["hp_sigmas"], case["hp_timesteps"])
    chain = Sampler(step, schedule, 2).sample(case["in_latents0"], (), case["in_noise"], keep=True)
    assert_near(stacked(chain.latents), case["out_all_latents"], 2e-5)
    assert_near(stacked(chain.log_probs), case["out_all_log_probs"], 2e-5)


@pytest.mark.parametrize("name", ["eps_eta0p3", "eps_eta1p0", "vpred_eta1p0"])
def test_ddim_rollouts(name):
    case = golden(f"C_traj_ddim_{name}")
    kind = "v_prediction" if name.startswith("vpred") else "epsilon"
    ddim = make_transition("ddim", eta=float(case["hp_eta"]), prediction_type=kind)
    schedule = make_schedule("ddim", 8, steps_offset=1)
    assert np.array_equal(schedule.timesteps, case["hp_timesteps"])
    chain = Sampler(toy_step(case, ddim), schedule, 2).sample(
        case["in_latents0"], (), case["in_noise"], keep=True
    )
    assert_near(stacked(chain.latents), case["out_all_latents"], 2e-5)
    assert_near(stacked(chain.log_probs), case["out_all_log_probs"], 2e-5)


@pytest.mark.parametrize("name, kernel", [("dance", "dance_sde"), ("flow", "flow_sde")])
def test_rollouts_with_noise_inside_a_window_only(name, kernel):
    """The trained steps of a mixed chain: ODE steps before and after, with the same cells as a sampler's."""
    case = golden(f"C_traj_mixgrpo_window_{name}")
    noisy = toy_step(case, make_transition(kernel, eta=float(case["hp_eta"])))
    plain = PolicyStep(noisy.denoiser, noisy.transition.deterministic())
    window = case["hp_sde_window"].tolist()
    latents, log_probs = [Tensor(case["in_latents0"])], []
    for i, timestep in enumerate(case["hp_timesteps_int"]):
        now, after, time = (
            Tensor(np.full(2, value, np.float32)) for value in (*case["hp_sigmas"][i : i + 2], timestep)
        )
        inside = i in window
        noise = Tensor(case["in_noise"][i]) if inside else None
        step = noisy if inside else plain
        following, _, std, _, log_prob = step(latents[-1], now, after, time, noise, None)
        latents.append(following)
        if inside:
            constant = np.log(std.asnumpy().reshape(-1)) + 0.5 * np.log(2 * np.pi)
            log_probs.append(log_prob.asnumpy() + (constant if name == "dance" else 0))
    assert_near(stacked(latents), case["out_all_latents"], 2e-5)
    assert_near(np.stack(log_probs, axis=1), case["out_all_log_probs_window"], 2e-5)


def test_a_mixed_ddim_chain_ends_with_noise_free_ddim_steps():
    case = golden("C_traj_ddim_eps_eta0p3")
    step = toy_step(case, make_transition("ddim", eta=0.3))
    schedule = make_schedule("ddim", 4)
    mixed = Sampler(step, schedule, 2, stochastic_steps=3)
    chain = mixed.sample(case["in_latents0"], (), case["in_noise"][:3], keep=True)
    free = PolicyStep(step.denoiser, make_transition("ddim", eta=0.0))
    last = [Tensor(np.full(2, value, np.float32)) for value in (0, -1, 0)]
    assert np.array_equal(free(chain.latents[3], *last, None, None)[0].asnumpy(), chain.latents[4].asnumpy())


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_dynamically_shifted_schedules(kind):
    case = golden(f"A_flowmatch_dynamic_{kind}")
    for k, (steps, tokens) in enumerate(zip(case["hp_num_steps"], case["hp_image_seq_len"], strict=True)):
        settings = {"use_dynamic_shifting": True, "time_shift_type": kind, "image_seq_len": int(tokens)}
        schedule = make_schedule("flow_match_euler", int(steps), **settings, shift=3.0)
        assert_near(schedule.sigmas, case[f"out_sigmas_{k:02d}"], 1e-5)
        assert_near(schedule.timesteps, case[f"out_timesteps_{k:02d}"], 1e-5)
        assert dynamic_shift(int(tokens)) == pytest.approx(case["out_mu"][k], rel=1e-5)


def test_statically_shifted_schedule():
    case = golden("A_flowmatch_static_shift")
    for k, (steps, shift) in enumerate(zip(case["hp_num_steps"], case["hp_shift"], strict=True)):
        for explicit, tag in ((None, ""), (True, "explicit_")):
            schedule = make_schedule(
                "flow_match_euler", int(steps), shift=float(shift), explicit_sigmas=explicit
            )
            assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float32
            assert_near(schedule.sigmas, case[f"out_sigmas_{tag}{k:02d}"], 1e-5)
            assert_near(schedule.timesteps, case[f"out_timesteps_{tag}{k:02d}"], 1e-5)


def test_diffusion_timesteps_and_levels_of_sd15():
    case = golden("A_ddim_ddpm_sd15")
    assert_near(alphas_cumprod(), case["out_alphas_cumprod"], 1e-5)
    for steps in case["hp_steps"]:
        for name in ("ddim", "ddpm"):
            schedule = make_schedule(name, int(steps), steps_offset=1)
            assert np.array_equal(schedule.timesteps, case[f"out_{name}_timesteps_{steps}"])
        for spacing in ("trailing", "linspace"):
            schedule = make_schedule("ddim", int(steps), timestep_spacing=spacing)
            assert np.array_equal(schedule.timesteps, case[f"out_ddim_timesteps_{spacing}_{steps}"])
    ends = make_schedule("ddim", 8, steps_offset=1).sigmas_next
    assert ends.tolist() == [751, 626, 501, 376, 251, 126, 1, -1]


def test_other_levels_and_zero_terminal_snr():
    case = golden("A_ddim_vpred_zero_snr")
    rescaled = alphas_cumprod(rescale_betas_zero_snr=True)
    assert_near(rescaled, case["out_alphas_cumprod"], 1e-5)
    assert rescaled[-1] == 0
    linear = alphas_cumprod("linear", 1e-4, 0.02)
    assert_near(linear, case["out_linear_alphas_cumprod"], 1e-5)
    assert_near(alphas_cumprod("squaredcos_cap_v2"), case["out_cosine_alphas_cumprod"], 1e-5)
    for steps in case["hp_steps"]:
        schedule = make_schedule("ddim", int(steps), timestep_spacing="trailing")
        assert np.array_equal(schedule.timesteps, case[f"out_ddim_timesteps_trailing_{steps}"])
    with pytest.raises(ConfigError, match="beta_schedule is 'sigmoid'.*squaredcos_cap_v2"):
        alphas_cumprod("sigmoid")
    with pytest.raises(ConfigError, match="timestep_spacing is 'led'; did you mean 'leading'"):
        make_schedule("ddim", 4, timestep_spacing="led")


def test_a_checkpoints_scheduler_config_gives_schedule_and_transition():
    name, schedule, transition = scheduler_settings(SD15 | {"prediction_type": "v_prediction"}, "here")
    assert name == "ddim" and schedule == {"timestep_spacing": "leading", "steps_offset": 1}
    assert make_schedule(name, 8, **schedule).timesteps[0] == 876
    ddim = make_transition("ddim", eta=0.5, **transition)
    assert ddim.predicts_velocity and ddim.levels.asnumpy()[0] == alphas_cumprod()[0]
    sampler = replace(Config().sampler, transition="ddim", eta=0.5, num_steps=8)
    kernel, chain = make_chain(sampler, "diffusion", (name, schedule, transition))
    assert kernel.predicts_velocity and chain.timesteps[0] == 876
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_karras_sigmas": False}
    assert scheduler_settings(flow, "here") == ("flow_match_euler", {"shift": 3.0}, {})
    for change, words in [
        ({"clip_sample": True}, "here: clip_sample is True; supported: False"),
        ({"new_option": 3}, r"option new_option \(value 3\)"),
        ({"_class_name": "UniPCScheduler"}, "'UniPCScheduler' is not supported; valid: DDIMScheduler"),
    ]:
        with pytest.raises(ConfigError, match=words):
            scheduler_settings(SD15 | change, "here")
    with pytest.raises(
        ConfigError, match="clip_sample is True"
    ):  # diffusers' default, when the config is silent
        scheduler_settings({"_class_name": "DDIMScheduler"}, "here")


@pytest.mark.parametrize(
    "transition, eta, process, words",
    [
        (
            "ddim",
            1.0,
            "flow",
            "'ddim' is for models of a diffusion process.*'cps' or 'dance_sde' or 'flow_sde'",
        ),
        ("flow_sde", 0.7, "diffusion", "'flow_sde' is for models of a flow process.*choose 'ddim'"),
        (
            "ddim",
            0.0,
            "diffusion",
            "deterministic at sampler.eta 0.0, it has no density.*set sampler.eta above 0",
        ),
        ("ode", 0.7, "flow", "'ode' is deterministic, it has no density and there is nothing to train"),
        ("cps", 1.5, "flow", "sampler.eta must be at most 1 for 'cps'"),
        ("flow_sde", 0.0, "flow", "sampler.eta must be above 0 for 'flow_sde'"),
    ],
)
def test_what_cannot_be_trained_is_refused(transition, eta, process, words):
    sampler: SamplerConfig = replace(Config().sampler, transition=transition, eta=eta)
    with pytest.raises(ConfigError, match=words):
        make_chain(sampler, process)
