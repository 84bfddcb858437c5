"""Writes the three prompt lists that ship with the package; run as a module to write them anew.

    python -m dancegrpo.data.shapes_world.lists [folder]

Lines cycle through the categories, and within a category through its scenes, so that every prefix of a list
is nearly balanced. Lists of different splits share no caption in two_objects, position, color_attribution
and counting with colours; the small categories (single_object, colors, counting without colours) have too
few scenes for that: there the lists differ only in the noise that each prompt is drawn with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from .captions import pick_caption
from .sampling import PLAIN_SHARE
from .world import CATEGORIES, SPLITS, Scene, scenes

LINES_PER_CATEGORY = {"train": 240, "validation": 85, "evaluation": 170}
ASSETS = Path(__file__).resolve().parents[2] / "assets" / "prompts"


def _cycle(pool: list[Scene], count: int, rng: np.random.Generator) -> list[Scene]:
    """`count` scenes, each as often as the others (but one), in random order within each round."""
    chosen: list[Scene] = []
    while len(chosen) < count:
        chosen += [pool[i] for i in rng.permutation(len(pool))]
    return chosen[:count]


def list_scenes(split: str) -> dict[str, list[Scene]]:
    """The scenes of a split's prompt list by category, in list order."""
    result = {}
    for number, category in enumerate(CATEGORIES):
        rng = np.random.Generator(np.random.Philox(key=np.array([SPLITS.index(split), number], np.uint64)))
        members, count = scenes(split)[category], LINES_PER_CATEGORY[split]
        plain = [scene for scene in members if scene.objects[0].color is None]
        colored = [scene for scene in members if scene.objects[0].color is not None]
        share = PLAIN_SHARE if plain and colored else float(bool(plain))
        few = round(share * count)
        chosen = _cycle(plain, few, rng) + _cycle(colored, count - few, rng)
        result[category] = [chosen[i] for i in rng.permutation(count)]
    return result


def list_lines(split: str) -> list[dict[str, str]]:
    """The rows of a split's prompt list: {"prompt", "category"}."""
    rng = np.random.Generator(np.random.Philox(key=np.array([SPLITS.index(split), 99], np.uint64)))
    columns = list_scenes(split)
    return [
        {"prompt": pick_caption(columns[category][i], rng), "category": category}
        for i in range(LINES_PER_CATEGORY[split])
        for category in CATEGORIES
    ]


def write_lists(folder: str | Path = ASSETS) -> list[Path]:
    """Write shapes_<split>.jsonl for every split; returns the paths. The bytes are always the same."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for split in SPLITS:
        path = folder / f"shapes_{split}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in list_lines(split)), encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for written in write_lists(*sys.argv[1:2]):
        print(written)
