"""Weights of public checkpoints and the memory that training them takes, from their configs; nothing is allocated.

    python examples/model_sizes.py [--rank 32] [--markdown] [NAME ...]

Gigabytes are 10^9 bytes, of weights and what belongs to them. Activations come on top: they depend on the size of the
images and on train.micro_batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.config import ConfigError
from dancegrpo.runtime.cli import run_cli

BACKBONES = ("transformer", "unet")
HELD = 4
"""Bytes of a weight of the backbone that is trained, float32 whatever it computes in."""
TRAINED = 20
"""Further bytes of a weight that is trained: the optimizer's float32 copy, the sum of the gradients and the gradient of
one micro-batch, and AdamW's two moments."""
FROZEN = 2
"""Bytes of a weight that is not trained, which is held in the format of the products; 4 where that is float32."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights: of the backbone, of a LoRA for it, of the text encoders together, of the VAE."""

    backbone: int
    lora: int
    text: int
    vae: int

    @property
    def full(self) -> int:
        """Bytes to train all weights of the backbone."""
        return self.backbone * (HELD + TRAINED)

    @property
    def with_lora(self) -> int:
        """Bytes to train a LoRA for it."""
        return self.backbone * FROZEN + self.lora * (HELD + TRAINED)


def measure(models: Mapping[str, dict], rank: int) -> Sizes:
    """The sizes of a pipeline's models by component name; their parameters are described and never made."""
    from mindspore.nn.utils import no_init_parameters

    from dancegrpo.models.loading import build_model, named_parameters
    from dancegrpo.models.lora import find_targets

    counts, lora = {}, 0
    for name, config in models.items():
        with no_init_parameters():
            model = build_model(config, name)
        counts[name] = sum(parameter.size for parameter in named_parameters(model).values())
        if name in BACKBONES:
            layers = find_targets(model).values()
            lora = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    return Sizes(
        backbone=sum(count for name, count in counts.items() if name in BACKBONES),
        lora=lora,
        text=sum(count for name, count in counts.items() if name.startswith("text_encoder")),
        vae=counts["vae"],
    )


def table_rows(names: Sequence[str], rank: int) -> list[list[str]]:
    """The table with its head, as texts."""
    from public_configs import PUBLIC

    rows = [
        ["checkpoint", "backbone, weights", "in 16 bits", "all weights", f"LoRA, rank {rank}", "its weights"]
        + ["text encoders", "VAE"]
    ]
    for name in names:
        sizes = measure(PUBLIC[name], rank)
        gigabytes = [sizes.backbone * FROZEN, sizes.full, sizes.with_lora]
        texts = [f"{value / 1e9:.1f} GB" for value in gigabytes]
        others = [f"{count * FROZEN / 1e9:.1f} GB" if count else "none" for count in (sizes.text, sizes.vae)]
        rows.append([name, f"{sizes.backbone / 1e6:,.0f} M", *texts, f"{sizes.lora / 1e6:.1f} M", *others])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    from public_configs import PUBLIC

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"default: all ({', '.join(PUBLIC)})")
    parser.add_argument("--rank", type=int, default=32, metavar="R", help="rank of the LoRA (default: 32)")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/checkpoints.md")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in PUBLIC]
    if unknown or options.rank < 1:
        what = f"{unknown[0]!r} is not known" if unknown else f"--rank must be at least 1, got {options.rank}"
        raise ConfigError(f"{what}; valid: {', '.join(PUBLIC)}" if unknown else what)
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(compile_cache=False)
    rows = table_rows(options.names or list(PUBLIC), options.rank)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if options.markdown:
        rows.insert(1, ["---"] * len(widths))
    for row in rows:
        if options.markdown:
            print(f"| {' | '.join(row)} |")
        else:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    run_cli(main)
