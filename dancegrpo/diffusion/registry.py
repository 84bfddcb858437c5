"""Names to builders: what `make_schedule`, `make_transition` and the objectives look names up in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dancegrpo.config import ConfigError, choices_text


class Registry:
    """A table of named builders (classes or functions) of one kind.

    Args:
        kind: what the entries are, for messages ("transition").
        key: the config key that chooses one ("sampler.transition"), if there is one.
    """

    def __init__(self, kind: str, key: str = "") -> None:
        self.kind, self._place = kind, f"{key}: " if key else ""
        self._builders: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator that adds a class or function under ``name``; a taken name is a ValueError."""

        def add(builder: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._builders:
                raise ValueError(f"the {self.kind} name {name!r} is taken")
            self._builders[name] = builder
            return builder

        return add

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._builders)

    def find(self, name: str) -> Callable[..., Any]:
        """The builder of that name.

        Raises:
            ConfigError: no such name; the message lists the valid ones.
        """
        if name not in self._builders:
            raise ConfigError(
                f"{self._place}unknown {self.kind} {name!r}; {choices_text(str(name), self._builders)}"
            )
        return self._builders[name]

    def accepted(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Those of ``settings`` that the builder of that name takes."""
        taken = inspect.signature(self.find(name)).parameters
        return {key: value for key, value in settings.items() if key in taken}

    def build(self, name: str, *args: Any, **settings: Any) -> Any:
        """What the builder of that name makes.

        Raises:
            ConfigError: no such name, or a setting that the builder does not take.
        """
        builder = self.find(name)
        try:
            inspect.signature(builder).bind(*args, **settings)
        except TypeError as error:
            valid = list(inspect.signature(builder).parameters)[len(args) :]
            raise ConfigError(
                f"{self._place}{self.kind} {name!r}: {error}; its settings are {', '.join(valid) or 'none'}"
            ) from None
        return builder(*args, **settings)
