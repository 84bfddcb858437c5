"""Text to token ids through the `tokenizers` library."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from dancegrpo.config import ConfigError

_UNKNOWN, _START, _END = "<|unknown|>", "<|startoftext|>", "<|endoftext|>"


class TextTokenizer:
    """A tokenizer with a fixed context: `tokenizer(["a red circle"])` gives int32 ids (N, context)."""

    def __init__(self, tokenizer: Tokenizer, context: int, source: str):
        self._tokenizer = tokenizer
        self.context = context
        self._unknown_id = tokenizer.token_to_id(_UNKNOWN)
        end = tokenizer.token_to_id(_END)
        if end is None:
            raise ConfigError(f"{source} has no {_END} token")
        self._whole = Tokenizer.from_str(tokenizer.to_str())  # to look at what truncation cuts off
        self._whole.no_truncation()
        self._tokenizer.enable_truncation(context)
        self._tokenizer.enable_padding(length=context, pad_id=end, pad_token=_END)

    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.array([encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))], np.int32)

    def is_truncated(self, text: str) -> bool:
        """Whether `text` has more tokens than the context holds."""
        return len(self._whole.encode(text).ids) > self.context

    def unknown_words(self, text: str) -> list[str]:
        """The words of `text` that the vocabulary lacks, in order, each once."""
        if self._unknown_id is None:
            return []
        encoding = self._whole.encode(text)
        words = [
            text[start:end]
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token == self._unknown_id
        ]
        return list(dict.fromkeys(words))


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a folder with `tokenizer.json` and `tokenizer_config.json` (`model_max_length`).

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    folder = Path(folder)
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    for needed in (path, settings):
        if not needed.is_file():
            raise ConfigError(f"{folder} is not a tokenizer folder: it has no {needed.name}")
    try:
        context = int(json.loads(settings.read_text(encoding="utf-8"))["model_max_length"])
        return TextTokenizer(Tokenizer.from_file(str(path)), context, str(path))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{folder}: unreadable tokenizer: {error}") from error
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ConfigError(f"{path} cannot be read by the tokenizers library: {error}") from error


def save_word_tokenizer(words: tuple[str, ...], context: int, folder: str | Path) -> None:
    """Write a lower-casing word-level tokenizer over a closed vocabulary, readable by transformers too.

    Ids: 0 unknown, 1 start, 2 ... the words, last the end token (the largest id, also the padding, as in CLIP).
    """
    vocabulary = {token: i for i, token in enumerate([_UNKNOWN, _START, *words, _END])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    # Punctuation is dropped, so that "a circle." is "a circle".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="removed")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A {_END}", special_tokens=[(_START, vocabulary[_START]), (_END, vocabulary[_END])]
    )
    tokenizer.add_special_tokens([_UNKNOWN, _START, _END])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "unk_token": _UNKNOWN,
        "bos_token": _START,
        "eos_token": _END,
        "pad_token": _END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
