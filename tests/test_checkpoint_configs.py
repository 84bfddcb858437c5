"""Configs of published checkpoints, the sizes that the docs print for them, and the docs' worked example."""

import re
import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import model_sizes
from public_configs import PUBLIC

from dancegrpo.config import Config, ConfigError, derive_counts, load_config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

from mindspore.nn.utils import no_init_parameters  # noqa: E402

from dancegrpo.diffusion import process_of, scheduler_settings  # noqa: E402
from dancegrpo.models.loading import build_model  # noqa: E402
from dancegrpo.models.lora import find_targets  # noqa: E402
from dancegrpo.pipelines import PipelineOptions, resolve_checkpoint  # noqa: E402
from dancegrpo.rl.chain import trained_transition  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
DDIM = {"_class_name": "DDIMScheduler", "beta_schedule": "scaled_linear", "clip_sample": False}
# Config -> its scheduler, denoising steps, and what the published settings say of the noise.
CONFIGS = {
    "flux_dev": (FLOW, 16, 0.3),
    "flux_dev_lora": (FLOW, 6, 0.9),
    "sd15": (DDIM, 50, 1.0),
    "sdxl_lora": (DDIM, 25, 1.0),
    "sd35_medium_lora": (FLOW, 10, 0.7),
    "dit_xl": (DDIM, 50, 1.0),
    "pixart_sigma": (DDIM, 20, 1.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_a_published_checkpoint(name):
    scheduler, steps, eta = CONFIGS[name]
    config = load_config(f"{name}.yaml")
    counts = derive_counts(config)
    assert (counts.candidates, counts.steps, config.sampler.eta) == (12, steps, eta)
    written = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    assert config.train.micro_batch == written["train"]["micro_batch"]  # it divides the counts as it stands
    settings = scheduler_settings(scheduler, "test")
    trained_transition(config.sampler, process_of(settings), settings)
    assert config.precision.compute == "bfloat16" and not config.evaluation.after_training
    assert name.endswith("lora") == (config.lora.rank > 0)
    PipelineOptions.of(config)

    models = PUBLIC[config.model.checkpoint]
    factor = 2 ** (len(models["vae"]["block_out_channels"]) - 1)
    patch = 2 if "transformer" in models else 1
    for side in (config.model.height, config.model.width):
        assert side is None or side % (factor * patch) == 0
    assert config.model.drop_text_encoder <= any(key.startswith("text_encoder") for key in models)
    with pytest.raises(ConfigError, match=f"checkpoint {re.escape(config.model.checkpoint)} does not exist"):
        resolve_checkpoint(config.model.checkpoint)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_beside_the_plain_ones_is_explained(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert all(len(line) <= 120 for line in text.splitlines())
    plain = {
        "checkpoint_every", "keep_last", "sample_every", "sample_prompts", "images", "batch", "iterations",
        "candidates", "height", "width", "rank", "alpha", "weight_decay", "learning_rate", "max_grad_norm",
        "advantage_clip", "clip_unit", "kl_weight", "ema_decay", "transition", "eta", "num_steps", "shift",
        "guidance_scale", "negative_prompt", "prompts_per_iteration",
    }  # fmt: skip
    lines = text.splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        key = re.match(r"  (\w+):", line)
        if key and key[1] not in plain:
            assert before.lstrip().startswith("#"), f"{name}: no comment above {line!r}"
    sections = {field for field in Config().to_dict()}
    assert set(yaml.safe_load(text)) <= sections


@pytest.mark.parametrize("name", ["flux_dev_lora", "sdxl_lora", "sd35_medium_lora"])
def test_targets_of_a_lora_are_layers_of_the_published_model(name):
    config = load_config(f"{name}.yaml")
    models = PUBLIC[config.model.checkpoint]
    backbone = dict(models.get("transformer") or models["unet"])
    backbone |= {key: 1 for key in ("num_layers", "num_single_layers") if key in backbone}
    if "dual_attention_layers" in backbone:
        backbone["dual_attention_layers"] = [0]
    with no_init_parameters():
        layers = find_targets(build_model(backbone, name), config.lora.targets)
    ends = {layer.rpartition(".attn.")[2] for layer in layers}
    assert {"to_q", "to_k", "to_v"} <= {end.rpartition(".")[2] for end in ends}
    if (
        name == "flux_dev_lora"
    ):  # one double block: 8 projections and 4 feed-forward layers; one single block: 3
        assert len(layers) == 15


def test_sizes_are_those_of_the_published_weights_and_of_the_docs():
    docs = (ROOT / "docs" / "checkpoints.md").read_text()
    for name, count in {
        "stable-diffusion-v1-5": 859_520_964,
        "PixArt-Sigma-XL-2-1024-MS": 610_856_096,
    }.items():
        sizes = model_sizes.measure(PUBLIC[name], 32)
        assert sizes.backbone == count
        assert sizes.full == 24 * count and sizes.with_lora == 2 * count + 24 * sizes.lora
    rows = model_sizes.table_rows(["stable-diffusion-v1-5", "DiT-XL-2-256"], 32)
    for row in rows:
        assert f"| {' | '.join(row)} |" in docs
    assert all(f"| {name} |" in docs for name in PUBLIC)
    assert sizes.text == 4_762_310_656  # T5 XXL's encoder


def test_the_worked_example_of_the_docs_is_the_code():
    docs = (ROOT / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", docs, flags=re.DOTALL)
    assert {file for file, _ in blocks} >= {"dancegrpo/models/dit.py", "dancegrpo/pipelines/dit.py"}
    for file, block in blocks:
        code = (ROOT / file).read_text().splitlines()
        for line in filter(None, block.splitlines()):
            assert line in code, f"{file} has no line {line!r}"
