"""The shipped weights are those that the recipe in their manifest made, whole and small."""

import json

import numpy as np

from dancegrpo.pipelines.loading import SHIPPED
from dancegrpo.pretraining.assemble import MANIFEST, file_hashes

FOLDER = SHIPPED["small-flux"]


def test_shipped_files_are_those_of_the_manifest():
    manifest = json.loads((FOLDER / MANIFEST).read_text())
    assert file_hashes(FOLDER) == manifest["sha256"]


def test_shipped_files_are_small_and_float16():
    from safetensors import safe_open

    weights = sorted(FOLDER.rglob("*.safetensors"))
    assert len(weights) == 4
    assert sum(path.stat().st_size for path in weights) <= 12 * 2**20
    for path in weights:
        with safe_open(path, "np") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}, path  # noqa: SIM118


def test_manifest_records_the_recipe_of_this_code():
    """A changed recipe without new weights would make the documented command produce something else."""
    import dataclasses

    from dancegrpo.pretraining.recipe import Recipe

    assert json.loads((FOLDER / MANIFEST).read_text())["recipe"] == dataclasses.asdict(Recipe())


def test_both_verifiers_read_what_the_autoencoder_makes_of_pictures():
    """Otherwise neither the reward nor the evaluation of generated images would mean anything."""
    from mindspore import Tensor

    from dancegrpo.data.shapes_world import CATEGORIES, sample_batch
    from dancegrpo.evaluation import verifier as evaluation_verifier
    from dancegrpo.models import load_model
    from dancegrpo.rewards import shapes_verifier as reward_verifier
    from dancegrpo.runtime.batching import run_batched
    from dancegrpo.runtime.pixels import to_uint8

    vae = load_model(FOLDER / "vae")
    images, _, scenes = sample_batch(5, 0, 480, split="validation")
    pixels = images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1.0
    decoded = run_batched(lambda batch: vae(Tensor(batch))[0], (pixels,), 48)
    decoded = to_uint8(np.clip(decoded * 0.5 + 0.5, 0.0, 1.0))
    for verifier in (reward_verifier, evaluation_verifier):
        right = np.array([verdict.correct for verdict in verifier.verify_batch(decoded, scenes)])
        for category in CATEGORIES:
            rows = np.array([scene.category == category for scene in scenes])
            assert right[rows].mean() >= 0.95, (verifier.__name__, category)
