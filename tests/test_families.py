"""Every pipeline family from a folder: pictures, two iterations of training, and the checkpoint that comes out."""

import dataclasses
import filecmp
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_pipelines import SIZE, T5_TOKENS, save_pipeline

from dancegrpo.config import Config, ConfigError, load_config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime()  # families share text encoders and autoencoders, and through the cache their graphs

import mindspore as ms  # noqa: E402

from dancegrpo.data import PromptSet  # noqa: E402
from dancegrpo.evaluation.report import evaluate_checkpoints  # noqa: E402
from dancegrpo.pipelines import PipelineOptions, load_pipeline, read_process  # noqa: E402
from dancegrpo.pipelines.base import components_of  # noqa: E402
from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest, warn_of_words  # noqa: E402
from dancegrpo.rewards import FunctionReward, LabelledReward, RewardSet  # noqa: E402
from dancegrpo.rl import Trainer, open_run  # noqa: E402

SIZED, LONG = {"height": SIZE, "width": SIZE}, {"max_sequence_length": T5_TOKENS}
OPTIONS = {
    "flux": SIZED | LONG,
    "sd15": {"negative_prompt": "blurry"},
    "sdxl": {},
    "sd3": LONG,
    "dit": {},
    "pixart_alpha": SIZED | LONG,
    "pixart_sigma": {"height": SIZE, "width": SIZE + 8} | LONG,
}
COMPONENT = {"sd15": "unet", "sdxl": "unet"}
STEPS = 3
# Gradient graphs of a whole U-Net take half a minute to compile, and are tested with the model.
CHANGES = {
    "unet": {
        "block_out_channels": [16],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "mid_block_type": None,
        "up_block_types": ["CrossAttnUpBlock2D"],
    }
}


def config_of(process: str, options: dict) -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **{k: v for k, v in options.items() if k != "negative_prompt"}),
        sampler=dataclasses.replace(
            base.sampler,
            num_steps=STEPS,
            transition="ddim" if process == "diffusion" else "dance_sde",
            negative_prompt=options.get("negative_prompt"),
        ),
        data=dataclasses.replace(base.data, prompts_per_iteration=2),
        train=dataclasses.replace(
            base.train, iterations=2, candidates=2, micro_batch=2, shared_noise=False, learning_rate=1e-3
        ),
        evaluation=dataclasses.replace(base.evaluation, num_steps=2),
        output=dataclasses.replace(base.output, tensorboard=False, sample_every=1, sample_prompts=2),
    )


def redness(images, prompts, metadata):
    return (images[..., 0].mean(axis=(1, 2)) - images[..., 2].mean(axis=(1, 2))) / 255


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("family", OPTIONS)
def test_a_family_draws_learns_and_reloads(family, tmp_path):
    start = save_pipeline(family, tmp_path / "start", changes=CHANGES)
    process, _ = read_process(start)
    config = config_of(process, OPTIONS[family])
    pipeline = load_pipeline(start, PipelineOptions.of(config))
    names = ("goldfish", "2") if family == "dit" else ("a red circle", "Two Stars")
    prompts = PromptSet(names, ({}, {}))
    rewards = RewardSet([LabelledReward("redness", FunctionReward(redness))])
    with open_run(tmp_path / "run", config) as run:
        trainer = Trainer(config, pipeline, rewards, prompts, run)
        trainer.train()
        rows, checkpoint = run.metrics(), run.checkpoint(2)
    assert ms.get_context("mode") == ms.GRAPH_MODE
    assert [row["ratio/first_max_deviation"] for row in rows] == [0.0, 0.0]
    assert not any(row["skipped"] or row["groups/dead"] for row in rows)
    assert min(row["grad/norm"] for row in rows) > 0
    assert len({row["graph/compilations"] for row in rows}) == 1

    images = trainer.samples.images()
    assert images.shape == (2, *pipeline.image_size, 3) and images.std() > 2
    assert np.array_equal(trainer.samples.images(), images)
    assert np.abs(images[0].astype(int) - images[1]).mean() > 1  # prompts and noise tell them apart

    component = COMPONENT.get(family, "transformer")
    before, after = weights_of(start / component), weights_of(checkpoint / component)
    same = [name for name in before if np.array_equal(before[name], after[name])]
    assert before.keys() == after.keys() and set(same) <= {"pos_embed.pos_embed"}
    for name in ("vae", "scheduler", *(path.name for path in start.glob("t*_*"))):
        compared = filecmp.dircmp(start / name, checkpoint / name)
        assert compared.left_list == compared.right_list == compared.same_files

    reloaded = load_pipeline(tmp_path / "run", PipelineOptions.of(config), "raw")
    requests = [ImageRequest(prompt, index) for index, prompt in enumerate(names)]
    generator = ImageGenerator(reloaded, num_steps=2, batch=2)
    assert np.array_equal(generator.images(requests, config.train.seed), images)


def test_the_loop_and_the_evaluation_name_no_model():
    package = Path(__file__).resolve().parent.parent / "dancegrpo"
    names = re.compile(
        r"flux(?!_small)|stable.?diffusion|sd3|sdxl|pixart|u-?net|\bdit\b|\bt5\b|llama", re.IGNORECASE
    )
    for file in [*(package / "rl").glob("*.py"), *(package / "evaluation").glob("*.py")]:
        assert not names.search(file.read_text()), file


def _generate(*arguments) -> None:
    spec = importlib.util.spec_from_file_location(
        "generate_tool", Path(__file__).resolve().parent.parent / "tools" / "generate.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(list(map(str, arguments)))


def test_the_command_line_draws_classes_and_names_those_near_an_unknown_one(tmp_path):
    folder = save_pipeline("dit", tmp_path / "dit")
    common = ("--checkpoint", folder, "--output", tmp_path / "out", "--steps", 2, "--batch", 2)
    _generate(*common, "--prompt", "Tinca tinca", "--prompt", "0")
    assert [json.loads(line)["prompt"] for line in (tmp_path / "out" / "prompts.jsonl").open()] == [
        "Tinca tinca",
        "0",
    ]
    # The evaluation's own CLIP sees pictures of another size than its own.
    (tmp_path / "classes.txt").write_text("goldfish\n1\n")
    keys = {"prompts": tmp_path / "classes.txt", "images": 2, "num_steps": 2, "batch": 2}
    config = load_config(overrides=[f"evaluation.{key}={value}" for key, value in keys.items()])
    config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, terms=()))
    table = evaluate_checkpoints(config, tmp_path / "table.json", checkpoint=str(folder))
    assert table["diversity"]["clip_distance"]["all"] > 0 and "accuracy" not in table
    pipeline = load_pipeline(folder)
    assert np.array_equal(pipeline.encode_prompts(["Tench", "great white shark"])[0], [[0, 1000], [2, 1000]])
    for prompt, words in [
        ("gold fish", "no class of this model: .* a number from 0 to 999; did you mean 'goldfish'?"),
        ("", "the prompt '' is no class"),
        ("1000", "the prompt '1000' is no class"),
    ]:
        with pytest.raises(ConfigError, match=words):
            _generate(*common, "--overwrite", "--prompt", prompt)
    with pytest.raises(ConfigError, match="DiTPipeline takes none"):
        _generate(*common, "--overwrite", "--prompt", "1", "--negative-prompt", "x")


def test_long_prompts_are_cut_with_a_warning_and_empty_ones_allowed(tmp_path, capsys):
    pipeline = load_pipeline(save_pipeline("sdxl", tmp_path), PipelineOptions(guidance_scale=1.0))
    long = "very " * 2000
    states, _ = pipeline.encode_prompts([long, "", long + "end"])
    assert np.array_equal(states[0], states[2]) and np.isfinite(states[1]).all()
    warn_of_words(pipeline, [long, ""])
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "is cut off" in warning and len(warning) < 200


def test_saving_copies_what_it_does_not_know_and_leaves_the_folder(tmp_path):
    extra = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "../outside": ["a", "B"],
        "..": ["a", "B"],
        "requires_safety_checker": True,
    }
    folder = save_pipeline("sd15", tmp_path / "start", **extra)
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "pytorch_model.bin").write_bytes(b"not even a pickle")
    (tmp_path / "outside").mkdir()
    load_pipeline(folder).save(tmp_path / "new" / "saved")
    saved = tmp_path / "new" / "saved"
    assert (saved / "safety_checker" / "pytorch_model.bin").read_bytes() == b"not even a pickle"
    assert not (tmp_path / "new" / "outside").exists()
    index = json.loads((saved / "model_index.json").read_text())
    assert index["feature_extractor"] == [None, None] and index["requires_safety_checker"]
    assert {"../outside", ".."}.isdisjoint(components_of(index))
