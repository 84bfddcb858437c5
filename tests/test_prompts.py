"""Prompt sets: every format, one-sentence errors, and batches that depend on their arguments alone."""

import io
import json
import socket

import numpy as np
import pytest

from dancegrpo.config import ConfigError
from dancegrpo.data import PromptSet, load_prompts

ROWS = [{"prompt": "a red circle", "category": "colors"}, {"prompt": "null", "category": "none"}]


@pytest.fixture(autouse=True)
def _offline_in_empty_folder(tmp_path, monkeypatch):
    """No test may reach for a network; every test runs in a folder of its own, to see what is left there."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_args, **_kwargs):
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _write(path, form):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    if form == "csv":
        path.write_text("category,prompt\n" + "".join(f"{r['category']},{r['prompt']}\n" for r in ROWS))
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif form == "parquet":
        table.to_parquet(str(path))
    elif form == "folder":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(path))


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "folder", "folder of splits"])
def test_formats_give_prompts_and_metadata(form, tmp_path):
    path = tmp_path / (f"list.{form}" if "folder" not in form else "list")
    _write(path, form)
    got = load_prompts(path)
    assert got.prompts == ("a red circle", "null")
    assert got.metadata == ({"category": "colors"}, {"category": "none"})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # no cache beside the user's files


def test_text_lines_keep_everything_but_blank_lines(tmp_path, monkeypatch):
    text = 'a "quoted", prompt\r\n\r\n  ein Kreis, größer\n \nlast'
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = ('a "quoted", prompt', "ein Kreis, größer", "last")
    assert load_prompts("list.txt").prompts == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert load_prompts("-").prompts == expected


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("missing.txt", None, ["missing.txt", "does not exist", ".parquet"]),
        ("list.tsv", "prompt\nx\n", ["list.tsv", ".tsv", ".csv", ".jsonl", ".parquet", ".txt"]),
        ("blank.txt", "\n  \n", ["blank.txt", "empty"]),
        ("zero.jsonl", "", ["zero.jsonl", "empty"]),
        ("header.csv", "prompt,category\n", ["header.csv", "empty"]),
        ("other.csv", "promt,category\nx,y\n", ["other.csv", "'prompt'", "did you mean 'promt'", "category"]),
        ("broken.jsonl", '{"prompt": "a"\n nope', ["broken.jsonl", "cannot be read"]),
        ("number.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', ["number.jsonl", "row 2", "text"]),
        ("shapes/trian", None, ["shapes/trian", "did you mean 'shapes/train'"]),
    ],
)
def test_bad_sources_are_one_sentence(name, content, parts, tmp_path, capfd):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_prompts(name)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    assert capfd.readouterr() == ("", "")  # the libraries below stay silent


def test_batches_walk_in_order_or_in_a_new_permutation_each_pass():
    prompts = PromptSet(tuple("abcdefg"), ({},) * 7)
    assert list(prompts.batch(3, 3, shuffle=False)) == [6, 0, 1]
    passes = np.concatenate([prompts.batch(i, 4, seed=5) for i in range(1, 8)]).reshape(4, 7)
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    assert np.array_equal(prompts.batch(3, 4, seed=5), passes.ravel()[8:12])
    assert not np.array_equal(prompts.batch(1, 7, seed=5), prompts.batch(1, 7, seed=6))
