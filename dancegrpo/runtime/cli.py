"""What all command lines share: common options, and exit codes with one clear message."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from dancegrpo.config import DEFAULT_CONFIG, ConfigError, ReportedError
from dancegrpo.runtime.delivery import deliver_signals
from dancegrpo.runtime.signals import Terminated, raise_terminated

BAD_INPUT, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143


def common_options(
    default: str = f"{DEFAULT_CONFIG}, or the config of the run that the command reads",
) -> argparse.ArgumentParser:
    """Parser with ``--config``, ``--set`` and ``--seed``, for ``argparse.ArgumentParser(parents=[...])``.

    Args:
        default: what the help says is used without ``--config``.
    """
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config",
        metavar="FILE.yaml",
        help=f"config file, a path or a name in configs/ (default: {default})",
    )
    group.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="override config keys, for example --set train.iterations=10 data.prompts=mine.txt",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="random seed; the same seed gives the same result"
    )
    return parser


def checkpoint_options() -> argparse.ArgumentParser:
    """Parser with ``--checkpoint`` and ``--weights`` of commands that use a model, for ``parents`` too."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--checkpoint", metavar="PATH", help="run, checkpoint or diffusers folder (default: model.checkpoint)"
    )
    group.add_argument(
        "--weights", choices=("raw", "ema"), help="weights of a run (default: ema if it kept an average)"
    )
    group.add_argument(
        "--lora",
        metavar="PATH",
        help="add this LoRA to it: a safetensors file, or a folder or run that holds one",
    )
    return parser


def model_overrides(args: argparse.Namespace) -> list[str]:
    """``--set`` of a command with ``--checkpoint`` and ``--lora``, and what these two say of the same keys.

    A run's own ``model.lora`` belongs to the model that it started from, not to its checkpoints.
    """
    first = ["model.lora=null"] if args.checkpoint else []
    return [*first, *args.set, *([f"model.lora={args.lora}"] if args.lora else [])]


def run_cli(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Runs ``main`` and exits: 0 success, 2 bad input, 1 failure, 130 Ctrl-C, 143 SIGTERM.

    Bad input (``ConfigError``), a ``ReportedError`` and a full disk are one sentence on standard error, other
    failures a traceback. ``main`` returns None or its exit code.
    """
    deliver_signals()
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        code = main(None) or 0
        sys.stdout.flush()
    except ConfigError as error:
        code = _say(f"error: {error}", BAD_INPUT)
    except ReportedError as error:
        code = _say(f"error: {error}", FAILURE)
    except KeyboardInterrupt:
        code = _say("interrupted", INTERRUPTED)
    except Terminated:
        code = _say("terminated", TERMINATED)
    except BrokenPipeError:  # the reader of our output went away, as in `... | head`
        sys.stderr.close()
        code = FAILURE
    except Exception as error:
        if is_disk_full(error):
            place = getattr(error, "filename", None)
            code = _say(
                f"error: the disk is full{f' ({place})' if place else ''}; what was saved before is whole: free "
                "some space and run the command again (a training run goes on with --resume)",
                FAILURE,
            )
        else:
            traceback.print_exc()
            code = FAILURE
    sys.exit(code)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk or quota; libraries in other languages only say so in the text."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in numbers or "No space left on device" in str(error)


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr, flush=True)
    return code
