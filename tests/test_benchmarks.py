"""The measurements: what they compare is the same work, and what they cannot measure they say."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dancegrpo.config import ConfigError, load_config
from dancegrpo.diagnostics import iteration, scaling
from dancegrpo.diagnostics.operators import busy_ms, read_kernels, read_types
from dancegrpo.diagnostics.workers import Worker, thread_count
from dancegrpo.pipelines.loading import SHIPPED
from dancegrpo.runtime.files import check_writable
from dancegrpo.runtime.setup import setup_runtime

_tool = importlib.util.spec_from_file_location(
    "benchmark", Path(__file__).resolve().parent.parent / "tools" / "benchmark.py"
)
benchmark = importlib.util.module_from_spec(_tool)
_tool.loader.exec_module(benchmark)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The shipped pipeline with a random transformer of two blocks."""
    from dancegrpo.models import save_model
    from dancegrpo.models.loading import build_model

    setup_runtime(compile_cache=False)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(SHIPPED["small-flux"], folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config |= {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}
    save_model(build_model(config, "tiny"), folder / "transformer")
    return folder


def tiny_config(folder, *overrides):
    return load_config(
        None,
        [
            *iteration.SETTINGS,
            f"model.checkpoint={folder}",
            "data.prompts_per_iteration=2",
            "train.candidates=4",
            "train.micro_batch=4",
            "train.updates_per_rollout=2",
            "sampler.num_steps=4",
            "train.timestep_fraction=0.7",
            "train.learning_rate=1e-3",
            *overrides,
        ],
    )


def test_without_pytorch_one_sentence_names_the_extra(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    file = tmp_path / "new" / "iteration.json"
    with pytest.raises(ConfigError, match=r"torch .*pip install -e \.\[parity\]"):
        benchmark.main(["iteration", "--json", str(file)])
    assert not file.parent.exists()  # nothing is left behind by what was refused


def test_settings_of_a_benchmark_give_way_to_what_is_set(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(benchmark, "run_benchmark", lambda name, config, repeats: seen.append(config) or {})
    benchmark.main(["iteration", "--json", str(tmp_path / "a.json"), "--set", "train.micro_batch=12"])
    benchmark.main(["iteration", "--json", str(tmp_path / "b.json"), "--config", "flux_small.yaml"])
    ours, named = seen
    assert (ours.data.prompts_per_iteration, ours.train.micro_batch) == (8, 12)
    assert named == load_config("flux_small.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [("sampler.transition", "ode"), ("train.kl_weight", "0.1"), ("train.clip_unit", "spread")],
)
def test_iteration_refuses_what_pytorch_does_not_do_here(monkeypatch, key, value):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if all were installed
    with pytest.raises(ConfigError, match=key):
        iteration.iteration(load_config(None, [*iteration.SETTINGS, f"{key}={value}"]), 1)


def test_a_benchmark_takes_the_default_recipe_with_its_own_settings():
    iteration._check_config(load_config(None, [*iteration.SETTINGS]))
    config = load_config(None, [*scaling.SETTINGS])
    assert all(scaling._sized(config, images).train.trained_prompts is None for images in scaling.SIZES)


def test_scaling_names_the_key_when_a_size_does_not_divide():
    settings = [*scaling.SETTINGS, "train.candidates=9", "data.prompts_per_iteration=16"]
    with pytest.raises(ConfigError, match=r"train\.candidates.*got 9"):
        scaling.scaling(load_config(None, settings), 1)


def test_disagreement_is_seen_not_a_number_too():
    good = dict.fromkeys(iteration.TOLERANCES, 0.0)
    assert not iteration.disagreements(good)
    assert "loss" in iteration.disagreements(good | {"loss": 2e-3})[0]
    assert "velocity" in iteration.disagreements(good | {"velocity": float("nan")})[0]


def test_check_writable_looks_and_leaves_everything_alone(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    check_writable(tmp_path / "a" / "b" / "c.json", "--json")
    check_writable(file, "--json")
    for bad in (tmp_path, file / "c.json", file / "deeper" / "c.json"):
        with pytest.raises(ConfigError, match="--json"):
            check_writable(bad, "--json")
    assert list(tmp_path.iterdir()) == [file]


def test_worker_answers_and_hands_on_what_goes_wrong():
    with Worker("fractions:Fraction", 22, 7, threads=1) as worker:
        assert worker.call("limit_denominator", 2) == 3
        with pytest.raises(RuntimeError, match="AttributeError"):
            worker.call("no_such_method")
        assert worker.call("limit_denominator", 2) == 3
        assert worker.idle_cpu_s() < 1
        process = worker._process
        process.kill()
        with pytest.raises(RuntimeError, match="Fraction died"):
            worker.call("limit_denominator", 2)
    assert not process.is_alive()
    with pytest.raises(ConfigError, match="nowhere"):
        Worker("dancegrpo.config:load_config", "nowhere.yaml", threads=1)


def test_chain_graphs_end_where_the_sampler_ends(tiny):
    from dancegrpo.diagnostics.chains import make_chains

    chains = make_chains(tiny_config(tiny, "train.updates_per_rollout=1"))
    latents = {name: run() for name, run in chains.items()}
    assert latents["step"].std() > 0.1
    np.testing.assert_allclose(latents["unrolled"], latents["step"], atol=1e-6)
    np.testing.assert_allclose(latents["loop"], latents["step"], atol=1e-6)


def test_profiler_tables_are_read(tmp_path):
    times, types = tmp_path / "times.txt", tmp_path / "types.csv"
    times.write_text(  # two kernels that overlap by 1 ms, and one inside the other
        "Default/Tanh-op4;HostCpuOps;1796063191048000000,3.0,0 1796063191058000000,4.0,0 \n"
        "Default/Mul-op1;HostCpuOps;1796063191050000000,2.0,0 1796063191059000000,1.0,0 \n"
    )
    types.write_text(
        "op_type,type_occurrences,execution_frequency(per-step),total_compute_time,avg_time(ms),percent\n"
        "Mul,2,1,3.0,1.5,0.3\nTanh,2,1,7.0,3.5,0.7\n"
    )
    assert busy_ms(read_kernels(times)) == pytest.approx(4 + 4, abs=1e-6)
    assert read_types(types, 2) == [
        {"type": "Tanh", "count": 1, "ms": 3.5},
        {"type": "Mul", "count": 1, "ms": 1.5},
    ]


def test_both_sides_of_the_iteration_compute_the_same(tiny, tmp_path):
    for name in ("torch", "diffusers"):
        if not importlib.util.find_spec(name):
            pytest.skip("needs the extra parity")
    config, threads = tiny_config(tiny), thread_count()
    reference = str(tmp_path / "reference.npz")
    with Worker("dancegrpo.diagnostics.ours:OurIteration", config, threads, True, threads=threads) as ours:
        ours.call("write_reference", reference)
        model = ours.call("model")
        assert ours.call("run") > 0
    other_clip = dataclasses.replace(config.train, clip_range=2 * config.train.clip_range)
    other_weights = dataclasses.replace(config.train, weight_decay=100.0)
    setting = iteration.TorchSetting(
        config, **model, reference=reference, batch=1, compiled=False, threads=threads
    )
    for train, batch, wrong in (
        (config.train, 2, ""),
        (other_clip, 4, "loss"),
        (other_weights, 4, "update_norm"),
    ):
        theirs = dataclasses.replace(setting, config=dataclasses.replace(config, train=train), batch=batch)
        with Worker("dancegrpo.diagnostics.torch_flux:TorchIteration", theirs, threads=threads) as worker:
            problems = iteration.disagreements(worker.call("check"))
            assert " ".join(problems).startswith(wrong) and bool(problems) == bool(wrong), problems
            assert wrong or worker.call("run") > 0
