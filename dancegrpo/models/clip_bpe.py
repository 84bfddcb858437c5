"""CLIP's byte-pair encoding (Sennrich et al., 2016) as a tokenizer of the `tokenizers` library, and its cleaning."""

import gzip
import html
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

_VOCABULARY = Path(__file__).parent.parent / "assets" / "open_clip" / "bpe_simple_vocab_16e6.txt.gz"
_MERGES = (
    49152 - 256 - 2
)  # what CLIP uses of the file: with the bytes, twice, and two special tokens 49408 ids
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clean_as_transformers(special: Sequence[str]) -> Callable[[str], str]:
    """Repaired Unicode (a part of CLIP's training), single spaces, lower case: transformers' CLIPTokenizer.

    Special tokens inside a text are left alone, and what lies between them is cleaned by itself.
    """
    import ftfy  # a third of a second, and only CLIP's own vocabulary needs it

    between = re.compile(
        "(" + "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) + ")"
    )

    def clean(text: str) -> str:
        parts = between.split(text)
        return "".join(
            part if part in special else " ".join(ftfy.fix_text(part).split()).lower() for part in parts
        )

    return clean


def clean_as_open_clip(text: str) -> str:
    """The same with HTML entities resolved, twice, as web captions have them: OpenCLIP."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()


def tokenizer_from_files(vocabulary: Path, merges: Path, special: Sequence[str]) -> Tokenizer:
    """Of `vocab.json` and `merges.txt`; `special` are the start, end, unknown and padding tokens."""
    model = models.BPE.from_file(
        str(vocabulary), str(merges), unk_token=special[2], end_of_word_suffix="</w>"
    )
    return _assemble(model, special)


def open_clip_tokenizer() -> tuple[Tokenizer, Callable[[str], str]]:
    """OpenCLIP's default tokenizer of 49408 ids, and its cleaning."""
    start, end = "<start_of_text>", "<end_of_text>"
    vocabulary, merges = _read_vocabulary()
    ids = {token: i for i, token in enumerate([*vocabulary, start, end])}
    model = models.BPE(ids, list(merges), unk_token=end, end_of_word_suffix="</w>")
    return _assemble(model, (start, end)), clean_as_open_clip


@cache
def _read_vocabulary() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens by id: all bytes, all bytes at the end of a word, and one per merge; and the merges."""
    lines = gzip.decompress(_VOCABULARY.read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    merges = tuple(tuple(line.split()) for line in lines)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return (*letters, *(letter + "</w>" for letter in letters), *map("".join, merges)), merges


def _assemble(model: models.BPE, special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(list(dict.fromkeys(special)))
    start, end = special[:2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    return tokenizer
