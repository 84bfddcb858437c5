"""The counts that follow from a config, their checks, and the table that a run prints at start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dancegrpo.config.errors import ConfigError
from dancegrpo.config.schema import Config


@dataclass(frozen=True)
class Counts:
    """Per iteration, unless the name says otherwise."""

    prompts: int
    candidates: int
    images: int
    trained_prompts: int
    trained_images: int
    steps: int
    stochastic_steps: int
    trained_per_image: int
    transitions: int
    updates: int
    transitions_per_update: int
    rollout_calls: int
    micro_batches_per_update: int


def derive_counts(config: Config) -> Counts:
    """Every count of an iteration; exact for a config that passed ``check_counts``."""
    train = config.train
    prompts = config.data.prompts_per_iteration
    images = prompts * train.candidates
    trained_prompts = min(prompts, train.trained_prompts or prompts)
    # The last transition does not reach the decoded image, so it is never trained. The small term undoes
    # binary rounding: 0.29 * 100 is 28.999999999999996.
    trained = math.floor(train.timestep_fraction * (config.sampler.num_steps - 1) + 1e-9)
    transitions = trained_prompts * train.candidates * trained
    per_update = transitions // train.updates_per_rollout
    return Counts(
        prompts=prompts,
        candidates=train.candidates,
        images=images,
        trained_prompts=trained_prompts,
        trained_images=trained_prompts * train.candidates,
        steps=config.sampler.num_steps,
        stochastic_steps=trained if config.sampler.stochastic == "trained" else config.sampler.num_steps,
        trained_per_image=trained,
        transitions=transitions,
        updates=train.updates_per_rollout,
        transitions_per_update=per_update,
        rollout_calls=images // train.micro_batch,
        micro_batches_per_update=per_update // train.micro_batch,
    )


def fit_micro_batch(config: Config) -> Config:
    """The config with ``train.micro_batch`` lowered to the largest number that divides its counts.

    As long as that is at least half of what is allowed, or all images of a small iteration fit into one call; else
    the config is returned as it is, and ``check_counts`` refuses it: calls of a few images are slow.
    """
    counts, allowed = derive_counts(config), config.train.micro_batch
    updates = config.train.updates_per_rollout
    common = math.gcd(counts.images, counts.transitions // updates)
    fitting = max((d for d in _divisors(common) if d <= allowed), default=0)
    if counts.transitions % updates or 2 * fitting < min(allowed, counts.images):
        return config
    return replace(config, train=replace(config.train, micro_batch=fitting))


def check_counts(config: Config, file: str = "config", overrides: Mapping[str, str] | None = None) -> None:
    """Refuses values that do not fit each other, counts that do not divide with the nearest values that do.

    Args:
        config: each value is valid by itself.
        file: what messages call the file.
        overrides: key -> the override that set it, such as ``{"train.candidates": "--set train.candidates=7"}``;
            messages name those of the keys at fault, and the file for the others.
    """
    counts, train = derive_counts(config), config.train

    def origin(*keys: str) -> str:
        given = [overrides[key] for key in keys if key in (overrides or {})]
        return " with ".join(given + ([file] if len(given) < len(keys) else []))

    images = ("data.prompts_per_iteration", "train.candidates", "train.micro_batch")
    trained = images if train.trained_prompts is None else ("train.trained_prompts", *images[1:])
    steps = ("sampler.num_steps", "train.timestep_fraction")
    if counts.trained_per_image < 1:
        smallest = math.ceil(1e4 / (counts.steps - 1)) / 1e4
        raise ConfigError(
            f"{origin(*steps)}: train.timestep_fraction {train.timestep_fraction} of {counts.steps - 1} trainable "
            f"steps (sampler.num_steps - 1) is less than one step; use at least {smallest}"
        )
    if config.sampler.stochastic == "trained" and train.timestep_selection != "first":
        raise ConfigError(
            f"{origin('sampler.stochastic', 'train.timestep_selection')}: sampler.stochastic: trained needs "
            f"train.timestep_selection: first, not {train.timestep_selection}: other selections train other steps "
            "for each image"
        )
    if counts.images % train.micro_batch:
        raise ConfigError(
            f"{origin(*images)}: data.prompts_per_iteration * train.candidates = {counts.prompts} * "
            f"{counts.candidates} = {counts.images} images do not divide by train.micro_batch = "
            f"{train.micro_batch}; nearest valid train.micro_batch: "
            f"{_nearest(train.micro_batch, _divisors(counts.images))}"
        )
    if counts.transitions % (train.updates_per_rollout * train.micro_batch):
        calls = counts.transitions // train.micro_batch
        raise ConfigError(
            f"{origin(*trained, *steps, 'train.updates_per_rollout')}: {counts.transitions} trained transitions "
            f"({counts.trained_images} images x {counts.trained_per_image} steps) do not divide by "
            f"train.updates_per_rollout * train.micro_batch = {train.updates_per_rollout} * {train.micro_batch}; "
            f"nearest valid train.updates_per_rollout: {_nearest(train.updates_per_rollout, _divisors(calls))}"
        )
    if train.warmup_iterations >= max(1, train.iterations):
        raise ConfigError(
            f"{origin('train.warmup_iterations', 'train.iterations')}: train.warmup_iterations must be below "
            f"train.iterations = {train.iterations}, got {train.warmup_iterations}"
        )
    if train.clip_unit == "absolute" and train.clip_range >= 1:
        raise ConfigError(
            f"{origin('train.clip_range', 'train.clip_unit')}: train.clip_range must be below 1, got "
            f"{train.clip_range:g}; to give it in standard deviations of the ratio set train.clip_unit=spread"
        )
    if config.model.drop_text_encoder and not config.output.embedding_cache:
        raise ConfigError(
            f"{origin('model.drop_text_encoder', 'output.embedding_cache')}: model.drop_text_encoder: true needs "
            "output.embedding_cache: true, which keeps what the encoder said"
        )
    for key, ranks in (("parallel.data", config.parallel.data), ("parallel.tensor", config.parallel.tensor)):
        if ranks != 1:
            raise ConfigError(f"{origin(key)}: {key} = {ranks} is not supported yet; the valid choice is 1")


def counts_table(config: Config) -> str:
    """The derived counts as aligned lines, for printing at the start of a run."""
    c, train = derive_counts(config), config.train
    rows = [
        ("prompts", c.prompts, "groups"),
        ("candidates", c.candidates, "per prompt"),
        (
            "images",
            c.images,
            f"{c.prompts} x {c.candidates}, in {c.rollout_calls} calls of {train.micro_batch}",
        ),
        (
            "denoising steps",
            c.steps,
            f"{c.stochastic_steps} of them stochastic, {c.trained_per_image} trained per image",
        ),
        ("trained transitions", c.transitions, f"{c.trained_images} x {c.trained_per_image}"),
        (
            "updates",
            c.updates,
            f"of {c.transitions_per_update} transitions, in "
            f"{c.micro_batches_per_update} micro-batches of {train.micro_batch}",
        ),
    ]
    lines = [f"Per iteration ({train.iterations} iterations):"]
    lines += [f"  {name:<20}{count:>8}  {note}" for name, count, note in rows]
    return "\n".join(lines)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(value: int, valid: list[int]) -> str:
    lower = [v for v in valid if v < value][-1:]
    upper = [v for v in valid if v > value][:1]
    return " or ".join(str(v) for v in lower + upper)
