"""Prompt sets from files, folders and standard input, read through Hugging Face `datasets`.

Nothing is fetched from a network, and the cache that `datasets` needs lives in a temporary folder for as long
as a file is being read.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dancegrpo.config import ConfigError, choices_text

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "prompts"
BUILT_IN = {
    f"shapes/{name}": ASSETS / f"shapes_{name}.jsonl" for name in ("train", "validation", "evaluation")
}
EXTENSIONS = (".txt", ".csv", ".jsonl", ".parquet")
_VALID = (
    f"valid: a {', '.join(EXTENSIONS)} file, a folder written by datasets' save_to_disk, "
    f"- for standard input, or one of {', '.join(BUILT_IN)}"
)
# Names a stream of random numbers of its own, so that prompt order shares none with the noise ("prompts").
_STREAM = 0x70726F6D << 32


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order with one dict of their other columns each; `source` is where they came from."""

    prompts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]
    source: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, iteration: int, count: int, seed: int = 0, shuffle: bool = True) -> np.ndarray:
        """Indices of the prompts of an iteration (counted from 1), int64 (count,).

        A pure function of its arguments: iterations walk through the set `count` at a time, in file order or
        in a permutation that is new for each pass, and go on into the next pass where one ends.
        """
        if iteration < 1 or count < 1:
            raise ValueError(f"iteration and count must be at least 1, got {iteration} and {count}")
        size = len(self.prompts)
        first = (iteration - 1) * count
        places = np.arange(first, first + count, dtype=np.int64)
        if not shuffle:
            return places % size
        numbers = range(first // size, int(places[-1]) // size + 1)
        passes = {number: self._order(number, seed) for number in numbers}
        return np.array([passes[int(place) // size][int(place) % size] for place in places], np.int64)

    def _order(self, number: int, seed: int) -> np.ndarray:
        key = np.array([seed % 2**64, _STREAM + number], np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(len(self.prompts))


@contextmanager
def _quiet_datasets() -> Iterator[tuple[Any, str]]:
    """The `datasets` module, silent, and a cache folder that is gone afterwards."""
    import datasets  # slow to import, and only needed here

    shown = not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="dancegrpo-prompts-", ignore_cleanup_errors=True) as cache:
            yield datasets, cache
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: BaseException) -> str:
    """What went wrong, from the innermost cause, without line breaks."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _read_file(path: Path, column: str) -> list[dict[str, Any]]:
    with _quiet_datasets() as (datasets, cache):
        common = {"cache_dir": cache, "keep_in_memory": True}
        make = datasets.Dataset
        if path.suffix == ".txt":
            table = make.from_text(str(path), encoding="utf-8-sig", **common).rename_column("text", column)
        elif path.suffix == ".csv":
            # Without the converter a prompt "null" would be a missing value and "1984" a number.
            table = make.from_csv(str(path), encoding="utf-8-sig", converters={column: str}, **common)
        elif path.suffix == ".jsonl":
            table = make.from_json(str(path), **common)
        else:
            table = make.from_parquet(str(path), **common)
        return table.to_list()


def _read_folder(path: Path) -> list[dict[str, Any]]:
    with _quiet_datasets() as (datasets, _):
        table = datasets.load_from_disk(str(path), keep_in_memory=True)
        if isinstance(table, datasets.DatasetDict):
            if len(table) > 1 and "train" not in table:
                raise ConfigError(
                    f"{path} holds the splits {', '.join(sorted(table))}: give the folder of one of them, "
                    f"such as {path / min(table)}"
                )
            table = table["train"] if "train" in table else next(iter(table.values()))
        return table.to_list()


def _rows(source: str, column: str) -> list[dict[str, Any]]:
    """Rows of a source; every problem with it is a ConfigError."""
    if source == "-":
        return [{column: line} for line in sys.stdin.read().splitlines()]
    path = BUILT_IN.get(source, Path(source).expanduser())
    if not path.exists():
        if source.startswith("shapes/"):
            raise ConfigError(f"unknown prompt list {source!r}: {choices_text(source, BUILT_IN)}")
        raise ConfigError(f"prompt list {source!r} does not exist ({_VALID})")
    if path.is_dir() and not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ConfigError(f"folder {source!r} was not written by datasets' save_to_disk ({_VALID})")
    if path.is_file() and path.suffix not in EXTENSIONS:
        raise ConfigError(f"prompt list {source!r} has the unknown extension {path.suffix!r} ({_VALID})")
    if path.is_file() and path.stat().st_size == 0:
        return []
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path, column)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises errors of many libraries for broken files
        if "corresponds to no data" in str(error):  # what it says of a file with a header and no rows
            return []
        kind = "dataset folder" if path.is_dir() else f"{path.suffix} file"
        reason = _first_line(error)
        raise ConfigError(f"prompt list {source!r} cannot be read as a {kind}: {reason}") from error


def load_prompts(source: str | Path, column: str = "prompt") -> PromptSet:
    """Read prompts from a built-in list, a txt/csv/jsonl/parquet file, a dataset folder or "-" (stdin).

    Lines of txt files and of standard input are the prompts, and blank ones are skipped; elsewhere `column`
    holds the prompts and the other columns become metadata. Spaces around a prompt are cut off.
    Raises ConfigError for a source that is missing, unreadable, empty, or without usable text in `column`.
    """
    source = str(source)
    lines_only = source == "-" or source.endswith(".txt")
    name = "standard input" if source == "-" else repr(source)
    rows = _rows(source, column)
    if lines_only:
        rows = [row for row in rows if row[column].strip()]
    if not rows:
        raise ConfigError(f"prompt list {name} is empty: it needs at least one prompt")
    if column not in rows[0]:
        raise ConfigError(
            f"prompt list {name} has no column {column!r} (data.prompt_column): {choices_text(column, rows[0])}"
        )
    prompts = []
    for number, row in enumerate(rows, start=1):
        prompt = row.pop(column)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(
                f"prompt list {name}, row {number}: column {column!r} must hold text, got {prompt!r}"
            )
        prompts.append(prompt.strip())
    return PromptSet(tuple(prompts), tuple(rows), source)
