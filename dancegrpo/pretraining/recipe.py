"""What the shipped weights were trained with: sizes, lengths and rates of the three stages."""

from dataclasses import dataclass, field


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
class RunRecipe:
    """What the stages share: `seed` names every draw of weights, data and noise."""

    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """The three stages in their order."""

    run: RunRecipe = field(default_factory=RunRecipe)
    vae: VaeRecipe = field(default_factory=VaeRecipe)
    clip: ClipRecipe = field(default_factory=ClipRecipe)
    flow: FlowRecipe = field(default_factory=FlowRecipe)
