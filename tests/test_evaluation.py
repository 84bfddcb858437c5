"""Evaluation and generation: intervals, fixed prompts and noise, verdicts, files."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from dancegrpo.config import ConfigError, load_config
from dancegrpo.data import PromptSet
from dancegrpo.data.shapes_world import IMAGE_SIZE, render, scene_of
from dancegrpo.evaluation import report
from dancegrpo.evaluation.diversity import diversity_of
from dancegrpo.evaluation.evaluate import Evaluator, balanced_requests, check_rewards, results
from dancegrpo.evaluation.statistics import (
    accuracy_table,
    difference_table,
    paired_difference,
    paired_mean_difference,
    wilson,
)
from dancegrpo.models import load_model, load_tokenizer, save_model
from dancegrpo.models.clip import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
from dancegrpo.models.tokenizers import save_word_tokenizer
from dancegrpo.pipelines import Pipeline
from dancegrpo.pipelines.generate import (
    GenerateOptions,
    ImageGenerator,
    ImageRequest,
    check_output,
    generate,
    requests_for,
    write_images,
)
from dancegrpo.rewards import ClipScoreReward, LabelledReward, RewardSet, ShapesRuleReward, registry
from dancegrpo.rl.final_evaluation import evaluate_finished
from dancegrpo.rl.launch import needs_evaluation
from dancegrpo.runtime import probes
from dancegrpo.runtime.files import write_folder_atomic
from dancegrpo.runtime.pixels import to_uint8
from dancegrpo.runtime.runlog import RunFolder
from dancegrpo.runtime.setup import setup_runtime

PROMPTS = ("a red circle", "a green square", "a circle and a square", "a star and a cross")
CATEGORIES = ("colors", "colors", "two_objects", "two_objects")


def test_wilson_matches_newcombe_1998():
    # R. G. Newcombe, "Two-sided confidence intervals for the single proportion", Stat. Med. 17 (1998), table
    # I.
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
    ):
        interval = wilson(successes, n)
        assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert wilson(20, 20).high == 1.0


def _pairs(both, only_first, only_second, neither):
    first = [True] * (both + only_first) + [False] * (only_second + neither)
    second = [True] * both + [False] * only_first + [True] * only_second + [False] * neither
    return first, second


def test_paired_difference_matches_a_published_table():
    # Fagerland, Lydersen, Laake, "Statistical Analysis of Contingency Tables" (2017), chapter 8: complete
    # response before and after consolidation therapy (Cavo et al., 2012), Newcombe's square-and-add interval.
    interval = paired_difference(*_pairs(59, 6, 16, 80))
    assert interval.value == pytest.approx(-0.0621, abs=5e-5)
    assert (interval.low, interval.high) == (
        pytest.approx(-0.1186, abs=5e-5),
        pytest.approx(-0.0046, abs=5e-5),
    )


def test_paired_difference_turns_with_its_arguments_and_covers_equal_models():
    first, second = _pairs(30, 12, 4, 10)
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))
    same = paired_difference(first, first)
    assert same.low < 0 < same.high  # n is finite: equal verdicts do not prove equal models


def test_mean_difference_is_paired():
    # Student's sleep data (Biometrika 6, 1908, p. 20): t = -4.0621 with 9 degrees of freedom, and the 95% interval
    # that R's t.test(extra ~ group, paired = TRUE) gives.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    interval = paired_mean_difference([*first, np.nan], [*second, 1.0])
    assert (interval.value, interval.n) == (pytest.approx(-1.58), 10)
    assert (interval.low, interval.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-6)
    assert paired_mean_difference([1.0], [2.0]) is None


def test_tables_count_overall_and_by_category():
    table = accuracy_table([True, False, True, True], CATEGORIES)
    assert {name: (interval.value, interval.n) for name, interval in table.items()} == {
        "overall": (0.75, 4),
        "colors": (0.5, 2),
        "two_objects": (1.0, 2),
    }
    gain = difference_table([True, False, True, True], [True, True, False, False], CATEGORIES)
    assert [interval.value for interval in gain.values()] == [0.25, -0.5, 1.0]


def test_smaller_evaluation_is_a_balanced_part_of_a_larger_one():
    prompts, categories = [f"p{i}" for i in range(6)], ["a"] * 4 + ["b"] * 2
    large = balanced_requests(prompts, categories, 9)
    assert balanced_requests(prompts, categories, 4) == large[:4]
    assert [categories[request.prompt_index] for request in large[:4]] == ["a", "b", "a", "b"]
    assert large[6:] == [ImageRequest(r.prompt, r.prompt_index, 1) for r in large[:3]]


def test_diversity_counts_accepted_images_of_prompts_with_two():
    same, apart = np.tile([[1.0, 0.0]], (3, 1)), np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    accepted = np.array([[True, True, True], [True, True, False], [True, False, False]])
    diversity = diversity_of(np.stack([same, apart, apart]), accepted)
    assert (diversity.accepted, diversity.accepted_prompts) == (pytest.approx(0.5), 2)  # (0 + 1) / 2
    assert diversity.all == pytest.approx((0 + 4 / 3 + 4 / 3) / 3)
    assert diversity_of(same[None], np.zeros((1, 3), bool)).accepted is None
    # Compared over the prompts that have right images in both, so that the three numbers of a row fit together.
    other = diversity_of(np.stack([apart, apart, apart]), np.ones((3, 3), bool))
    row = diversity.difference(other)["accepted"]
    assert (row["mean"], row["compare_mean"], row["n"]) == (pytest.approx(0.5), pytest.approx(4 / 3), 2)
    assert row["value"] == pytest.approx(0.5 - 4 / 3)


class _Painter(nn.Cell):
    """A perfect rectified-flow model of one picture for each prompt: v = (x - picture) / sigma."""

    def construct(self, latents, timestep, picture):
        return (latents - picture) / (timestep / 1000.0).reshape((-1, 1, 1, 1))


class _Frame(nn.Cell):
    def construct(self, latents):
        return ms.ops.clip(latents, 0.0, 1.0)


class FakePipeline(Pipeline):
    """Draws its prompt's scene, or for prompts in `wrong` an empty picture."""

    latent_shape, image_size = (3, IMAGE_SIZE, IMAGE_SIZE), (IMAGE_SIZE, IMAGE_SIZE)

    def __init__(self, wrong=()):
        super().__init__(Path())
        self.wrong, self.denoiser, self._frame = wrong, _Painter(), _Frame()

    def _encode(self, prompts):
        pictures = [
            np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 240, np.uint8)
            if prompt in self.wrong or scene_of(prompt) is None
            else render(scene_of(prompt), np.random.default_rng(len(prompt)))
            for prompt in prompts
        ]
        return (np.stack(pictures).transpose(0, 3, 1, 2).astype(np.float32) / 255,)

    def unknown_words(self, prompt):
        return []

    def decode(self, latents):
        return self._frame(latents)


@pytest.fixture(autouse=True, scope="module")
def _graph_mode():
    setup_runtime(compile_cache=False)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    words = tuple(sorted({word for prompt in PROMPTS for word in prompt.split()}))
    save_word_tokenizer(words, 10, folder)
    text = CLIPTextConfig(len(words) + 3, 8, 16, 1, 2, 10, eos_token_id=len(words) + 2)
    model = CLIPModel(CLIPConfig(text, CLIPVisionConfig(8, 16, 1, 2, 3, IMAGE_SIZE, 16), projection_dim=8))
    save_model(model, folder)
    return str(folder)


def test_clip_score_is_the_cosine_of_both_towers(clip_folder):
    model, tokenizer = load_model(clip_folder), load_tokenizer(clip_folder)
    images = np.random.default_rng(0).random((2, 3, IMAGE_SIZE, IMAGE_SIZE), np.float32)
    mean = np.float32([0.48145466, 0.4578275, 0.40821073]).reshape(1, 3, 1, 1)
    std = np.float32([0.26862954, 0.26130258, 0.27577711]).reshape(1, 3, 1, 1)
    texts = ["a star and a cross", "a red circle"]
    _, image, text, _ = model(ms.Tensor(tokenizer(texts)), ms.Tensor((images - mean) / std))
    rewards = RewardSet([LabelledReward("clip", ClipScoreReward(clip_folder, scale=100.0))])
    scores = rewards.score(ms.Tensor(images), texts)["clip"]
    np.testing.assert_allclose(scores, 100 * (image.asnumpy() * text.asnumpy()).sum(-1), rtol=1e-4)


def _evaluator(clip_folder, *overrides):
    config = load_config(
        None, ["evaluation.images=8", "evaluation.num_steps=2", "evaluation.batch=6", *overrides]
    )
    return config, Evaluator(
        config, PromptSet(PROMPTS, tuple({"category": c} for c in CATEGORIES)), clip_folder
    )


def test_evaluation_judges_compares_and_compiles_once(clip_folder):
    config, evaluator = _evaluator(clip_folder)
    before, after = (
        FakePipeline(wrong=("a green square", "a circle and a square")),
        FakePipeline(("a green square",)),
    )
    base = evaluator.evaluate(before)
    compilations = probes.compilations()
    assert (
        evaluator.evaluate(before).rewards["ClipScoreReward"].tolist()
        == base.rewards["ClipScoreReward"].tolist()
    )
    # A second generator compiles its own step; judges and rewards are shared.
    assert probes.compilations() - compilations <= 1
    table = results(config, "after", evaluator.evaluate(after), "before", base)
    assert set(table) >= {"accuracy", "difference", "reward", "diversity", "checkpoint", "config", "seed"}
    assert {name: entry["value"] for name, entry in table["accuracy"].items()} == {
        "overall": 0.75,
        "colors": 0.5,
        "two_objects": 1.0,
    }
    assert table["difference"]["overall"]["value"] == 0.25
    assert table["agreement"]["overall"]["value"] == 1.0
    assert table["reward"]["ShapesRuleReward"]["mean"] > 0.7
    # The painter draws one picture for each prompt whatever the noise: no diversity at all.
    assert table["diversity"]["clip_distance"]["accepted"] == pytest.approx(0.0, abs=1e-5)
    json.dumps(table)


def _brightness(images, prompts, metadata):
    return images.mean(axis=(1, 2, 3)) / 255


def test_prompts_that_nothing_can_judge_have_rewards_and_diversity(clip_folder, monkeypatch):
    monkeypatch.setitem(registry._REGISTERED, "brightness", _brightness)
    terms = "reward.terms=[{name: brightness, label: light}]"
    config = load_config(None, ["evaluation.images=8", "evaluation.num_steps=2", "evaluation.batch=6", terms])
    mixed = Evaluator(config, PromptSet(("a red circle", "a cat"), ({}, {})), clip_folder)
    before, after = mixed.evaluate(FakePipeline(("a red circle",))), mixed.evaluate(FakePipeline())
    table = results(config, "after", after, "before", before)
    assert not {"accuracy", "agreement", "difference"} & set(table) and set(table["reward"]) == {"light"}
    assert table["reward_difference"]["light"]["high"] < 0 < table["reward_difference"]["light"]["n"] == 8
    for text in (report.format_comparison(table, "before", "after"), report.format_results(table)):
        assert "light" in text and "'a cat' is no caption of the shapes world" in text
    json.dumps(table, allow_nan=False)
    # A reward that refuses the prompts is found before anything is trained or sampled.
    with pytest.raises(ConfigError, match=r"evaluation.prompts .*'a cat'.*evaluation.after_training=false"):
        check_rewards(RewardSet([LabelledReward("rule", ShapesRuleReward())]), mixed.prompts)


def test_finished_run_is_evaluated_once(clip_folder, monkeypatch, tmp_path):
    """evaluation.json holds what evaluate.py --compare would, the summary its short form; a longer run starts anew."""
    overrides = ["evaluation.images=8", "evaluation.num_steps=2", "evaluation.batch=6", "train.iterations=1"]
    config = load_config(None, overrides)
    prompts = PromptSet(PROMPTS, tuple({"category": c} for c in CATEGORIES))
    models = {"small-flux": FakePipeline(("a green square", "a circle and a square"))}
    last = str(tmp_path / "run" / "checkpoints" / "iteration_000001")
    models[last] = FakePipeline(("a green square",))
    monkeypatch.setattr(report, "load_pipeline", lambda path, *_, **__: models[path])
    monkeypatch.setattr(report, "Evaluator", lambda *args: Evaluator(*args, clip_folder))
    with RunFolder(tmp_path / "run", config) as run:
        with write_folder_atomic(run.checkpoint(1)) as folder:
            (folder / "model_index.json").write_text("{}")
        run.write_summary({"iterations": 1})
        assert needs_evaluation(config, run)
        text = evaluate_finished(config, run, prompts)
        assert not needs_evaluation(config, run)
    row = next(line.split() for line in text.splitlines() if line.startswith("accuracy, overall"))
    assert row[2:5] == ["50.0%", "75.0%", "+25.0"] and row[-2:] == ["8", "images"]
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (saved["checkpoint"], saved["compare"]["checkpoint"]) == (last, "small-flux")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations"] == 1
    assert summary["evaluation"]["accuracy"]["difference"] == saved["difference"]["overall"]
    longer = load_config(None, [*overrides, "train.iterations=2"])
    with RunFolder(tmp_path / "run", longer, resume=True) as run:
        assert not run.finished and needs_evaluation(longer, run)


class _Noisy(nn.Cell):
    """v = x: the picture depends on the noise alone."""

    def construct(self, latents, timestep, picture):
        return 0.5 * latents + 0.0 * picture


def test_images_depend_on_seed_prompt_and_candidate_only():
    pipeline = FakePipeline()
    pipeline.denoiser = _Noisy()
    generator = ImageGenerator(pipeline, num_steps=2, batch=4)
    many = generator.images(requests_for(PROMPTS, 3), seed=7)
    compilations = probes.compilations()
    few = generator.images(requests_for(PROMPTS[:1], 2), seed=7)
    assert probes.compilations() == compilations
    np.testing.assert_array_equal(few, many[:2])
    assert len({image.tobytes() for image in many}) == len(many) == 12
    assert generator.images(requests_for(PROMPTS[:1], 2), seed=8).tobytes() != few.tobytes()


def test_generated_folder_has_images_grid_and_records(tmp_path):
    generator = ImageGenerator(FakePipeline(), num_steps=2, batch=4)
    requests = requests_for(PROMPTS[:3], 2)
    write_images(generator, requests, 7, check_output(tmp_path))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["grid.png", *(f"image_{i:04d}.png" for i in range(6)), "prompts.jsonl"]
    records = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert records[3] == {
        "file": "image_0003.png",
        "prompt": PROMPTS[1],
        "prompt_index": 1,
        "candidate": 1,
        "seed": 7,
    }
    with pytest.raises(ConfigError, match="already holds image_0000.png"):
        check_output(tmp_path)
    assert check_output(tmp_path, overwrite=True) == tmp_path and len(list(tmp_path.iterdir())) == 8


def test_bad_checkpoint_leaves_earlier_images_untouched(tmp_path):
    (tmp_path / "image_0000.png").write_bytes(b"precious")
    options = GenerateOptions(
        str(tmp_path), prompts=("a red circle",), checkpoint=str(tmp_path / "none"), overwrite=True
    )
    with pytest.raises(ConfigError, match="does not exist"):
        generate(load_config(), options)
    assert (tmp_path / "image_0000.png").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [([], 1, "no prompt"), (["a"], 0, "at least 1")],
)
def test_bad_requests_are_refused(prompts, count, message):
    with pytest.raises(ConfigError, match=message):
        requests_for(prompts, count)


def test_to_uint8_rounds_to_the_nearest():
    image = np.array([0.0, 0.5, 1.0, 1.7, -0.2, 0.1], np.float32).reshape(1, 1, 1, 6).repeat(3, 1)
    assert to_uint8(image)[0, 0, :, 0].tolist() == [0, 128, 255, 255, 0, 26]
