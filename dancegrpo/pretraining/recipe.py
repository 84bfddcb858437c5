"""What the shipped weights were trained with: sizes, lengths and rates of the four stages."""

from dataclasses import dataclass, field

STAGES = ("vae", "clip", "flow", "reward")
"""The stages in their order; each needs the ones before it."""


@dataclass(frozen=True)
class StageRecipe:
    """Optimisation of one stage: AdamW with linear warm-up, then a cosine to zero at `steps`, weights averaged.

    The stopping rule is the number of steps: the cosine ends there, and it was chosen once, by the validation
    figures in docs/pretraining.md, before any RL run.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 1e-2
    max_grad_norm: float = 1.0
    ema_decay: float = 0.998
    checkpoint_every: int = 250


@dataclass(frozen=True)
class VaeRecipe(StageRecipe):
    """Autoencoder: mean squared error plus a small KL term that keeps the latents smooth."""

    steps: int = 1800
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    kl_weight: float = 3e-5
    encoder_width: int = 256
    decoder_width: int = 192
    decoder_bottleneck: int = 32
    decoder_blocks: int = 2


@dataclass(frozen=True)
class ClipRecipe(StageRecipe):
    """CLIP: contrastive loss in which every caption brings a near miss of itself."""

    steps: int = 1300
    batch_size: int = 96
    learning_rate: float = 1e-3
    context: int = 12
    width: int = 128
    heads: int = 4
    text_layers: int = 3
    vision_layers: int = 4
    patch_size: int = 16  # one cell of the world's grid
    temperature: float = 0.025


@dataclass(frozen=True)
class FlowRecipe(StageRecipe):
    """FLUX: rectified flow on the autoencoder's latents under the CLIP text tower's states."""

    steps: int = 3000
    batch_size: int = 64
    learning_rate: float = 2e-3
    heads: int = 4
    head_dim: int = 32
    double_layers: int = 2
    single_layers: int = 4


@dataclass(frozen=True)
class RewardRecipe(StageRecipe):
    """The reward CLIP: the CLIP of stage 2 learns to judge pictures that the flow model paints."""

    steps: int = 800
    batch_size: int = 96  # pictures; groups * group_size of them are painted ones
    learning_rate: float = 7e-4
    groups: int = 16  # prompts whose pictures meet in a batch
    group_size: int = 4
    threshold: float = 0.5
    temperature: float = 0.1
    smoothing: float = 0.1  # targets are this far from 0 and 1
    close_share: float = (
        0.75  # of the loss: pairs of a picture with its own prompt, its caption, near misses of them
    )
    prompts: int = 768  # of the train split, painted
    rollout_images: int = 4  # pictures of a prompt as RL rollouts paint them,
    noisy_images: int = 2  # with noise in every step,
    evaluation_images: int = 1  # and as evaluation does
    renders: int = 1536
    held_out_prompts: int = 240  # of the validation list, for the figures
    held_out_images: int = 8  # of each, half as many as evaluation paints them


@dataclass(frozen=True)
class RunRecipe:
    """What the stages share: `seed` names every draw of weights, data and noise."""

    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """The four stages in their order."""

    run: RunRecipe = field(default_factory=RunRecipe)
    vae: VaeRecipe = field(default_factory=VaeRecipe)
    clip: ClipRecipe = field(default_factory=ClipRecipe)
    flow: FlowRecipe = field(default_factory=FlowRecipe)
    reward: RewardRecipe = field(default_factory=RewardRecipe)
