"""Tokenizers and image preprocessing of the encoders against transformers, OpenCLIP and Pillow."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dancegrpo.config import ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

from mindspore import Tensor, nn, ops  # noqa: E402

from dancegrpo.models import load_tokenizer  # noqa: E402
from dancegrpo.models.clip_bpe import _read_vocabulary  # noqa: E402
from dancegrpo.models.preprocess import ImagePreprocess  # noqa: E402

OPEN_CLIP = Path(__file__).parent / "golden" / "open_clip"


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


def test_open_clip_tokens_are_those_of_open_clip():
    texts = json.loads((OPEN_CLIP / "texts.json").read_text())
    tokenizer = load_tokenizer(OPEN_CLIP / "vit_gelu")
    assert np.array_equal(tokenizer(texts), np.load(OPEN_CLIP / "preprocess.npz")["token_ids"])
    assert [tokenizer.is_truncated(text) for text in texts] == [text.startswith("a a") for text in texts]


def train_sentencepiece(folder):
    """A T5 tokenizer folder with a vocabulary of English letters and a few words."""
    import sentencepiece

    lines = ["a red circle above a blue square", "two green stars", "a photo of a yellow triangle"] * 20
    with open(folder / "spiece.model", "wb") as file:
        ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=32, minloglevel=2, **ids
        )
    settings = {"tokenizer_class": "T5Tokenizer", "model_max_length": 20, "legacy": True, "extra_ids": 0}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"additional_special_tokens": []}))


def test_t5_tokens_are_those_of_transformers(tmp_path):
    from transformers import T5Tokenizer

    train_sentencepiece(tmp_path)
    texts = ["a red circle", "Two  GREEN stars!", "a photo of 一 cat", "a blue square above " * 9]
    texts += [text for text in odd_strings() if "<" not in text]
    reference = T5Tokenizer.from_pretrained(tmp_path)
    expected = reference(texts, padding="max_length", truncation=True)
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = tokenizer.encode(texts)
    assert ids.shape == (len(texts), 20) and ids.dtype == np.int32
    for text, mine, theirs in zip(texts, ids.tolist(), expected["input_ids"], strict=True):
        assert mine == theirs, text
    assert mask.tolist() == expected["attention_mask"]
    lengths = [len(row) for row in reference(texts)["input_ids"]]
    assert [tokenizer.is_truncated(text) for text in texts] == [length > 20 for length in lengths]
    assert tokenizer.unknown_words("a photo of 一 cat") == ["一"]
    assert load_tokenizer(tmp_path, context=7)(texts).shape == (len(texts), 7)


def test_llama_folder_pads_with_its_end_token_and_needs_a_context(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<|begin|>", "<|end|>", "a", "red", "circle"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "model_max_length": 1e30,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids, mask = load_tokenizer(tmp_path, context=5).encode(["a red circle", "red red red red red red"])
    assert ids.tolist() == [[0, 2, 3, 4, 1], [0, 3, 3, 3, 3]]
    assert mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    with pytest.raises(ConfigError, match="model_max_length is 1e[+]30"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    assert load_tokenizer(tmp_path, context=5)(["a red circle"]).tolist() == [[1, 0, 2, 3, 4]]


_NINE = '{"model_max_length": 9, "eos_token": "<|end|>"}'


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "no tokenizer_config.json"),
        ({"tokenizer_config.json": "[1]"}, "unreadable tokenizer"),
        ({"tokenizer_config.json": _NINE}, "no tokenizer.json, no spiece.model"),
        ({"tokenizer_config.json": _NINE, "spiece.model": "?"}, "spiece.model cannot be read"),
        ({"tokenizer_config.json": _NINE, "tokenizer.json": "?"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": _NINE, "vocab.json": "?", "merges.txt": ""}, "vocab.json and merges.txt"),
        (
            {"tokenizer_config.json": '{"model_max_length": 9, "tokenizer_class": "Qwen2Tokenizer"}'}
            | {"vocab.json": "{}", "merges.txt": ""},
            "'Qwen2Tokenizer' needs a tokenizer.json",
        ),
    ],
)
def test_a_broken_tokenizer_folder_is_refused(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(tmp_path)


def read_image(index):
    return np.asarray(Image.open(OPEN_CLIP / f"image_{index}.png").convert("RGB"))


def to_tensor(pixels):
    return Tensor(pixels.transpose(2, 0, 1)[None].astype(np.float32) / 255.0)


@pytest.mark.parametrize("index", range(3))
def test_preprocessed_images_are_those_of_open_clip(index):
    pixels = read_image(index)
    actual = ImagePreprocess(*pixels.shape[:2], 32)(to_tensor(pixels)).asnumpy()
    assert np.abs(actual[0] - np.load(OPEN_CLIP / "preprocess.npz")["pixel_values"][index]).max() < 1e-2


@pytest.mark.parametrize("resize, height, width", [("squash", 47, 21), ("shortest", 16, 32)])
def test_preprocessing_also_squashes_and_enlarges(resize, height, width):
    pixels = read_image(1)[:height, :width]
    size = (32, 32) if resize == "squash" else (64, 32)
    expected = (
        np.asarray(Image.fromarray(pixels).resize(size, Image.BICUBIC)).astype(np.float32) / 127.5 - 1.0
    )
    left = (size[0] - 32) // 2
    preprocess = ImagePreprocess(height, width, 32, mean=(0.5,) * 3, std=(0.5,) * 3, resize=resize)
    actual = preprocess(to_tensor(pixels)).asnumpy()[0].transpose(1, 2, 0)
    difference = np.abs(actual - expected[:, left : left + 32]) * 127.5
    assert difference.max() < 1.01 and (difference > 0.01).mean() < 0.01  # a tie may round the other way


class _Weighted(nn.Cell):
    def __init__(self, preprocess, weight):
        super().__init__()
        self.preprocess, self.weight = preprocess, weight

    def construct(self, images):
        return (self.preprocess(images) * self.weight).sum()


class _GradientOfImages(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.gradient = ops.grad(loss)

    def construct(self, images):
        return self.gradient(images)


def test_gradient_of_preprocessing_is_that_of_the_map_without_rounding():
    rng = np.random.default_rng(0)
    images, direction = rng.uniform(0.4, 0.6, (2, 2, 3, 20, 33)).astype(np.float32)
    weight = Tensor(rng.standard_normal((2, 3, 16, 16)).astype(np.float32))
    smooth = ImagePreprocess(20, 33, 16, rounded=False)
    change = (smooth(Tensor(images + direction / 10)) - smooth(Tensor(images))) * weight
    gradient = _GradientOfImages(_Weighted(ImagePreprocess(20, 33, 16), weight))(Tensor(images)).asnumpy()
    assert (gradient * direction).sum() / 10 == pytest.approx(float(change.sum().asnumpy()), rel=1e-3)
