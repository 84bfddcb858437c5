"""YAML file and ``section.key=value`` overrides to a checked ``Config``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dancegrpo.config.counts import check_counts, fit_micro_batch
from dancegrpo.config.errors import ConfigError, choices_text
from dancegrpo.config.schema import Config, RewardConfig, RewardTerm

DEFAULT_CONFIG = "flux_small.yaml"
_PACKAGE = Path(__file__).resolve().parent.parent


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number (PyYAML wants 1.0e-4) and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, typing.Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a config file, applies ``section.key=value`` overrides and checks everything.

    Args:
        path: a YAML file; a bare name is also looked for among the shipped configs; None is flux_small.yaml.
        overrides: texts such as ``train.candidates=8``, values in YAML; ``reward.terms.0.weight=2`` reaches
            into the list of rewards.

    Raises:
        ConfigError: one sentence that names the file (or ``--set``), the key and the valid choices.
    """
    file = find_config(path or DEFAULT_CONFIG)
    overrides, source = list(overrides), str(path or DEFAULT_CONFIG)
    config = fit_micro_batch(load_sections(Config, file, overrides, source))
    check_counts(config, source, {text.partition("=")[0].strip(): f"--set {text}" for text in overrides})
    return config


def load_sections(root: type, file: Path | None, overrides: Iterable[str] = (), source: str = "") -> Any:
    """An instance of ``root``, a dataclass whose fields are sections (dataclasses too), from YAML and overrides.

    Args:
        root: its own defaults stand where neither the file nor an override says anything.
        file: a YAML file; None: only overrides.
        overrides: texts such as ``section.key=value``.
        source: what messages call the file.

    Raises:
        ConfigError: see ``load_config``.
    """
    tree = _read(file) if file else {}
    origins: dict[str, str] = {}
    for text in overrides:
        _override(root, tree, text, origins)
    return _build(root, tree, source or str(file), origins)


def dump_yaml(config: Config) -> str:
    """The resolved config as YAML text; ``load_config`` gives the same config back."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def shipped_configs() -> dict[str, Path]:
    """Name to path of the configs that come with the package (or with its checkout)."""
    folders = [_PACKAGE / "configs"]  # an installed package carries them inside
    if (_PACKAGE.parent / "setup.py").is_file():
        folders.append(_PACKAGE.parent / "configs")
    return {
        file.name: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.yaml"))
    }


def find_config(name: str | Path) -> Path:
    """The file that ``name`` means: a path, else a shipped config (with or without ``.yaml``)."""
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs()
    for candidate in (str(name), f"{name}.yaml"):
        if candidate in shipped:
            return shipped[candidate]
    raise ConfigError(f"{name}: no such config file; {choices_text(str(name), shipped)}")


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}: not valid YAML{where}: {getattr(error, 'problem', error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must hold sections with keys, got {_shown(tree)}")
    return tree


def _override(root: type, tree: dict[str, Any], text: str, origins: dict[str, str]) -> None:
    dotted, equals, raw = text.partition("=")
    dotted = dotted.strip()
    origin = f"--set {text}"
    if not equals or not dotted:
        raise ConfigError(f"{origin}: must look like section.key=value, for example train.iterations=100")
    section, _, key = dotted.partition(".")
    name, *rest = key.split(".")
    value = _parse_value(_hint(root, section, name, origin, dotted), raw, bool(rest), origin)
    if tree.get(section) is None:
        tree[section] = {}
    origins[f"{section}.{name}"] = origin
    if rest:
        _override_term(tree[section], rest, value, origin)
    else:
        _mapping(tree[section], section, origin)[name] = value


def _override_term(section: Any, rest: list[str], value: Any, origin: str) -> None:
    """``reward.terms.<index>.<key>=value``."""
    terms = _mapping(section, "reward", origin).setdefault("terms", Config().to_dict()["reward"]["terms"])
    index = int(rest[0]) if rest[0].isdigit() else -1
    if not isinstance(terms, list) or len(rest) != 2 or not 0 <= index < len(terms):
        count = len(terms) if isinstance(terms, list) else 0
        raise ConfigError(f"{origin}: must look like reward.terms.INDEX.KEY=value with INDEX below {count}")
    _mapping(terms[index], f"reward.terms.{index}", origin)[rest[1]] = value


def _parse_value(hint: Any, raw: str, nested: bool, origin: str) -> Any:
    """YAML value of an override; a text key keeps the text as typed (``-`` and ``12`` are texts there)."""
    try:
        value = yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError:
        value = raw
        if not nested and str not in _allowed(hint):
            raise ConfigError(f"{origin}: the value is not valid YAML") from None
    if not nested and str in _allowed(hint) and not isinstance(value, str):
        return None if value is None and type(None) in _allowed(hint) else raw
    return value


def _sections(root: type) -> dict[str, type]:
    return typing.get_type_hints(root)


def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _hint(root: type, section: str, key: str, origin: str, dotted: str) -> Any:
    """The type of one key, or an error with the nearest valid name."""
    sections = _sections(root)
    if section in sections and key in _hints(sections[section]):
        return _hints(sections[section])[key]
    raise ConfigError(f"{origin}: unknown key {dotted!r}; {_nearest_key(root, section, key, dotted)}")


def _nearest_key(root: type, section: str, key: str, dotted: str) -> str:
    """``did you mean 'train.candidates'?``, else the keys or sections there are."""
    sections = {name: list(_hints(cls)) for name, cls in _sections(root).items()}
    keys = [f"{name}.{k}" for name, names in sections.items() for k in names]
    if not key and section in sections:
        return f"it is a section; its keys are {', '.join(sections[section])}"
    near = [name for name in keys if name.split(".")[1] == (key or section)]
    if not near and section in sections:
        near = [f"{section}.{k}" for k in difflib.get_close_matches(key, sections[section], n=1)]
    elif not near:
        near = difflib.get_close_matches(dotted, keys, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if section in sections:
        return f"the keys of {section} are {', '.join(sections[section])}"
    return f"the sections are {', '.join(sections)}"


def _mapping(value: Any, name: str, origin: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: {name} must hold keys with values, got {_shown(value)}")
    return value


def _build(root: type, tree: Mapping[str, Any], source: str, origins: Mapping[str, str]) -> Any:
    sections = _sections(root)
    built = {}
    for section, values in tree.items():
        if section not in sections:
            raise ConfigError(
                f"{source}: unknown section {section!r}; {choices_text(str(section), sections)}"
            )
        values = _mapping({} if values is None else values, section, source)
        arguments = {}
        for key, value in values.items():
            dotted = f"{section}.{key}"
            origin = origins.get(dotted, source)
            hint = _hint(root, section, str(key), origin, dotted)
            if sections[section] is RewardConfig and key == "terms":
                arguments[key] = _build_terms(value, origin)
            else:
                arguments[key] = _check(value, hint, _field(sections[section], key), dotted, origin)
        built[section] = sections[section](**arguments)
    return root(**built)


def _build_terms(value: Any, origin: str) -> tuple[RewardTerm, ...]:
    if not isinstance(value, list) or not value:
        got = "must not be empty, it is" if value == [] else f"is {_shown(value)}, but must be"
        raise ConfigError(f"{origin}: reward.terms {got} a list of at least one {{name, weight, label, ...}}")
    terms = []
    for index, entry in enumerate(value):
        dotted = f"reward.terms.{index}"
        entry = dict(_mapping(entry, dotted, origin))
        known = {
            key: _check(entry.pop(key), hint, _field(RewardTerm, key), f"{dotted}.{key}", origin)
            for key, hint in _hints(RewardTerm).items()
            if key in entry and key != "arguments"
        }
        if not known.get("name"):
            raise ConfigError(
                f"{origin}: {dotted} has no name (a registered reward, module:Class or file.py:Class)"
            )
        if any(sign in (known.get("label") or "") for sign in "/\\"):
            raise ConfigError(f"{origin}: {dotted}.label is {known['label']!r}; a label holds no slash")
        terms.append(RewardTerm(**known, arguments={str(key): argument for key, argument in entry.items()}))
    return tuple(terms)


def _field(cls: type, key: str) -> dataclasses.Field:
    return next(f for f in dataclasses.fields(cls) if f.name == key)


def _allowed(hint: Any) -> tuple[type, ...]:
    """``float | None`` to ``(float, NoneType)``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    tuple[str, ...]: "a list of texts",
}


def _check(value: Any, hint: Any, field: dataclasses.Field, dotted: str, origin: str) -> Any:
    """The value in the key's type and within its bounds, or a ConfigError."""
    allowed = _allowed(hint)
    expected = " or ".join(_TYPE_NAMES.get(kind, str(kind)) for kind in allowed)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if tuple[str, ...] in allowed and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) not in allowed:
        raise ConfigError(f"{origin}: {dotted} must be {expected}, got {_shown(value)}")
    if value is None:
        return None
    meta = field.metadata
    if meta.get("choices") and value not in meta["choices"]:
        raise ConfigError(f"{origin}: {dotted} is {value!r}; {choices_text(str(value), meta['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {dotted} must be finite, got {value}")
    tests = (
        ("minimum", lambda bound: value >= bound, "at least"),
        ("above", lambda bound: value > bound, "above"),
        ("maximum", lambda bound: value <= bound, "at most"),
        ("below", lambda bound: value < bound, "below"),
    )
    for name, holds, words in tests:
        if name in meta and not holds(meta[name]):
            raise ConfigError(f"{origin}: {dotted} must be {words} {meta[name]}, got {value}")
    return value


def _shown(value: Any) -> str:
    kind = {dict: "a mapping", list: "a list", type(None): "null"}.get(type(value))
    return kind if kind else f"{value!r} ({_TYPE_NAMES.get(type(value), type(value).__name__)})"
