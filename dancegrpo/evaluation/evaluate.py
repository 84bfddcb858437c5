"""The fixed evaluation: how often a model draws what prompts say that it was not trained on.

16 steps without noise (Euler's ODE of a flow, DDIM of a diffusion process) from independent initial noise keyed by the
evaluation's seed and the prompt, the same prompts for every model, verdicts by `evaluation.verifier`, which is never a
reward. Two models are compared pair by pair, on the same prompts and noise. Prompts that are no captions of the shapes
world have no verdicts: there, rewards and diversity are all that is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dancegrpo.config import Config, ConfigError
from dancegrpo.data import PromptSet, load_prompts
from dancegrpo.data.prompts import BUILT_IN
from dancegrpo.data.shapes_world import IMAGE_SIZE, Scene, scene_of
from dancegrpo.evaluation import verifier
from dancegrpo.evaluation.diversity import DIVERSITY_IMAGES, Diversity, diversity_of
from dancegrpo.evaluation.statistics import (
    Interval,
    accuracy_table,
    difference_table,
    paired_mean_difference,
)
from dancegrpo.pipelines.base import Pipeline
from dancegrpo.pipelines.generate import ImageBatch, ImageGenerator, ImageRequest
from dancegrpo.rewards import LabelledReward, RewardSet, ShapesRuleReward, build_reward, shapes_verifier
from dancegrpo.rewards.base import class_name
from dancegrpo.rewards.clip_score import SHIPPED, ClipImageFeatures, ClipScoreReward
from dancegrpo.runtime.pixels import to_uint8

_DIVERSITY_SHARE = 14  # one prompt for so many of the evaluation's images: 72 prompts of 1,020 images
_RULE = ShapesRuleReward.__name__


@dataclass(frozen=True)
class Evaluation:
    """What one model did on the N evaluation images.

    Attributes:
        categories: N category names.
        correct: (N,) bool, by the evaluation's verifier; None where there are no verdicts.
        rule_correct: (N,) bool, by the reward's verifier; their agreement tells how far either can be
            trusted. rewards: label -> (N,) float32 scores.
        diversity: see `Diversity`.
        notes: sentences on what was not measured, and why.
    """

    categories: tuple[str, ...]
    correct: np.ndarray | None
    rule_correct: np.ndarray | None
    rewards: dict[str, np.ndarray]
    diversity: Diversity
    notes: tuple[str, ...] = ()

    def accuracy(self) -> dict[str, Interval]:
        """Share of right images, overall and per category, with Wilson intervals."""
        return {} if self.correct is None else accuracy_table(self.correct, self.categories)

    def agreement(self) -> dict[str, Interval]:
        """Share of images on which both verifiers say the same, overall and per category."""
        return (
            {} if self.correct is None else accuracy_table(self.correct == self.rule_correct, self.categories)
        )

    def difference(self, other: Evaluation) -> dict[str, Interval]:
        """Accuracy of this model minus the other's, paired, with Newcombe's intervals."""
        if self.categories != other.categories:
            raise ValueError("two evaluations can only be compared on the same prompts in the same order")
        if self.correct is None or other.correct is None:
            return {}
        return difference_table(self.correct, other.correct, self.categories)

    def reward_difference(self, other: Evaluation) -> dict[str, Interval | None]:
        """Mean score of this model minus the other's, paired by image, by label."""
        return {
            label: paired_mean_difference(values, other.rewards[label])
            for label, values in self.rewards.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """`accuracy` and `agreement` (if there are verdicts), `reward`, `diversity` and `notes` (if any), as
        they stand in the results."""
        verdicts = {"accuracy": self.accuracy(), "agreement": self.agreement()}
        table: dict[str, Any] = {name: _plain(entries) for name, entries in verdicts.items() if entries}
        table["reward"] = {
            label: {"mean": float(values.mean()), "std": float(values.std())}
            for label, values in self.rewards.items()
        }
        table["diversity"] = self.diversity.to_dict()
        return table | ({"notes": list(self.notes)} if self.notes else {})


def evaluation_prompts(config: Config) -> PromptSet:
    """The prompts that `evaluation.prompts` names; `data.prompt_column` holds them in lists of one's own.

    Raises:
        ConfigError: see `load_prompts`.
    """
    source = config.evaluation.prompts
    return load_prompts(source, "prompt" if source in BUILT_IN else config.data.prompt_column)


def check_rewards(rewards: RewardSet, prompts: PromptSet) -> None:
    """Lets the run's rewards refuse the evaluation's prompts.

    Raises:
        ConfigError: one does; the message says what can be done.
    """
    try:
        rewards.check(prompts.prompts)
    except ConfigError as error:
        raise _of_evaluation(prompts, error) from error


def check_drawable(pipeline: Pipeline, prompts: PromptSet) -> None:
    """Lets a model refuse the evaluation's prompts before it is trained.

    Raises:
        ConfigError: it cannot draw one of them; the message says what can be done.
    """
    try:
        pipeline.check_prompts(prompts.prompts)
    except ConfigError as error:
        raise _of_evaluation(prompts, error) from error


def _of_evaluation(prompts: PromptSet, error: ConfigError) -> ConfigError:
    return ConfigError(
        f"evaluation.prompts = {prompts.source or 'the list given'}: {error}, or another list for the evaluation "
        "(evaluation.after_training=false trains without one)"
    )


@dataclass
class Evaluator:
    """The evaluation's prompts, noise and judges, for any number of models.

    Args:
        config: `evaluation` says images, steps, seed and batch; the terms of `reward` are reported, and for
            captions of the shapes world also the CLIP score and the rule reward (group-wise ones are left out:
            no groups here).
        prompts: the prompt list. If all are captions of the shapes world, pictures are judged.
        clip: the CLIP of the CLIP score and of diversity, see `ClipScoreReward`; for other prompts diversity is
            that in the features of the run's own CLIP score, if it has one.

    Raises:
        ConfigError: a reward refuses the prompts.
    """

    config: Config
    prompts: PromptSet
    clip: str = SHIPPED
    _rewards: RewardSet | None = field(init=False)
    _features: ClipImageFeatures = field(init=False)

    def __post_init__(self):
        scenes = [scene_of(prompt) for prompt in self.prompts.prompts]
        strange = [p for p, scene in zip(self.prompts.prompts, scenes, strict=True) if scene is None]
        self._scenes: list[Scene] | None = None if strange else scenes
        self._notes = [_no_verdict(f"{strange[0]!r} is no caption of the shapes world")] if strange else []
        terms = self._run_terms()
        own = next((term.reward for term in terms if isinstance(term.reward, ClipScoreReward)), None)
        clip = own if strange and own is not None else ClipScoreReward(self.clip)
        if not strange and class_name(clip) not in {term.label for term in terms}:
            terms.append(LabelledReward(class_name(clip), clip))
        self._rewards = RewardSet(terms, batch=self.config.evaluation.batch) if terms else None
        if self._rewards is not None:
            check_rewards(self._rewards, self.prompts)
        self._features = ClipImageFeatures(clip)

    def _run_terms(self) -> list[LabelledReward]:
        terms = []
        for term in self.config.reward.terms:
            reward = build_reward(term.name, **term.arguments)
            label = term.label or class_name(reward)
            if getattr(reward, "group_wise", False):
                self._notes.append(f"{label} is left out: it compares the candidates of one prompt")
            else:
                terms.append(LabelledReward(label, reward))
        return terms

    def evaluate(self, pipeline: Pipeline, title: str = "evaluating") -> Evaluation:
        """Samples and judges one model. The images depend on the model and the evaluation's settings only."""
        settings, notes = self.config.evaluation, list(self._notes)
        generator = ImageGenerator(
            pipeline, num_steps=settings.num_steps, batch=settings.batch, shift=self.config.sampler.shift
        )
        scenes, size = self._scenes, tuple(pipeline.image_size)
        if scenes is not None and size != (IMAGE_SIZE, IMAGE_SIZE):
            scenes = None
            notes.append(
                _no_verdict(
                    f"the verifier reads {IMAGE_SIZE} x {IMAGE_SIZE} pixels, not {size[0]} x {size[1]}"
                )
            )
        categories = self._categories()
        requests = balanced_requests(self.prompts.prompts, categories, settings.images)
        verdicts, rules, scores = [], [], []
        for batch in generator.stream(requests, settings.seed, title):
            scores.append(self._score(batch))
            if scenes is not None:
                images = to_uint8(batch.images.asnumpy()[: batch.count])
                shown = [scenes[request.prompt_index] for request in batch.requests[: batch.count]]
                verdicts += verifier.verify_batch(images, shown)
                rules += shapes_verifier.verify_batch(images, shown)
        rewards = {label: np.concatenate([part[label] for part in scores]) for label in scores[0]}
        if scenes is not None and _RULE not in rewards:
            rewards[_RULE] = np.array([rule.score for rule in rules], np.float32)
        return Evaluation(
            tuple(categories[request.prompt_index] for request in requests),
            None if scenes is None else np.array([verdict.correct for verdict in verdicts], bool),
            None if scenes is None else np.array([rule.correct for rule in rules], bool),
            rewards,
            self._diversity(generator, scenes, title),
            tuple(notes),
        )

    def _categories(self) -> list[str]:
        return [scene.category for scene in self._scenes] if self._scenes else [""] * len(self.prompts)

    def _score(self, batch: ImageBatch) -> dict[str, np.ndarray]:
        if self._rewards is None:
            return {}
        prompts = [request.prompt for request in batch.requests]
        metadata = [self.prompts.metadata[request.prompt_index] for request in batch.requests]
        scores = self._rewards.score(batch.images, prompts, metadata)
        return {label: values[: batch.count] for label, values in scores.items()}

    def _diversity(self, generator: ImageGenerator, scenes: list[Scene] | None, title: str) -> Diversity:
        count = min(max(1, self.config.evaluation.images // _DIVERSITY_SHARE), len(self.prompts))
        chosen = [r.prompt_index for r in balanced_requests(self.prompts.prompts, self._categories(), count)]
        # Candidates from 1: candidate 0 is the image that the accuracy counts.
        requests = [
            ImageRequest(self.prompts.prompts[index], index, candidate)
            for index in chosen
            for candidate in range(1, DIVERSITY_IMAGES + 1)
        ]
        features, accepted = [], []
        for batch in generator.stream(requests, self.config.evaluation.seed, f"{title}, diversity"):
            features.append(self._features(batch.images).asnumpy()[: batch.count])
            if scenes is not None:
                shown = [scenes[request.prompt_index] for request in batch.requests[: batch.count]]
                images = to_uint8(batch.images.asnumpy()[: batch.count])
                accepted += [verdict.correct for verdict in verifier.verify_batch(images, shown)]
        shape = (len(chosen), DIVERSITY_IMAGES)
        groups = np.concatenate(features).reshape(*shape, -1)
        return diversity_of(groups, np.array(accepted).reshape(shape) if scenes is not None else None)


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
    """What `evaluate.py --json` writes; with `other`, also the paired differences, this minus other: `difference`
    (accuracy, if there are verdicts), `reward_difference` and `diversity_difference`."""
    table = evaluation.to_dict()
    if other is not None:
        difference = evaluation.difference(other)
        table |= {"difference": _plain(difference)} if difference else {}
        table["reward_difference"] = _plain(evaluation.reward_difference(other))
        table["diversity_difference"] = evaluation.diversity.difference(other.diversity)
        table["compare"] = {"checkpoint": compare, **other.to_dict()}
    return table | {"checkpoint": checkpoint, "config": config.to_dict(), "seed": config.evaluation.seed}


def _plain(table: dict[str, Interval | None]) -> dict[str, dict[str, float | int] | None]:
    return {name: interval and interval.to_dict() for name, interval in table.items()}


def _no_verdict(reason: str) -> str:
    return f"no accuracy: {reason}, so nothing can tell if an image shows what its prompt says"
