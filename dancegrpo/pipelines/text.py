"""A frozen text encoder with its tokenizer, and which of its outputs a backbone is conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, load_tokenizer
from dancegrpo.models.loading import find_config
from dancegrpo.models.weights import find_weights
from dancegrpo.runtime.batching import run_batched
from dancegrpo.runtime.digests import content_digest, signature

_TEXT_BATCH = 16
_TOKENIZER_SUFFIXES = (".json", ".model", ".txt")


class _Outputs(nn.Cell):
    """Some outputs of an encoder: the others stay on the device."""

    def __init__(self, encoder: nn.Cell, chosen: Sequence[int]):
        super().__init__(auto_prefix=False)
        self.encoder, self.chosen = encoder, tuple(chosen)

    # No *inputs: MindSpore never lets go of a cell that it has compiled with a variable number of arguments, and then
    # `TextTower.drop` would free nothing.
    def construct(self, ids: Tensor, mask: Tensor | None = None):
        outputs, chosen = self.encoder(ids) if mask is None else self.encoder(ids, mask), ()
        for index in self.chosen:
            chosen += (outputs[index],)
        return chosen


class TextTower:
    """Prompts to chosen outputs of an encoder, in calls of one shape.

    Args:
        folder: the encoder. tokenizer_folder: its tokenizer.
        outputs: names of outputs (see `load_model`); "penultimate" is the state before the last layer.
        dtype: of the products, and of the matrices in memory.
        context: tokens of a text; None: what the tokenizer says.
        masked: the encoder is told which tokens are padding.

    Raises:
        ConfigError: encoder and tokenizer cannot be loaded or do not fit together.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer_folder: Path,
        outputs: Sequence[str],
        dtype: ms.Type,
        context: int | None = None,
        masked: bool = False,
    ):
        self.folder, self.tokenizer_folder, self.dtype = folder, tokenizer_folder, dtype
        self.outputs, self.masked = tuple(outputs), masked
        self._files = self._signatures()
        self.tokenizer = load_tokenizer(tokenizer_folder, context)
        self.context = self.tokenizer.context
        self.load()
        self.config, self.class_name = self.encoder.config, self.encoder.class_name
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is not None and self.context > positions:
            raise ConfigError(
                f"{tokenizer_folder} makes texts of {self.context} tokens, but {folder} has positions for {positions}"
            )

    def load(self) -> None:
        """Reads the encoder; no need to call it, `encode` does so after `drop`."""
        states = "penultimate" in self.outputs
        self.encoder = load_model(self.folder, self.dtype, states, parameters_dtype=self.dtype)
        if self._signatures() != self._files:
            raise ConfigError(f"{self.folder} or {self.tokenizer_folder} has changed since it was first read")
        for parameter in self.encoder.get_parameters():
            parameter.requires_grad = False
        names = self.encoder.output_names
        wanted = [names[-2] if name == "penultimate" else name for name in self.outputs]
        lacking = [name for name in wanted if name not in names]
        if lacking:
            raise ConfigError(f"{self.folder} is no text encoder for this model: it has no {lacking[0]}")
        self._graph = _Outputs(self.encoder, [names.index(name) for name in wanted])

    def drop(self) -> None:
        """Gives the encoder's memory back, with the next graph at the latest.

        MindSpore keeps the parameters of the graph that it compiled last.
        """
        self.encoder = self._graph = None

    def key(self) -> tuple:
        """All that its outputs follow from besides the prompt, as far as it lies on the disk or was asked for.

        Raises:
            ConfigError: a file has changed since it was loaded.
        """
        digests = tuple((path.name, content_digest(path)) for path in self._files)
        if self._signatures() != self._files:
            raise ConfigError(f"{self.folder} or {self.tokenizer_folder} has changed since it was first read")
        return (digests, self.outputs, self.masked, self.context, str(self.dtype))

    def _signatures(self) -> dict[Path, tuple[int, ...]]:
        """The files that encoder and tokenizer are made of, with what changes when they do."""
        _, config, stems = find_config(self.folder)
        weights = {tensor.file for tensor in find_weights(self.folder, stems).values()}
        found = self.tokenizer_folder.iterdir() if self.tokenizer_folder.is_dir() else ()
        tokenizer = (path for path in found if path.suffix in _TOKENIZER_SUFFIXES)
        files = [config, *sorted(weights), *sorted(tokenizer)]
        return {path: signature(path) for path in files}

    @property
    def width(self) -> int:
        """Channels of its states."""
        return getattr(self.config, "hidden_size", None) or self.config.d_model

    def encode(self, prompts: list[str]) -> tuple[np.ndarray, ...]:
        """The chosen outputs, float32 (N, ...)."""
        if self.encoder is None:
            self.load()
        ids, mask = self.tokenizer.encode(prompts)
        vocabulary = self.config.vocab_size
        if ids.max() >= vocabulary:
            raise ConfigError(
                f"{self.tokenizer_folder} has token {ids.max()}, but {self.folder} knows only {vocabulary} tokens"
            )
        inputs = (ids, mask) if self.masked else (ids,)
        return run_batched(lambda *parts: self._graph(*map(Tensor, parts)), inputs, _TEXT_BATCH)

    def mask(self, prompts: list[str]) -> np.ndarray:
        """float32 (N, context): 1 for tokens, 0 for padding."""
        return self.tokenizer.encode(prompts)[1].astype(np.float32)
