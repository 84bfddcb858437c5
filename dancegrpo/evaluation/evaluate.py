"""The fixed evaluation: how often a model draws what prompts say that it was not trained on.

16 steps of the Euler ODE, independent noise keyed by the evaluation's seed and the prompt, the same prompts
for every model, verdicts by `evaluation.verifier`, which is never a reward. Two models are compared pair by
pair, on the same prompts and noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dancegrpo.config import Config, ConfigError
from dancegrpo.data import PromptSet
from dancegrpo.data.shapes_world import Scene, scene_of
from dancegrpo.evaluation import verifier
from dancegrpo.evaluation.statistics import Interval, accuracy_table, difference_table
from dancegrpo.pipelines.base import Pipeline
from dancegrpo.pipelines.generate import ImageGenerator, ImageRequest
from dancegrpo.rewards import LabelledReward, RewardSet, ShapesRuleReward, build_reward, shapes_verifier
from dancegrpo.rewards.base import class_name
from dancegrpo.rewards.clip_score import SHIPPED, ClipImageFeatures, ClipScoreReward
from dancegrpo.runtime.pixels import to_uint8

DIVERSITY_PROMPTS_PER_CATEGORY = 4
DIVERSITY_IMAGES = 10


@dataclass(frozen=True)
class Diversity:
    """CLIP distance (1 - cosine) between images of one prompt, mean over pairs, then over prompts.

    A model that draws one right picture again and again has a high accuracy and a distance near 0.

    Attributes:
        accepted: over the images that the verifier accepts, of prompts with two or more of them; None if no
            prompt has.
        accepted_prompts: prompts that `accepted` is the mean of.
        all: over all images.
        prompts, images_per_prompt: what was sampled.
    """

    accepted: float | None
    accepted_prompts: int
    all: float
    prompts: int
    images_per_prompt: int

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the results, under `clip_distance`."""
        return {
            "clip_distance": {
                "accepted": self.accepted,
                "accepted_prompts": self.accepted_prompts,
                "all": self.all,
            },
            "prompts": self.prompts,
            "images_per_prompt": self.images_per_prompt,
        }


@dataclass(frozen=True)
class Evaluation:
    """What one model did on the N evaluation images.

    Attributes:
        categories: N category names.
        correct: (N,) bool, by the evaluation's verifier.
        rule_correct: (N,) bool, by the reward's verifier; their agreement tells how far either can be
        trusted. rewards: label -> (N,) float32 scores.
        diversity: see `Diversity`.
    """

    categories: tuple[str, ...]
    correct: np.ndarray
    rule_correct: np.ndarray
    rewards: dict[str, np.ndarray]
    diversity: Diversity

    def accuracy(self) -> dict[str, Interval]:
        """Share of right images, overall and per category, with Wilson intervals."""
        return accuracy_table(self.correct, self.categories)

    def agreement(self) -> dict[str, Interval]:
        """Share of images on which both verifiers say the same, overall and per category."""
        return accuracy_table(self.correct == self.rule_correct, self.categories)

    def difference(self, other: Evaluation) -> dict[str, Interval]:
        """Accuracy of this model minus the other's, paired, with Newcombe's intervals."""
        if self.categories != other.categories:
            raise ValueError("two evaluations can only be compared on the same prompts in the same order")
        return difference_table(self.correct, other.correct, self.categories)

    def to_dict(self) -> dict[str, Any]:
        """`accuracy`, `agreement`, `reward` and `diversity` as they stand in the results."""
        return {
            "accuracy": _plain(self.accuracy()),
            "agreement": _plain(self.agreement()),
            "reward": {
                label: {"mean": float(values.mean()), "std": float(values.std())}
                for label, values in self.rewards.items()
            },
            "diversity": self.diversity.to_dict(),
        }


@dataclass
class Evaluator:
    """The evaluation's prompts, noise and judges, for any number of models.

    Args:
        config: `evaluation` says prompts, images, steps, seed and batch; the terms of `reward` are reported
            beside the CLIP score and the rule reward (group-wise ones are left out: no groups here).
        prompts: the prompt list, captions of the shapes world.
        clip: the CLIP of the CLIP score and of diversity; see `ClipScoreReward`.

    Raises:
        ConfigError: a prompt is no caption of the shapes world.
    """

    config: Config
    prompts: PromptSet
    clip: str = SHIPPED
    _rewards: RewardSet = field(init=False)
    _features: ClipImageFeatures = field(init=False)

    def __post_init__(self):
        self._scenes = _scenes_of(self.prompts.prompts)
        clip = ClipScoreReward(self.clip)
        rewards = _reported_rewards(self.config, clip)
        rewards.check(self.prompts.prompts)
        self._rewards, self._features = rewards, ClipImageFeatures(clip)

    def evaluate(self, pipeline: Pipeline) -> Evaluation:
        """Samples and judges one model. The images depend on the model and the evaluation's settings only."""
        settings = self.config.evaluation
        generator = ImageGenerator(pipeline, num_steps=settings.num_steps, batch=settings.batch)
        requests = balanced_requests(
            self.prompts.prompts, [s.category for s in self._scenes], settings.images
        )
        correct, rule_correct, scores = [], [], []
        for batch in generator.stream(requests, settings.seed, "evaluating"):
            prompts = [request.prompt for request in batch.requests]
            metadata = [self.prompts.metadata[request.prompt_index] for request in batch.requests]
            rewards = self._rewards.score(batch.images, prompts, metadata)
            scores.append({label: values[: batch.count] for label, values in rewards.items()})
            images = to_uint8(batch.images.asnumpy()[: batch.count])
            scenes = [self._scenes[request.prompt_index] for request in batch.requests[: batch.count]]
            correct += [verdict.correct for verdict in verifier.verify_batch(images, scenes)]
            rule_correct += [verdict.correct for verdict in shapes_verifier.verify_batch(images, scenes)]
        return Evaluation(
            tuple(self._scenes[request.prompt_index].category for request in requests),
            np.array(correct, bool),
            np.array(rule_correct, bool),
            {label: np.concatenate([part[label] for part in scores]) for label in self._rewards.labels},
            self._diversity(generator),
        )

    def _diversity(self, generator: ImageGenerator) -> Diversity:
        categories = [scene.category for scene in self._scenes]
        chosen = balanced_requests(
            self.prompts.prompts, categories, DIVERSITY_PROMPTS_PER_CATEGORY * len(set(categories))
        )
        chosen = list(dict.fromkeys(request.prompt_index for request in chosen))
        # Candidates from 1: candidate 0 is the image that the accuracy counts.
        requests = [
            ImageRequest(self.prompts.prompts[index], index, candidate)
            for index in chosen
            for candidate in range(1, DIVERSITY_IMAGES + 1)
        ]
        features, accepted = [], []
        for batch in generator.stream(requests, self.config.evaluation.seed, "diversity"):
            features.append(self._features(batch.images).asnumpy()[: batch.count])
            scenes = [self._scenes[request.prompt_index] for request in batch.requests[: batch.count]]
            images = to_uint8(batch.images.asnumpy()[: batch.count])
            accepted += [verdict.correct for verdict in verifier.verify_batch(images, scenes)]
        groups = np.concatenate(features).reshape(len(chosen), DIVERSITY_IMAGES, -1)
        return diversity_of(groups, np.array(accepted).reshape(len(chosen), DIVERSITY_IMAGES))


def diversity_of(features: np.ndarray, accepted: np.ndarray) -> Diversity:
    """Mean pairwise distances.

    Args:
        features: (P, K, D) of unit length, K images of each of P prompts.
        accepted: (P, K) bool.
    """
    right = [
        _mean_distance(group[mask]) for group, mask in zip(features, accepted, strict=True) if mask.sum() > 1
    ]
    everything = [_mean_distance(group) for group in features]
    return Diversity(
        float(np.mean(right)) if right else None, len(right), float(np.mean(everything)), *accepted.shape
    )


def _mean_distance(features: np.ndarray) -> float:
    count = len(features)
    pairs = np.triu_indices(count, 1)
    return float((1.0 - features.astype(np.float64) @ features.T.astype(np.float64))[pairs].mean())


def balanced_requests(prompts: Sequence[str], categories: Sequence[str], images: int) -> list[ImageRequest]:
    """The evaluation's images: prompts taken from the categories in turn, each with candidate 0 first.

    So any number of images is spread evenly over categories, and a smaller evaluation is a part of a larger
    one: an image depends on its prompt and candidate, not on how many there are. More images than prompts go
    round the list again with the next candidate.
    """
    queues = [
        [i for i, category in enumerate(categories) if category == name] for name in dict.fromkeys(categories)
    ]
    longest = max(len(queue) for queue in queues)
    order = [queue[row] for row in range(longest) for queue in queues if row < len(queue)]
    picks = [(order[i % len(order)], i // len(order)) for i in range(images)]
    return [ImageRequest(prompts[index], index, candidate) for index, candidate in picks]


def results(
    config: Config,
    checkpoint: str,
    evaluation: Evaluation,
    compare: str | None = None,
    other: Evaluation | None = None,
) -> dict[str, Any]:
    """What `evaluate.py --json` writes; with `other`, also the paired `difference`, this minus other."""
    table = evaluation.to_dict()
    if other is not None:
        table["difference"] = _plain(evaluation.difference(other))
        table["compare"] = {"checkpoint": compare, **other.to_dict()}
    return table | {"checkpoint": checkpoint, "config": config.to_dict(), "seed": config.evaluation.seed}


def _plain(table: dict[str, Interval]) -> dict[str, dict[str, float | int]]:
    return {name: interval.to_dict() for name, interval in table.items()}


def _scenes_of(prompts: Sequence[str]) -> list[Scene]:
    scenes = [scene_of(prompt) for prompt in prompts]
    strange = [prompt for prompt, scene in zip(prompts, scenes, strict=True) if scene is None]
    if strange:
        raise ConfigError(
            f"evaluation.prompts: {strange[0]!r} is no caption of the shapes world, so nothing can tell "
            "if an image shows it; use shapes/evaluation, or shapes/validation for tuning"
        )
    return scenes


def _reported_rewards(config: Config, clip: ClipScoreReward) -> RewardSet:
    """The run's own terms, and the two that are always reported, unless a term of the run has their label."""
    terms = []
    for term in config.reward.terms:
        reward = build_reward(term.name, **term.arguments)
        if not getattr(reward, "group_wise", False):
            terms.append(LabelledReward(term.label or class_name(reward), reward))
    taken = {term.label for term in terms}
    standard = [LabelledReward(class_name(reward), reward) for reward in (clip, ShapesRuleReward())]
    terms += [term for term in standard if term.label not in taken]
    return RewardSet(terms, batch=config.evaluation.batch)
