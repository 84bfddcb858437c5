"""The typed config tree: one frozen dataclass per section.

Each key carries its help text and its bounds in the field's metadata; ``load.py`` checks types, names and
bounds from there, so that a key is described in one place only. Loading is the normal way to build a config;
the dataclasses' defaults are a complete, valid configuration of the small model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _key(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: tuple = (),
) -> Any:
    """A config key: default, help text, closed (minimum, maximum) or open (above, below) bounds, choices."""
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"help": help, "choices": choices, **{k: v for k, v in bounds.items() if v is not None}}
    return field(default=default, metadata=metadata)


def _section(cls: type) -> Any:
    return field(default_factory=cls)


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    checkpoint: str = _key(
        "small-flux",
        "the model to start from: 'small-flux' (shipped), a folder in diffusers layout, or a run folder",
    )
    lora: str | None = _key(
        None,
        "a LoRA for that model: a safetensors file in diffusers' names, or a folder or run with one; it is trained on "
        "with lora.rank, and becomes part of the weights without",
    )
    height: int | None = _key(None, "height of the images in pixels; null: the model's own", minimum=1)
    width: int | None = _key(None, "width of the images in pixels; null: the model's own", minimum=1)
    text_encoder: str | None = _key(
        None,
        "folder of a CLIP, T5 or LLaMA with its tokenizer that gives FLUX its text tokens; null: the model's own",
    )
    max_sequence_length: int | None = _key(
        None,
        "text tokens of a T5 or LLaMA (FLUX 512, SD3 256, PixArt 120 or 300); null: the family's",
        minimum=1,
    )
    drop_text_encoder: bool = _key(
        False,
        "encode all prompts before training and give the text encoder's memory back; needs output.embedding_cache",
    )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank corrections that are trained in place of the weights, which stay as they are."""

    rank: int = _key(0, "rank of the corrections; 0 trains all weights", minimum=0)
    alpha: float | None = _key(
        None, "corrections are scaled by alpha / rank; null: by 1, or the alpha of model.lora", above=0.0
    )
    targets: tuple[str, ...] | None = _key(
        None,
        "layers that are corrected: their names or ends of them, as PEFT's target_modules; null: all projections of "
        "every attention, or those of model.lora",
    )
    dtype: str = _key(
        "float32",
        "number format in which the model holds the corrections; the optimizer's copy is float32",
        choices=("float32", "float16", "bfloat16"),
    )


@dataclass(frozen=True)
class SamplerConfig:
    """How images are sampled during training: the Markov decision process."""

    transition: str = _key("dance_sde", "registered transition kernel; the stochastic ones can be trained")
    eta: float = _key(
        0.6, "noise level of the SDE: more explores more and strays further from the ODE", minimum=0.0
    )
    num_steps: int = _key(
        6, "denoising steps of a rollout; fewer are faster, more are closer to deployment", minimum=2
    )
    stochastic: str = _key(
        "all",
        "steps that draw noise; trained: only those that are trained, the others are deterministic "
        "(needs train.timestep_selection: first)",
        choices=("all", "trained"),
    )
    shift: float | None = _key(
        None,
        "timestep shift s in sigma = s u / (1 + (s-1) u); above 1 spends steps on high noise; null: that of the "
        "checkpoint's scheduler",
        above=0.0,
    )
    truncate_timesteps: bool = _key(False, "give the model integer timesteps, as DanceGRPO's code does")
    guidance_scale: float | None = _key(
        None,
        "strength of guidance: an input of guidance-distilled models, else classifier-free, where 1 is off; null: the "
        "default of the model's family",
        minimum=0.0,
    )
    negative_prompt: str | None = _key(
        None, "what classifier-free guidance leads away from; null: nothing in particular"
    )


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    prompts: str = _key(
        "shapes/train",
        "built-in list (shapes/train, shapes/validation, shapes/evaluation), a txt, csv, jsonl or "
        "parquet file, a Hugging Face dataset folder, or '-' for standard input",
    )
    prompt_column: str = _key(
        "prompt", "column that holds the prompt in csv, jsonl, parquet and dataset folders"
    )
    prompts_per_iteration: int = _key(12, "prompts (groups) of one iteration", minimum=1)
    shuffle: bool = _key(True, "draw prompts in a new random order every epoch; false keeps the file's order")


@dataclass(frozen=True)
class RewardTerm:
    """One entry of ``reward.terms``; keys beside these three go to the reward's constructor."""

    name: str = _key("", "registered name, 'module:Class' or 'file.py:Class'")
    weight: float = _key(1.0, "factor in the total; 0 only logs the term")
    label: str | None = _key(None, "name in the metrics; the class's name by default")
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The entry as it stands in YAML."""
        return {"name": self.name, "weight": self.weight, "label": self.label, **self.arguments}


@dataclass(frozen=True)
class RewardConfig:
    """What is rewarded."""

    terms: tuple[RewardTerm, ...] = _key(
        (RewardTerm(name="shapes_rule"),), "list of {name, weight, label, constructor arguments}"
    )
    combine: str = _key(
        "sum",
        "how the terms make one reward: 'sum' adds weight * score, 'normalized' does so after each score "
        "was brought to mean 0 and deviation 1 within its group",
        choices=("sum", "normalized"),
    )


@dataclass(frozen=True)
class TrainConfig:
    """The GRPO loop."""

    iterations: int = _key(120, "iterations: rollout, score, advantage, update", minimum=1)
    candidates: int = _key(12, "images per prompt, the group that is compared", minimum=2)
    seed: int = _key(0, "the same seed gives the same run, byte by byte", minimum=0, maximum=2**63 - 1)
    micro_batch: int = _key(
        48,
        "at most so many images per graph call in the rollout and transitions per gradient graph call; the largest "
        "number that divides both is taken: memory grows with it, results do not depend on it beyond rounding",
        minimum=1,
    )
    updates_per_rollout: int = _key(1, "optimizer steps on the transitions of one rollout", minimum=1)
    timestep_fraction: float = _key(
        0.6, "share of the steps, the last one left out, that is trained per image", above=0.0, maximum=1.0
    )
    trained_prompts: int | None = _key(
        None,
        "train on at most so many of an iteration's prompts: those whose candidates' rewards differ most; null: all",
        minimum=1,
    )
    timestep_selection: str = _key(
        "random",
        "'random' draws the trained steps anew for every image, 'first' takes those with the most noise, which decide "
        "what the image shows",
        choices=("random", "first"),
    )
    shared_noise: bool = _key(True, "all candidates of a prompt start from the same initial noise")
    learning_rate: float = _key(1e-4, "peak learning rate of AdamW", minimum=0.0)
    lr_schedule: str = _key(
        "constant", "learning rate over the run, after warm-up", choices=("constant", "cosine", "linear")
    )
    warmup_iterations: int = _key(0, "iterations of linear warm-up", minimum=0)
    weight_decay: float = _key(1e-4, "decoupled weight decay of AdamW", minimum=0.0)
    beta1: float = _key(0.9, "decay of AdamW's first moment", above=0.0, below=1.0)
    beta2: float = _key(0.999, "decay of AdamW's second moment", above=0.0, below=1.0)
    adam_epsilon: float = _key(1e-8, "AdamW's epsilon", above=0.0)
    max_grad_norm: float = _key(1.0, "gradients are scaled down to this global norm", above=0.0)
    clip_range: float = _key(
        1e-4, "the ratio new/old is clipped to 1 +- this, in units of clip_unit", above=0.0
    )
    clip_unit: str = _key(
        "absolute",
        "'absolute': clip_range is the range itself, below 1; 'spread': so many standard deviations of the ratio after "
        "one update, as earlier rollouts measured them (the first one is not clipped)",
        choices=("absolute", "spread"),
    )
    advantage_clip: float = _key(5.0, "advantages are clipped to +- this", above=0.0)
    kl_weight: float = _key(
        0.0, "weight of the KL divergence to the starting model; 0 turns it off", minimum=0.0
    )
    ema_decay: float = _key(
        0.0,
        "decay of the averaged weights, which are then saved as the model's; 0 turns it off",
        minimum=0.0,
        below=1.0,
    )
    ema_warmup: bool = _key(
        True,
        "let the decay grow from small values, so that a short average is not biased to the starting weights",
    )
    max_skipped: int = _key(
        10, "stop after this many updates in a row that were skipped as not finite", minimum=1
    )
    control: str = _key(
        "none",
        "'shuffled_advantages' permutes advantages within each group: a run that must not learn",
        choices=("none", "shuffled_advantages"),
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation; fixed, so that it cannot be tuned to."""

    prompts: str = _key("shapes/evaluation", "held-out prompts, never trained on")
    images: int = _key(1020, "images, spread evenly over the prompts", minimum=1)
    num_steps: int = _key(16, "steps of the noise-free sampler", minimum=1)
    seed: int = _key(
        20250, "seed of the evaluation noise; independent of train.seed", minimum=0, maximum=2**63 - 1
    )
    batch: int = _key(60, "images per graph call", minimum=1)
    after_training: bool = _key(
        True, "a run ends with this evaluation of the model that it started from and of the one that it made"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread over devices."""

    data: int = _key(1, "data-parallel ranks", minimum=1)
    tensor: int = _key(1, "tensor-parallel ranks", minimum=1)


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats."""

    compute: str = _key(
        "float32",
        "number format of the model's matrix products; weights, log-probabilities and "
        "the optimizer stay float32",
        choices=("float32", "float16", "bfloat16"),
    )


@dataclass(frozen=True)
class OutputConfig:
    """What a run leaves behind."""

    checkpoint_every: int = _key(
        10, "iterations between checkpoints; the last one is always saved", minimum=1
    )
    keep_last: int = _key(2, "checkpoints that are kept; 0 keeps all", minimum=0)
    sample_every: int = _key(
        10, "iterations between sample grids on fixed prompts and noise; 0 turns them off", minimum=0
    )
    sample_prompts: int = _key(8, "prompts of a sample grid", minimum=1)
    tensorboard: bool = _key(True, "write TensorBoard events into the run folder")
    compile_cache: bool = _key(True, "keep compiled graphs in the user's cache folder for the next start")
    embedding_cache: bool = _key(True, "keep encoded prompts in the user's cache folder for the next run")
    embedding_cache_gb: float = _key(
        8.0, "10^9 bytes of encoded prompts that are kept there, of all runs; the oldest go first", above=0.0
    )


@dataclass(frozen=True)
class Config:
    """The whole tree."""

    model: ModelConfig = _section(ModelConfig)
    lora: LoraConfig = _section(LoraConfig)
    sampler: SamplerConfig = _section(SamplerConfig)
    data: DataConfig = _section(DataConfig)
    reward: RewardConfig = _section(RewardConfig)
    train: TrainConfig = _section(TrainConfig)
    evaluation: EvaluationConfig = _section(EvaluationConfig)
    parallel: ParallelConfig = _section(ParallelConfig)
    precision: PrecisionConfig = _section(PrecisionConfig)
    output: OutputConfig = _section(OutputConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dictionaries, as they stand in YAML."""
        tree = {}
        for section in dataclasses.fields(self):
            values = getattr(self, section.name)
            tree[section.name] = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}
        tree["reward"]["terms"] = [term.to_dict() for term in self.reward.terms]
        tree["lora"]["targets"] = self.lora.targets and list(self.lora.targets)
        return tree
