"""What the reward CLIP learns from is true, repeatable and unheld-out, and the other stages stay what they are."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from mindspore import nn, ops

from dancegrpo.config import ConfigError
from dancegrpo.data.shapes_world import sample_batch, scene_of, split_of
from dancegrpo.pipelines.loading import SHIPPED
from dancegrpo.pretraining import alterations, assemble
from dancegrpo.pretraining.assemble import MANIFEST, file_hashes, pretrain
from dancegrpo.pretraining.judge_data import JudgeBatches, altered, joined, pair_targets, pair_weights, read
from dancegrpo.pretraining.painting import EVALUATION, ROLLOUT, Painter
from dancegrpo.pretraining.recipe import Recipe, RewardRecipe
from dancegrpo.pretraining.scoring import within_prompt_auc
from dancegrpo.rewards.shapes_verifier import verify_batch

SMALL = RewardRecipe(batch_size=14, groups=4, group_size=3)


@pytest.fixture(scope="module")
def batches():
    """Eight prompts with nine pictures each: renders of the right scene and of another one, and altered copies."""
    images, captions, scenes = sample_batch(1, 0, 24)
    subjects = [scenes[i - i % 3] for i in range(24)]
    plain = read(images, subjects)
    copies = [altered(plain, 0, str(things), things) for things in (True, False)]
    places = np.arange(72).reshape(3, 8, 3).transpose(1, 0, 2).reshape(-1)
    pictures = joined([plain, *copies]).chosen(places)
    return JudgeBatches(pictures, captions[::3], read(images, scenes), SMALL, seed=0)


def test_labels_are_the_verdicts_of_the_rewards_verifier(batches):
    batch = batches.batch(3)
    count, captions = len(batch.images), len(batch.captions)
    assert batch.truth.shape == (14, 4 + 12 + 4) and batch.own.sum() == 12
    verdicts = verify_batch(
        np.repeat(batch.images, captions, axis=0), [*map(scene_of, batch.captions)] * count
    )
    correct = np.array([verdict.correct for verdict in verdicts]).reshape(count, captions)
    score = np.array([verdict.score for verdict in verdicts]).reshape(count, captions)
    assert np.array_equal(batch.truth, correct) and correct.sum() > 0
    mixed = (score + correct) / 2
    np.testing.assert_allclose(batch.credit, np.where(batch.close, mixed, correct), atol=1e-6)
    assert all(split_of(scene_of(caption)) in (None, "train") for caption in batch.captions)
    again = batches.batch(3)
    assert again.captions == batch.captions and np.array_equal(again.images, batch.images)
    assert batches.batch(4).captions != batch.captions


def test_right_and_wrong_pairs_weigh_alike_and_unrelated_ones_are_only_pushed_apart(batches):
    batch = batches.batch(0)
    weight, target = pair_weights(batch, 0.75), pair_targets(batch, 0.1)
    for mask, share in ((batch.close, 0.375), (~batch.close, 0.125)):
        for part in (mask & batch.truth, mask & ~batch.truth):
            assert part.any() and weight[part].sum() == pytest.approx(share, abs=1e-5)
    assert target[batch.truth].tolist() == [pytest.approx(0.9)] * batch.truth.sum()
    assert target[batch.close].min() >= 0.1 and not target[~batch.close & ~batch.truth].any()


def test_alterations_change_what_they_say():
    images, _, scenes = sample_batch(2, 0, 60)
    pictures = read(images, scenes)

    def right(edit):
        rng = np.random.default_rng(0)
        done = [edit(i.astype(np.float32), b, rng) for i, b in zip(images, pictures.blobs, strict=True)]
        rows = np.array([k for k, result in enumerate(done) if result is not None])
        edited = np.stack([np.rint(np.clip(done[k], 0, 255)).astype(np.uint8) for k in rows])
        return read(edited, [scenes[k] for k in rows]).right().mean()

    assert right(alterations.other_ground) >= 0.97
    assert right(alterations.missing_thing) == right(alterations.other_shape) == 0
    assert (
        right(alterations.extra_thing) <= 0.15
    )  # one more of the things that are counted may be one too faint
    positions = np.array([scene.category == "position" for scene in scenes])
    images, scenes = images[positions], [s for s, p in zip(scenes, positions, strict=True) if p]
    pictures = pictures.chosen(np.flatnonzero(positions))
    assert right(alterations.swapped_things) == 0


def test_area_under_the_curve_is_per_prompt():
    scores = np.array([[0.9, 0.1, 0.5, 0.5], [0.2, 0.3, 0.4, 0.5], [1.0, 1.0, 0.0, 0.0]])
    right = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]], bool)
    np.testing.assert_allclose(within_prompt_auc(scores, right), [3.5 / 4, np.nan, 0.0])


class _FakePipeline:
    """Paints the prompt's length into noise; counts its work."""

    latent_shape = (2, 3)

    def __init__(self):
        self.painted = 0
        self.denoiser = _Denoiser()

    def encode_prompts(self, prompts):
        return (np.array([[len(prompt)] for prompt in prompts], np.float32),)

    def decode(self, latents):
        self.painted += 1
        return ops.sigmoid(latents).reshape((latents.shape[0], 1, 2, 3)).tile((1, 3, 1, 1))


class _Denoiser(nn.Cell):
    def construct(self, latents, timestep, lengths):
        return 0.1 * latents + 0.01 * lengths.reshape((-1, 1, 1))


def test_painting_goes_on_where_it_stopped_and_depends_on_names_only(tmp_path):
    prompts = [f"{'x' * k}" for k in range(1, 71)]
    pipeline = _FakePipeline()
    whole = Painter(pipeline, 0).paint_set(tmp_path / "a", "train", prompts, {ROLLOUT: 2, EVALUATION: 1})
    assert whole[ROLLOUT].shape == (70, 2, 2, 3, 3) and len(np.unique(whole[ROLLOUT], axis=1)) == 70
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lost = sorted((tmp_path / "b").iterdir())[-1]
    lost.unlink()
    before = pipeline.painted
    again = Painter(pipeline, 0).paint_set(tmp_path / "b", "train", prompts, {ROLLOUT: 2, EVALUATION: 1})
    assert pipeline.painted == before + 1
    assert all(np.array_equal(again[way], whole[way]) for way in whole)
    part = Painter(pipeline, 0).paint(ROLLOUT, "train", 5, prompts[5:7], 2)
    assert np.array_equal(part, whole[ROLLOUT][5:7])
    other = Painter(pipeline, 0).paint(ROLLOUT, "validation", 5, prompts[5:7], 2)
    assert not np.array_equal(other, part)


class _NewJudge:
    """Stands for the reward stage: replaces one file."""

    name = "reward"

    def __init__(self, recipe, parts):
        assert (parts / "reward_clip" / "config.json").is_file()

    def export(self, folder):
        (folder / "reward_clip" / "model.safetensors").write_bytes(b"new")
        return {"auc": 1.0}


@pytest.fixture
def base(tmp_path):
    """The shipped parts, as they are before the reward stage."""
    folder = tmp_path / "base"
    shutil.copytree(SHIPPED["small-flux"], folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["recipe"].pop("reward", None)
    manifest["figures"].pop("reward", None)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_only_the_last_stage_can_be_trained_on_parts_that_are_there(base, tmp_path, monkeypatch):
    def run(stage, work):
        (work / stage.name).mkdir()
        (work / stage.name / "losses.jsonl").write_text('{"step": 0, "loss": 1.0}\n')

    monkeypatch.setattr(assemble, "run_stage", run)
    monkeypatch.setattr(assemble, "_STAGES", (*assemble._STAGES[:-1], _NewJudge))
    recipe = Recipe(reward=RewardRecipe(steps=7))
    result = pretrain(recipe, tmp_path / "out", ["reward"], base)
    old, new = (json.loads((folder / MANIFEST).read_text()) for folder in (base, result))
    assert new["recipe"] == old["recipe"] | {"reward": dataclasses.asdict(recipe.reward)}
    assert new["figures"] == old["figures"] | {"reward": {"auc": 1.0}}
    assert file_hashes(result) == new["sha256"]
    changed = {name for name, digest in new["sha256"].items() if old["sha256"][name] != digest}
    assert changed == {"reward_clip/model.safetensors"} and new["sha256"].keys() == old["sha256"].keys()
    with pytest.raises(ConfigError, match="has been through the stage reward"):
        pretrain(recipe, tmp_path / "again", ["reward"], result)


def test_stages_that_cannot_be_had_are_refused_in_a_sentence(base, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="leaves out vae, clip, flow; .*--from"):
        pretrain(Recipe(), out, ["reward"])
    with pytest.raises(ConfigError, match="--stages is clip, .*flow reward, or reward"):
        pretrain(Recipe(), out, ["clip"], base)
    with pytest.raises(ConfigError, match=r"leave the settings run\.\* away"):
        pretrain(
            dataclasses.replace(Recipe(), run=dataclasses.replace(Recipe().run, seed=1)),
            out,
            ["reward"],
            base,
        )
    with pytest.raises(ConfigError, match="no folder that pre-training wrote"):
        pretrain(Recipe(), out, ["reward"], tmp_path)
    (base / "vae" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="are not those of its manifest"):
        pretrain(Recipe(), out, ["reward"], base)
    assert not out.exists()
