"""Our pictures against those of diffusers' pipelines, from the same folder and the same noise.

A tiny pipeline of ours is loaded and saved by diffusers, and that folder is sampled by both. Needs torch, diffusers
and transformers, which nothing else here does.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tiny_pipelines import FAMILIES, SIZE, T5_TOKENS, save_pipeline  # noqa: E402

from dancegrpo.runtime.setup import setup_runtime  # noqa: E402

setup_runtime(compile_cache=False)

from dancegrpo.pipelines import PipelineOptions, load_pipeline  # noqa: E402
from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest  # noqa: E402

STEPS, SEED = 4, 5
PROMPTS = ["a red circle", "Two green stars to the left of it"]
NEGATIVE = "blurry"
SIZED = {"height": SIZE, "width": SIZE}
LONG = {"max_sequence_length": T5_TOKENS}

# Family -> what our options and their call have in common, and what only their call needs.
CASES = {
    "flux": ({"guidance_scale": 4.0, **SIZED, **LONG}, {}),
    "sd15": ({"guidance_scale": 5.0, "negative_prompt": NEGATIVE}, {}),
    "sd21": ({"guidance_scale": 5.0, "negative_prompt": NEGATIVE, "height": SIZE, "width": SIZE + 8}, {}),
    "sdxl": ({"guidance_scale": 4.0, "negative_prompt": NEGATIVE}, {}),
    "sdxl, no negative prompt": ({"guidance_scale": 4.0}, {}),
    "sd3": ({"guidance_scale": 4.0, "negative_prompt": NEGATIVE, **LONG}, {}),
    "sd3, no T5": ({"guidance_scale": 4.0, **LONG}, {}),
    "pixart_alpha": (
        {"guidance_scale": 3.0, "negative_prompt": NEGATIVE, **SIZED, **LONG},
        {"use_resolution_binning": False, "clean_caption": False},
    ),
    "pixart_sigma": (
        {"guidance_scale": 3.0, "height": SIZE, "width": SIZE + 8, **LONG},
        {"use_resolution_binning": False, "clean_caption": False},
    ),
    "dit": ({"guidance_scale": 3.0}, {}),
}


def _theirs(pipe, family, noise, common, further):
    pipe.set_progress_bar_config(disable=True)
    call = dict(num_inference_steps=STEPS, output_type="np", **common, **further)
    if family == "dit":  # takes no latents, so its source of noise is replaced
        module = sys.modules[type(pipe).__module__]
        module.randn_tensor = lambda *args, **kwargs: torch.from_numpy(noise)
        return pipe(class_labels=pipe.get_label_ids(["goldfish", "tench"]), **call).images
    count = {"num_images_per_prompt": 1}
    return pipe(prompt=PROMPTS, latents=torch.from_numpy(noise), **count, **call).images


def _per_prompt(common):
    negative = common.get("negative_prompt")
    return common | ({"negative_prompt": [negative] * len(PROMPTS)} if negative else {})


@pytest.mark.parametrize("case", CASES)
def test_images_are_those_of_diffusers(case, tmp_path):
    family, _, variant = case.partition(", ")
    common, further = CASES[case]
    without = ("text_encoder_3",) if variant == "no T5" else ()
    ours = save_pipeline(family, tmp_path / "ours", without)
    extra = {"add_watermarker": False} if family == "sdxl" else {}
    extra |= dict.fromkeys(without + tuple(name.replace("text_encoder", "tokenizer") for name in without))
    extra |= {"safety_checker": None} if family.startswith("sd1") or family == "sd21" else {}
    pipe = getattr(diffusers, FAMILIES[family][0]).from_pretrained(ours, **extra)
    pipe.save_pretrained(tmp_path / "theirs")
    pipeline = load_pipeline(tmp_path / "theirs", PipelineOptions(**common))
    noise = np.random.default_rng(SEED).standard_normal((2, *pipeline.latent_shape), np.float32)
    expected = _theirs(pipe, family, noise, _per_prompt(common), further)

    generator = ImageGenerator(pipeline, num_steps=STEPS, batch=2)
    generator._initial = lambda requests, seed: noise
    prompts = ["1", "0"] if family == "dit" else PROMPTS
    batch = next(generator.stream([ImageRequest(prompt, i) for i, prompt in enumerate(prompts)], SEED))
    images = batch.images.asnumpy().transpose(0, 2, 3, 1)
    assert images.shape == expected.shape
    difference = np.abs(images - expected).mean()
    print(f"\n{case}: mean absolute difference {255 * difference:.5f}/255, spread {expected.std():.3f}")
    assert expected.std() > 0.02 and np.abs(expected[0] - expected[1]).mean() > 0.01  # a picture at all
    assert difference <= 2 / 255
