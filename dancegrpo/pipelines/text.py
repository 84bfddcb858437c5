"""A frozen text encoder with its tokenizer, and which of its outputs a backbone is conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from dancegrpo.config import ConfigError
from dancegrpo.models import load_model, load_tokenizer
from dancegrpo.runtime.batching import run_batched

_TEXT_BATCH = 16


class _Outputs(nn.Cell):
    """Some outputs of an encoder: the others stay on the device."""

    def __init__(self, encoder: nn.Cell, chosen: Sequence[int]):
        super().__init__(auto_prefix=False)
        self.encoder, self.chosen = encoder, tuple(chosen)

    def construct(self, *inputs: Tensor):
        outputs, chosen = self.encoder(*inputs), ()
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
        states = "penultimate" in outputs
        self.folder, self.tokenizer_folder = folder, tokenizer_folder
        self.encoder = load_model(folder, dtype, hidden_states=states, parameters_dtype=dtype)
        for parameter in self.encoder.get_parameters():
            parameter.requires_grad = False
        self.tokenizer = load_tokenizer(tokenizer_folder, context)
        self.context, self.masked = self.tokenizer.context, masked
        names = self.encoder.output_names
        wanted = [names[-2] if name == "penultimate" else name for name in outputs]
        lacking = [name for name in wanted if name not in names]
        if lacking:
            raise ConfigError(f"{folder} is no text encoder for this model: it has no {lacking[0]}")
        self._graph = _Outputs(self.encoder, [names.index(name) for name in wanted])
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is not None and self.context > positions:
            raise ConfigError(
                f"{tokenizer_folder} makes texts of {self.context} tokens, but {folder} has positions for {positions}"
            )

    @property
    def config(self):
        """The encoder's."""
        return self.encoder.config

    @property
    def width(self) -> int:
        """Channels of its states."""
        return getattr(self.config, "hidden_size", None) or self.config.d_model

    def encode(self, prompts: list[str]) -> tuple[np.ndarray, ...]:
        """The chosen outputs, float32 (N, ...)."""
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
