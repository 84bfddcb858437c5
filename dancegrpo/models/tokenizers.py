"""Text to token ids through the `tokenizers` and `sentencepiece` libraries, by the files of a checkpoint folder."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from dancegrpo.config import ConfigError
from dancegrpo.models.clip_bpe import clean_as_transformers, open_clip_tokenizer, tokenizer_from_files
from dancegrpo.models.loading import OPEN_CLIP_CONFIG
from dancegrpo.runtime.files import read_json

_UNKNOWN, _START, _END = "<|unknown|>", "<|startoftext|>", "<|endoftext|>"
# transformers writes numbers like 1e30 where a tokenizer has no limit of its own.
_LONGEST = 10**6


class TextTokenizer:
    """A tokenizer with a fixed context: `tokenizer(["a red circle"])` gives int32 ids (N, context).

    `pad_id` fills what a text leaves free; what is too long is cut, the end token stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        pad_id: int,
        unknown_id: int | None = None,
        clean: Callable[[str], str] = str,
        padding_side: str = "right",
        truncation_side: str = "right",
    ):
        self._whole = Tokenizer.from_str(tokenizer.to_str())  # to look at what truncation cuts off
        self._whole.no_truncation()
        self._whole.no_padding()
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(context, direction=truncation_side)
        self._tokenizer.enable_padding(
            direction=padding_side, length=context, pad_id=pad_id, pad_token=tokenizer.id_to_token(pad_id)
        )
        self._clean, self._unknown_id = clean, unknown_id
        self.context, self.pad_id = context, pad_id

    def __call__(self, texts: list[str]) -> np.ndarray:
        return self.encode(texts)[0]

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and attention mask (1 for tokens, 0 for padding), both int32 (N, context)."""
        encodings = self._tokenizer.encode_batch([self._clean(text) for text in texts])
        ids = np.array([encoding.ids for encoding in encodings], np.int32)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int32)
        return ids.reshape(-1, self.context), mask.reshape(-1, self.context)

    def is_truncated(self, text: str) -> bool:
        """Whether `text` has more tokens than the context holds."""
        return len(self._whole.encode(self._clean(text)).ids) > self.context

    def unknown_words(self, text: str) -> list[str]:
        """The words of `text` that the vocabulary lacks, in order, each once."""
        if self._unknown_id is None:
            return []
        text = self._clean(text)
        encoding = self._whole.encode(text)
        words = [
            text[start:end].strip()
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token == self._unknown_id
        ]
        return list(dict.fromkeys(words))


class SentencePieceTokenizer:
    """The same of a sentencepiece model, as T5 uses it: the pieces, the end token, padding on the right."""

    def __init__(self, processor, context: int, pad_id: int):
        self._processor = processor
        self.context, self.pad_id = context, pad_id

    def __call__(self, texts: list[str]) -> np.ndarray:
        return self.encode(texts)[0]

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and attention mask (1 for tokens, 0 for padding), both int32 (N, context)."""
        ids = np.full((len(texts), self.context), self.pad_id, np.int32)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            pieces = self._processor.encode(text)[: self.context - 1] + [self._processor.eos_id()]
            ids[row, : len(pieces)] = pieces
            mask[row, : len(pieces)] = 1
        return ids, mask

    def is_truncated(self, text: str) -> bool:
        """Whether `text` has more tokens than the context holds."""
        return len(self._processor.encode(text)) + 1 > self.context

    def unknown_words(self, text: str) -> list[str]:
        """The pieces of `text` that the vocabulary lacks, in order, each once."""
        pieces = zip(self._processor.encode(text), self._processor.encode(text, out_type=str), strict=True)
        unknown = [piece.strip("\u2581") for i, piece in pieces if i == self._processor.unk_id()]
        return list(dict.fromkeys(unknown))


def load_tokenizer(folder: str | Path, context: int | None = None) -> TextTokenizer | SentencePieceTokenizer:
    """The tokenizer of a folder as transformers or OpenCLIP save it.

    Args:
        folder: has `tokenizer_config.json` and CLIP's `vocab.json` with `merges.txt`, a `tokenizer.json`, or T5's
            `spiece.model`; or `open_clip_config.json`, for which CLIP's vocabulary is part of this package.
        context: number of ids per text; `model_max_length` (OpenCLIP: `context_length`) when None.

    Raises:
        ConfigError: a file or an optional library is missing, a file cannot be read, or no context is set.
    """
    folder = Path(folder)
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() and (folder / OPEN_CLIP_CONFIG).is_file():
        return _load_open_clip(folder, context)
    if not settings.is_file():
        raise ConfigError(f"{folder} is not a tokenizer folder: it has no {settings.name}")
    settings = _read_settings(folder)
    context = _context(folder, settings, context)
    if _is_file_pair(folder) and (
        settings.get("tokenizer_class") == "CLIPTokenizer" or not (folder / "tokenizer.json").is_file()
    ):
        return _load_clip(folder, settings, context)
    if (folder / "tokenizer.json").is_file():
        return _load_fast(folder, settings, context)
    if (folder / "spiece.model").is_file():
        return _load_sentencepiece(folder, context)
    raise ConfigError(
        f"{folder} is not a tokenizer folder: it has no tokenizer.json, no spiece.model and not both of vocab.json "
        "and merges.txt"
    )


def _is_file_pair(folder: Path) -> bool:
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def _read_settings(folder: Path) -> dict:
    """`tokenizer_config.json` over `special_tokens_map.json`, where special tokens stand in older folders."""
    settings = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{folder}: unreadable tokenizer: {name}: {error}") from error
    return settings


def _context(folder: Path, settings: dict, context: int | None) -> int:
    if context is None:
        context = settings.get("model_max_length")
        if not isinstance(context, int | float) or not 1 <= context <= _LONGEST:
            raise ConfigError(
                f"{folder}: unreadable tokenizer: model_max_length is {context!r}, which is no length to pad to"
            )
    return int(context)


def _special(settings: dict, name: str) -> str | None:
    """The text of a special token, which is written as a string or as an object."""
    token = settings.get(name)
    return token.get("content") if isinstance(token, dict) else token


def _pad_id(tokenizer: Tokenizer, settings: dict, folder: Path) -> int:
    """Of the padding token; of the end token where there is none, as LLaMA's users do."""
    token = _special(settings, "pad_token") or _special(settings, "eos_token")
    pad_id = tokenizer.token_to_id(token) if token else None
    if pad_id is None:
        raise ConfigError(f"{folder}: the vocabulary has no pad_token {token!r}")
    return pad_id


def _load_fast(folder: Path, settings: dict, context: int) -> TextTokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ConfigError(f"{path} cannot be read by the tokenizers library: {error}") from error
    unknown = _special(settings, "unk_token")
    if unknown in (None, _special(settings, "eos_token")):
        unknown_id = None
    else:
        unknown_id = tokenizer.token_to_id(unknown)
    sides = {key: settings[key] for key in ("padding_side", "truncation_side") if key in settings}
    return TextTokenizer(tokenizer, context, _pad_id(tokenizer, settings, folder), unknown_id, **sides)


def _load_clip(folder: Path, settings: dict, context: int) -> TextTokenizer:
    name = settings.get("tokenizer_class", "CLIPTokenizer")
    if name not in ("CLIPTokenizer", "CLIPTokenizerFast"):
        raise ConfigError(
            f"{folder}: tokenizer_class {name!r} needs a tokenizer.json; without: 'CLIPTokenizer'"
        )
    defaults = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    special = [_special(settings, role) or default for role, default in defaults.items()]
    try:
        tokenizer = tokenizer_from_files(folder / "vocab.json", folder / "merges.txt", special)
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ConfigError(f"{folder}: unreadable tokenizer: vocab.json and merges.txt: {error}") from error
    pad_id = tokenizer.token_to_id(special[3])
    return TextTokenizer(tokenizer, context, pad_id, clean=clean_as_transformers(special))


def _load_open_clip(folder: Path, context: int | None) -> TextTokenizer:
    from dancegrpo.models.open_clip import OpenCLIPConfig

    path = folder / OPEN_CLIP_CONFIG
    try:
        config = OpenCLIPConfig.from_dict(read_json(path))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    tokenizer, clean = open_clip_tokenizer()
    return TextTokenizer(tokenizer, context or config.context_length, pad_id=0, clean=clean)


def _load_sentencepiece(folder: Path, context: int) -> SentencePieceTokenizer:
    path = folder / "spiece.model"
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the library sentencepiece: pip install 'dancegrpo[t5]', or add a tokenizer.json"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read by the sentencepiece library: {error}") from error
    return SentencePieceTokenizer(processor, context, max(processor.pad_id(), 0))


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
