"""Rewards: names from config, labels, host and device calls, composition."""

import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from dancegrpo.config import ConfigError, load_config
from dancegrpo.rewards import (
    FunctionReward,
    LabelledReward,
    RewardCell,
    RewardError,
    RewardFunction,
    RewardSet,
    build_reward,
    build_reward_set,
    register_reward,
)
from dancegrpo.runtime import probes
from dancegrpo.runtime.setup import setup_runtime

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "custom_reward.py"


@pytest.fixture(autouse=True, scope="module")
def _graph_mode():
    setup_runtime(compile_cache=False)


class MatchCell(RewardCell):
    """Brightness plus the prompt's length, to see that rows and prompts stay together."""

    def __init__(self):
        super().__init__()
        self.encoded_prompts = []

    def encode(self, prompts):
        self.encoded_prompts.extend(prompts)
        return (ms.Tensor(np.array([[len(p)] for p in prompts], np.float32)),)

    def construct(self, images, lengths):
        return images.mean((1, 2, 3)) + lengths[:, 0]


class GroupRank(RewardFunction):
    group_wise = True

    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts, metadata=None):
        self.calls.append((len(images), set(prompts), metadata))
        return np.argsort(np.argsort(images.mean((1, 2, 3))))


def _images(count, seed=0):
    return np.random.default_rng(seed).random((count, 3, 8, 8), np.float32)


def _set(*rewards, **settings):
    return RewardSet([LabelledReward(f"r{i}", reward) for i, reward in enumerate(rewards)], **settings)


def test_cell_encodes_each_prompt_once_and_compiles_once():
    cell, images = MatchCell(), _images(7)
    prompts = ["a", "bbb", "a", "bbb", "cc", "cc", "a"]
    rewards = _set(cell, batch=3)
    scores = rewards.score(ms.Tensor(images), prompts)["r0"]
    np.testing.assert_allclose(scores, images.mean((1, 2, 3)) + [len(p) for p in prompts], rtol=1e-6)
    before = probes.compilations()
    rewards.score(ms.Tensor(images[:5]), ["cc", "dddd", "a", "a", "cc"])
    assert probes.compilations() == before
    assert cell.encoded_prompts == ["a", "bbb", "cc", "dddd"]


def test_host_reward_sees_rounded_uint8_and_whole_groups():
    seen, rank = [], GroupRank()

    def keep(images, prompts, metadata):
        seen.append(images)
        return np.zeros(len(images))

    images = np.full((4, 3, 2, 2), 0.5, np.float32)
    images[1], images[2] = 1.2, -0.1
    metadata = [{"i": i} for i in range(4)]
    scores = _set(FunctionReward(keep), rank, group_size=2).score(
        ms.Tensor(images), ["a", "a", "a", "a"], metadata
    )
    assert seen[0].dtype == np.uint8 and seen[0].shape == (4, 2, 2, 3)
    assert [int(image[0, 0, 0]) for image in seen[0]] == [128, 255, 0, 128]
    assert rank.calls == [(2, {"a"}, metadata[:2]), (2, {"a"}, metadata[2:])]
    np.testing.assert_array_equal(scores["r1"], [0, 1, 0, 1])


def test_images_stay_on_the_device_without_host_rewards():
    class NoCopy:
        """Stands for a device tensor that must not be read on the host."""

        shape = (2, 3, 2, 2)

        def asnumpy(self):
            raise AssertionError("copied to the host")

    rewards = _set(MatchCell())
    assert not rewards.needs_host_images
    rewards.score(ms.Tensor(_images(2)), ["a", "b"])
    with pytest.raises(AssertionError, match="copied to the host"):
        _set(GroupRank(), group_size=2).score(NoCopy(), ["a", "a"])


def test_total_sums_or_normalises_within_groups():
    scores = {"r0": np.float32([1, 3, 10, 10]), "r1": np.float32([0, 100, 0, 300])}
    rewards = [LabelledReward("r0", GroupRank(), 2.0), LabelledReward("r1", GroupRank(), 1.0)]
    total = RewardSet(rewards, "sum", group_size=2).total(scores)
    np.testing.assert_allclose(total, [2, 106, 20, 320])
    half = np.sqrt(0.5)  # two values are -+ sqrt(1/2) sample standard deviations from their mean
    total = RewardSet(rewards, "normalized", group_size=2).total(scores)
    np.testing.assert_allclose(total, [-3 * half, 3 * half, -half, half], rtol=1e-5)


def test_equal_scores_normalise_to_exactly_zero():
    values = np.full(12, 0.1, np.float32)  # their float32 mean is not 0.1
    total = _set(GroupRank(), combine="normalized", group_size=12).total({"r0": values})
    np.testing.assert_array_equal(total, np.zeros(12))


def test_non_finite_scores_reach_the_trainer():
    rewards = _set(FunctionReward(lambda images, prompts, metadata: [1.0, np.nan, 2.0]), combine="sum")
    images = _images(3)
    images[2, 0, 0, 0] = np.inf  # a broken image must not get the finite score of its clipped pixels
    scores = rewards.score(ms.Tensor(images), ["a"] * 3)
    np.testing.assert_array_equal(np.isnan(rewards.total(scores)), [False, True, True])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"reward 'r0' must return 2 numbers of shape \(2,\), got shape \(1,\)"),
        ([[1.0], [2.0]], "got shape"),
        (None, "reward 'r0' must return 2 numbers"),
    ],
)
def test_wrong_scores_name_the_label(returned, message):
    with pytest.raises(RewardError, match=message):
        _set(FunctionReward(lambda images, prompts, metadata: returned)).score(
            ms.Tensor(_images(2)), ["a", "b"]
        )


def test_failing_reward_names_the_label():
    def fails(images, prompts, metadata):
        raise KeyError("weights")

    with pytest.raises(RewardError, match="reward 'r0' failed: KeyError: 'weights'"):
        _set(FunctionReward(fails)).score(ms.Tensor(_images(1)), ["a"])


def _terms(text):
    return load_config(None, [f"reward.terms={text}"]).reward


def test_cell_and_function_from_config_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    rewards = build_reward_set(
        _terms(
            '[{name: "examples/custom_reward.py:RednessReward", scale: 2.0},'
            ' {name: "examples/custom_reward.py:jpeg_size", weight: -1.0, label: size}]'
        )
    )
    assert rewards.labels == ("RednessReward", "size")
    images = np.zeros((2, 3, 16, 16), np.float32)
    images[0, 0] = 1.0
    images[1] = _images(1)[0].repeat(2, 1).repeat(2, 2)
    scores = rewards.score(ms.Tensor(images), ["a", "b"])
    assert scores["RednessReward"][0] == pytest.approx(2.0)
    assert scores["size"][1] > scores["size"][0]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("{name: clip_scor}", "did you mean 'clip_score'"),
        ("{name: 'examples/custom_reward.py:Redness'}", "it defines RednessReward, jpeg_size"),
        ("{name: 'examples/no_such.py:Reward'}", "no file examples/no_such.py"),
        ("{name: 'no_such_module:Reward'}", "cannot be imported"),
        ("{name: 'pathlib:Path'}", "derives neither from RewardFunction nor from RewardCell"),
        (
            "{name: 'examples/custom_reward.py:RednessReward', sclae: 2.0}",
            "takes scale, beside .*weight and label",
        ),
        ("{name: 'examples/custom_reward.py:jpeg_size', size: 2}", "it takes quality"),
        ("{name: shapes_rule, mode: strict}", "correct, mixed, score"),
        ("{name: shapes_rule, label: runs/a}", "runs/a"),
        ("{name: shapes_rule, label: 'two words'}", "label 'two words'"),
    ],
)
def test_bad_terms_are_refused_with_the_choices(term, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        build_reward_set(_terms(f"[{term}]"))


def test_repeated_label_is_refused():
    with pytest.raises(ConfigError, match=r"0 \(shapes_rule\) and 1 \(shapes_rule\) .* by the key label"):
        build_reward_set(_terms("[{name: shapes_rule}, {name: shapes_rule, mode: correct}]"))


def test_registered_name_is_found_and_not_taken_twice():
    register_reward("test_group_rank")(GroupRank)
    assert isinstance(build_reward("test_group_rank"), GroupRank)
    with pytest.raises(ConfigError, match="is taken by"):
        register_reward("test_group_rank")(MatchCell)


def test_shapes_rule_scores_renders_and_refuses_other_prompts():
    from dancegrpo.data.shapes_world import render, scene_of

    prompt = "a red circle to the left of a blue square"
    image = render(scene_of(prompt), np.random.default_rng(0))
    pixels = ms.Tensor(
        np.stack([image, np.full_like(image, 240)]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    )
    rewards = build_reward_set(
        _terms("[{name: shapes_rule}, {name: shapes_rule, mode: correct, label: right}]")
    )
    rewards.check([prompt])
    scores = rewards.score(pixels, [prompt, prompt])
    assert scores["right"].tolist() == [1.0, 0.0]
    assert scores["ShapesRuleReward"][0] > scores["ShapesRuleReward"][1]
    with pytest.raises(ConfigError, match="'a photo of a cat'"):
        rewards.check([prompt, "a photo of a cat"])


def test_host_rewards_import_without_mindspore():
    code = (
        "import sys; from dancegrpo.rewards import ShapesRuleReward, build_reward; "
        "build_reward('shapes_rule'); sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
