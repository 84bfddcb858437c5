"""Text and image encoders, their tokenizers and their preprocessing against the reference implementations."""

import json
from pathlib import Path

import numpy as np
import pytest

from dancegrpo.models import load_tokenizer
from dancegrpo.models.clip_bpe import _read_vocabulary

GOLDEN = Path(__file__).parent / "golden"


def relative(actual, expected) -> float:
    """Norm of the deviation over the norm of what is expected."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def odd_strings() -> list[str]:
    """Prompts as nobody should write them, always the same 200."""
    parts = [
        *(
            "a photo of",
            "CAT",
            "it's",
            "don’t",
            "we'll",
            "THEY'RE",
            "3:45pm",
            "1234",
            "x2",
            "!!",
            "?!…",
            "--",
            "—",
        ),
        *(
            "“quoted”",
            "(small)",
            "[x]",
            "naïve",
            "café",
            "cafe\u0301",
            "Ångström",
            "ẞtraße",
            "İstanbul",
            "ΟΔΟΣ",
        ),
        *(
            "一只红色的猫",
            "東京タワー",
            "한국어",
            "привет",
            "مرحبا",
            "שלום",
            "नमस्ते",
            "ไทย",
            "½",
            "²",
            "Ⅳ",
            "٣",
            "🙂",
        ),
        *(
            "👩‍👩‍👧",
            "🇩🇪",
            "&amp;",
            "&lt;b&gt;",
            "<html>",
            "http://a.b/c?d=e",
            "a_b",
            "#tag",
            "@me",
            "$5",
            "50%",
            "\t",
            "\n\n",
        ),
        *(
            "\u200b",
            "\u00a0",
            "ﬁsh",
            "ＷＩＤＥ",
            "schÃ¶n",
            "\x07",
            "'s",
            "''t",
            "supercalifragilistic",
            "zzzzqqqq",
        ),
        *(
            "<|endoftext|>",
            "<|startoftext|>",
            "!",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "C++",
            "\\n",
            "~^`|",
            "№",
        ),
    ]
    rng = np.random.default_rng(0)
    texts = parts + [""]
    while len(texts) < 200:
        chosen = rng.choice(len(parts), size=rng.integers(2, 12))
        texts.append("".join(parts[i] + rng.choice(["", " ", "  "]) for i in chosen))
    return texts


def write_clip_tokenizer(folder, pad="<|endoftext|>"):
    """CLIP's vocabulary as transformers keeps it."""
    tokens, merges = _read_vocabulary()
    start, end = "<|startoftext|>", "<|endoftext|>"
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate([*tokens, start, end])})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": start,
        "eos_token": end,
    }
    settings |= {"unk_token": end, "pad_token": {"content": pad, "__type": "AddedToken"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])  # SD 1.5 and SD 2.1
def test_clip_tokens_are_those_of_transformers(tmp_path, pad):
    from transformers import CLIPTokenizer

    write_clip_tokenizer(tmp_path, pad)
    texts = odd_strings()
    reference = CLIPTokenizer.from_pretrained(tmp_path)
    expected = reference(texts, padding="max_length", truncation=True, max_length=77)
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = tokenizer.encode(texts)
    for text, mine, theirs in zip(texts, ids.tolist(), expected["input_ids"], strict=True):
        assert mine == theirs, text
    assert mask.tolist() == expected["attention_mask"]
    assert [tokenizer.is_truncated(text) for text in texts] == [
        len(row) > 77 for row in reference(texts)["input_ids"]
    ]
