"""Several rewards as one: who is called with what, and how their scores become one number."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dancegrpo.config import ConfigError, RewardConfig, choices_text
from dancegrpo.rewards.base import Metadata, RewardError, RewardFunction, class_name
from dancegrpo.rewards.registry import build_reward
from dancegrpo.runtime.pixels import to_uint8

COMBINE = ("sum", "normalized")
_LABEL = re.compile(r"[A-Za-z0-9_.\-]+")
_ENCODED_KEPT = 16_384


@dataclass(frozen=True)
class LabelledReward:
    """A reward with its weight in the total, the label that it has in metrics, and its name in the config."""

    label: str
    reward: Any  # RewardFunction or RewardCell
    weight: float = 1.0
    name: str = ""


def build_reward_set(
    config: RewardConfig, *, group_size: int | None = None, batch: int | None = None
) -> RewardSet:
    """The rewards of `reward.terms`, ready to score.

    Raises:
        ConfigError: an unknown reward, wrong settings, a label that holds a path or stands twice.
    """
    terms = []
    for term in config.terms:
        reward = build_reward(term.name, **term.arguments)
        label = term.label or class_name(reward)
        terms.append(LabelledReward(label, reward, float(term.weight), term.name))
    return RewardSet(terms, config.combine, group_size=group_size, batch=batch)


class RewardSet:
    """Scores images by several rewards.

    Images stay on the device for reward cells; only if a host reward is among the terms are they copied,
    once, as uint8.
    """

    def __init__(
        self,
        terms: Sequence[LabelledReward],
        combine: str = "sum",
        *,
        group_size: int | None = None,
        batch: int | None = None,
    ):
        """
        Args:
            terms: rewards with labels and weights.
            combine: `sum`: the weighted sum of the scores; `normalized`: each score is first normalised
                within its group (minus mean, over sample standard deviation), so that no term outweighs
                another by its scale.
            group_size: candidates per prompt; needed by `normalized` and by group-wise rewards. Candidates of
                one prompt stand beside each other.
            batch: images per call of a reward cell; None takes the number of images of the first call.

        Raises:
            ConfigError: no terms, an unknown `combine`, a bad or repeated label, or a missing group size.
        """
        if not terms:
            raise ConfigError("reward.terms: at least one reward is needed.")
        if combine not in COMBINE:
            raise ConfigError(f"reward.combine: unknown {combine!r}; {choices_text(str(combine), COMBINE)}")
        _check_labels(terms)
        self.terms = tuple(terms)
        self.combine = combine
        self.group_size = group_size
        self._hosts = {t.label: t.reward for t in terms if isinstance(t.reward, RewardFunction)}
        self._cells = {
            t.label: _CellRunner(t.label, t.reward, batch) for t in terms if t.label not in self._hosts
        }
        needs_groups = combine == "normalized" or any(reward.group_wise for reward in self._hosts.values())
        if needs_groups and not group_size:
            raise ConfigError(
                "reward: 'normalized' and group-wise rewards need the number of candidates per prompt."
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the terms, in the order of the config."""
        return tuple(term.label for term in self.terms)

    @property
    def needs_host_images(self) -> bool:
        """True if a term reads uint8 images on the host."""
        return bool(self._hosts)

    def check(self, prompts: Sequence[str]) -> None:
        """Lets every reward refuse prompts that it cannot score; call it before anything expensive.

        Raises:
            ConfigError: from the reward that refuses.
        """
        for term in self.terms:
            term.reward.check(prompts)

    def score(
        self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> dict[str, np.ndarray]:
        """Scores of all terms.

        Args:
            images: (N, 3, H, W) float in [0, 1], a device tensor or an array.
            prompts: N prompts; metadata: N records or None.

        Returns:
            label -> (N,) float32. Scores that are not finite are passed on: the trainer's guard skips and
            counts them. Host rewards give NaN for an image that has a value that is not finite.

        Raises:
            RewardError: a reward failed, or returned something else than N numbers; names the label.
        """
        if len(prompts) != images.shape[0] or (metadata is not None and len(metadata) != len(prompts)):
            raise ValueError(
                f"{images.shape[0]} images, {len(prompts)} prompts and "
                f"{'no' if metadata is None else len(metadata)} metadata records do not match."
            )
        host = _HostImages.of(images) if self._hosts else None
        scores = {}
        for term in self.terms:
            with _named(term.label):
                if term.label in self._cells:
                    scores[term.label] = self._cells[term.label](images, prompts)
                else:
                    scores[term.label] = self._score_on_host(term.label, host, prompts, metadata)
        return scores

    def total(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """(N,) float32: the weighted sum of all scores, each normalised within its group if so configured."""
        total = np.zeros_like(scores[self.terms[0].label], np.float32)
        for term in self.terms:
            if term.weight == 0:  # only logged: 0 times not-a-number would not be 0
                continue
            values = np.asarray(scores[term.label], np.float32)
            if self.combine == "normalized":
                values = normalize_in_groups(values, self.group_size)
            total += np.float32(term.weight) * values
        return total

    def _score_on_host(
        self, label: str, host: _HostImages, prompts: Sequence[str], metadata: Metadata | None
    ) -> np.ndarray:
        reward = self._hosts[label]
        count = len(prompts)
        size = self.group_size if reward.group_wise else count
        if count % size:
            raise RewardError(
                f"reward {label!r} needs whole groups of {size} candidates, got {count} images."
            )
        scores = []
        for start in range(0, count, size):
            part = slice(start, start + size)
            given = None if metadata is None else metadata[part]
            scores.append(_checked(label, reward(host.pixels[part], list(prompts[part]), given), size))
        return np.where(host.finite, np.concatenate(scores), np.float32("nan"))


def normalize_in_groups(values: np.ndarray, group_size: int) -> np.ndarray:
    """Scores minus their group's mean, over their group's sample standard deviation (plus 1e-8).

    Args:
        values: (N,) float32, groups of `group_size` beside each other.

    Returns:
        (N,) float32; a group of equal scores gives zeros (tested before the mean is taken: in float32 the
        mean of equal numbers can differ from them).
    """
    groups = np.asarray(values, np.float64).reshape(-1, group_size)
    dead = groups.max(axis=1, keepdims=True) == groups.min(axis=1, keepdims=True)
    centred = groups - groups.mean(axis=1, keepdims=True)
    spread = groups.std(axis=1, ddof=1, keepdims=True) if group_size > 1 else np.zeros_like(dead, np.float64)
    return np.where(dead, 0.0, centred / (spread + 1e-8)).astype(np.float32).reshape(-1)


@dataclass(frozen=True)
class _HostImages:
    pixels: np.ndarray  # (N, H, W, 3) uint8
    finite: np.ndarray  # (N,) bool

    @classmethod
    def of(cls, images: Any) -> _HostImages:
        """The one place where images leave the device."""
        values = images.asnumpy() if hasattr(images, "asnumpy") else np.asarray(images)
        pixels = to_uint8(values)
        pixels.flags.writeable = False  # all host rewards share them
        return cls(pixels, np.isfinite(values).all(axis=(1, 2, 3)))


class _CellRunner:
    """Calls a reward cell at one batch shape, with prompts encoded once each."""

    def __init__(self, label: str, cell: Callable[..., Any], batch: int | None):
        self.label = label
        self.cell = cell
        self.batch = batch
        self._rows: OrderedDict[str, tuple[np.ndarray, ...]] = OrderedDict()

    def __call__(self, images: Any, prompts: Sequence[str]) -> np.ndarray:
        from mindspore import Tensor  # here, so that a set of host rewards runs without MindSpore

        count = len(prompts)
        self.batch = self.batch or count
        rows = self._encode(prompts)
        scores = []
        for start in range(0, count, self.batch):
            # The last batch is filled up with its last image, so that every call has the compiled shape.
            index = np.minimum(np.arange(start, start + self.batch), count - 1)
            part = images if count == self.batch else _take(images, index)
            encoded = [
                Tensor(np.stack(column)) for column in zip(*(rows[prompts[i]] for i in index), strict=True)
            ]
            result = self.cell(part if isinstance(part, Tensor) else Tensor(part), *encoded)
            scores.append(_checked(self.label, result, self.batch))
        return np.concatenate(scores)[:count]

    def _encode(self, prompts: Sequence[str]) -> dict[str, tuple[np.ndarray, ...]]:
        distinct = list(dict.fromkeys(prompts))
        new = [prompt for prompt in distinct if prompt not in self._rows]
        if new:
            encoded = self.cell.encode(new)
            if not isinstance(encoded, tuple | list) or any(len(part) != len(new) for part in encoded):
                raise RewardError(
                    f"reward {self.label!r}: encode must return a tuple of tensors with "
                    f"{len(new)} rows, one for each prompt."
                )
            columns = [_as_array(part) for part in encoded]
            self._rows.update(
                (prompt, tuple(column[i] for column in columns)) for i, prompt in enumerate(new)
            )
        needed = {prompt: self._rows[prompt] for prompt in distinct}
        while len(self._rows) > _ENCODED_KEPT:
            self._rows.popitem(last=False)
        return needed


@contextmanager
def _named(label: str) -> Iterator[None]:
    """Any failure of a reward becomes a `RewardError` that names its label."""
    try:
        yield
    except (RewardError, ConfigError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise RewardError(f"reward {label!r} failed: {type(error).__name__}: {text}") from error


def _checked(label: str, scores: Any, count: int) -> np.ndarray:
    """(count,) float32, or an error that says what came instead."""
    try:
        values = _as_array(scores).astype(np.float32)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {label!r} must return {count} numbers, got {type(scores).__name__}."
        ) from None
    if values.shape != (count,):
        raise RewardError(
            f"reward {label!r} must return {count} numbers of shape ({count},), got shape {values.shape}."
        )
    return values


def _take(images: Any, index: np.ndarray) -> Any:
    """Rows of a device tensor or of an array."""
    if isinstance(images, np.ndarray):
        return images[index]
    from mindspore import Tensor, ops

    return ops.gather(images, Tensor(index.astype(np.int32)), 0)


def _as_array(values: Any) -> np.ndarray:
    return values.asnumpy() if hasattr(values, "asnumpy") else np.asarray(values)


def _check_labels(terms: Sequence[LabelledReward]) -> None:
    places: dict[str, list[int]] = {}
    for place, term in enumerate(terms):
        if not _LABEL.fullmatch(term.label):
            raise ConfigError(
                f"reward.terms: label {term.label!r} must be made of letters, digits, '_', '-' and '.'."
            )
        places.setdefault(term.label, []).append(place)
    for label, taken in places.items():
        if len(taken) > 1:
            named = " and ".join(
                f"{place} ({terms[place].name or class_name(terms[place].reward)})" for place in taken
            )
            raise ConfigError(
                f"reward.terms: the terms {named} have the same label {label!r}; give them different ones by the "
                f"key label, for example label: {label}_2"
            )
