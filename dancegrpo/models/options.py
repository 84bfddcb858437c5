"""Options of a `config.json` that decide whether a model can be built as the checkpoint asks."""

from collections.abc import Mapping, Sequence
from typing import Any

OLDER_TRANSFORMER_OPTIONS = {
    "num_vector_embeds": (None,),
    "use_linear_projection": (False,),
    "only_cross_attention": (False,),
    "double_self_attention": (False,),
}
"""Options of diffusers' older Transformer2DModel that DiT and PixArt checkpoints carry, always with these values."""


def refuse_unsupported(config: Any, supported: Mapping[str, Sequence]) -> None:
    """Check fields of a config dataclass that have only a few values here.

    Args:
        config: an instance with the fields that `supported` names.
        supported: by field name, the values that the model implements.

    Raises:
        ValueError: another value; the message names the option, the value and the valid ones.
    """
    for name, values in supported.items():
        value = getattr(config, name)
        if value not in values:
            raise ValueError(
                f"{name} is {value!r}, which is not supported; valid: {', '.join(map(repr, values))}"
            )


def refuse_not_positive(config: Any, names: Sequence[str]) -> None:
    """Check sizes and counts; ValueError names the first that is below 1 or no whole number."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
