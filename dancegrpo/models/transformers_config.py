"""What the config dataclasses of transformers' models share: known options apart from those that are only kept."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class TransformersConfig:
    """Options by transformers' names. A config.json there also holds dozens of keys about generation and training;
    they have no effect on an encoder and are kept in `extra`, so that saving writes them back.
    """

    model_type: ClassVar[str] = ""
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @classmethod
    def from_dict(cls, config: dict) -> Self:
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        own = {"architectures", "model_type"}  # what saving writes by itself
        extra = {key: value for key, value in config.items() if key not in names | own}
        return cls(**{key: value for key, value in config.items() if key in names}, extra=extra)

    def to_dict(self) -> dict:
        values = dataclasses.asdict(self)
        extra = values.pop("extra")
        return {"model_type": self.model_type, **values, **extra}


@dataclass(frozen=True)
class TowersConfig(TransformersConfig):
    """Options of a model of towers, which have options of their own: a field with a config for each of `towers`.

    Before 4.28 transformers also wrote each tower's options as *_config_dict; the plain ones are complete.
    """

    towers: ClassVar[Mapping[str, type[TransformersConfig]]] = {}

    @classmethod
    def from_dict(cls, config: dict) -> Self:
        own = {name: tower.from_dict(config.get(name) or {}) for name, tower in cls.towers.items()}
        return super().from_dict({**config, **own})

    def to_dict(self) -> dict:
        return {**super().to_dict(), **{name: getattr(self, name).to_dict() for name in self.towers}}


def check_heads(width: int, heads: int, width_name: str, heads_name: str) -> None:
    """ValueError unless `heads` heads share a width without remainder."""
    if heads < 1 or width % heads:
        raise ValueError(f"{width_name} {width} is not a multiple of {heads_name} {heads}")
