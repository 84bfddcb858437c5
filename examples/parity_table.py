"""How far the models are from the reference implementations, on small random ones, forward and backward.

    python examples/parity_table.py [--json FILE] [CASE ...]

Prints, for every case in tests/golden (made with diffusers, transformers and OpenCLIP), the largest relative error
(norm of the deviation over the norm) of all stored outputs, and of all stored gradients: those of inputs and weights,
and the norms of all. float32, graph mode. Exits with 1 if one is above its limit, 1e-4 and 1e-3.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.runtime.cli import run_cli
from dancegrpo.runtime.files import check_writable, write_atomic

OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", metavar="CASE", nargs="*", help="default: all in tests/golden")
    parser.add_argument("--json", metavar="FILE", help="every single error, too")
    args = parser.parse_args(arguments)
    if args.json:
        check_writable(Path(args.json), "--json")
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(compile_cache=False)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from golden_models import CASES, load_case, measure

    from dancegrpo.models.weights import named_parameters

    for name in args.cases:
        if name not in CASES:
            raise ConfigError(f"unknown case {name!r}; {choices_text(name, CASES)}")
    print("| case | class | parameters | outputs | gradients |\n| --- | --- | --- | --- | --- |", flush=True)
    table, failed = {}, []
    for name in args.cases or CASES:
        case = load_case(name)
        errors = measure(case)
        table[name] = {"outputs": errors.outputs, "gradients": errors.gradients}
        outputs, gradients = max(errors.outputs.values()), max(errors.gradients.values())
        count = sum(parameter.size for parameter in named_parameters(case.model).values())
        print(
            f"| {name} | `{case.model.class_name}` | {count:,} | {outputs:.1e} | {gradients:.1e} |",
            flush=True,
        )
        if not (outputs <= OUTPUT_LIMIT and gradients <= GRADIENT_LIMIT):
            failed.append(name)
    if args.json:
        write_atomic(Path(args.json), json.dumps(table, indent=2) + "\n")
    if failed:
        print(f"above the limits of {OUTPUT_LIMIT:g} and {GRADIENT_LIMIT:g}: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
