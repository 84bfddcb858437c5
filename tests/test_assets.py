"""The shipped weights are those that the recipe in their manifest made, whole and small."""

import json

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
