"""Turns PyTorch checkpoints (.pt, .bin, .ckpt) and those of OpenCLIP into model folders with safetensors.

    python tools/convert.py old/pytorch_model.bin --output new
    python tools/convert.py HPS_v2.1_compressed.pt --config open_clip_config.json --output hps --dtype float16
    python tools/convert.py a_folder_with_sharded_bin_files --output new

The model's config is looked for beside the checkpoint. Files are unpickled without running any code in them; one that
needs that is refused. Needs PyTorch: pip install 'dancegrpo[convert]'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from dancegrpo.runtime.cli import run_cli
from dancegrpo.runtime.precision import DTYPES


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "source", metavar="CHECKPOINT", help="checkpoint file, or a folder with one, or with shards and index"
    )
    add("--output", metavar="DIR", required=True, help="the new model folder")
    add("--overwrite", action="store_true", help="replace an existing output folder")
    add(
        "--config",
        metavar="FILE.json",
        help="the model's config.json or open_clip_config.json (default: the one beside the checkpoint)",
    )
    add("--dtype", choices=DTYPES, help="number format of the new weights (default: as they are)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    from dancegrpo.models.converting import convert

    count = convert(args.source, args.output, config=args.config, dtype=args.dtype, overwrite=args.overwrite)
    print(f"{args.output}: {count} tensors")


if __name__ == "__main__":
    run_cli(main)
