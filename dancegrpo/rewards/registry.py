"""From a name in the config to a reward object.

A name is one of: a registered name (`clip_score`), `module:Class` (`my_package.rewards:Sharpness`) or
`file.py:Class` (`examples/custom_reward.py:RednessReward`); a function may stand for the class.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dancegrpo.config import ConfigError, choices_text
from dancegrpo.rewards.base import FunctionReward, RewardFunction

# Built-in rewards are named by their place, so that the registry imports only those that a run uses.
_REGISTERED: dict[str, str | Callable[..., Any]] = {
    "clip_score": "dancegrpo.rewards.clip_score:ClipScoreReward",
    "shapes_rule": "dancegrpo.rewards.shapes_rule:ShapesRuleReward",
}


def register_reward(name: str) -> Callable[[Any], Any]:
    """Class or function decorator that makes a reward known by a short name.

    Raises:
        ConfigError: the name is taken by another object, or holds a colon or a path separator.
    """
    if not name or any(mark in name for mark in ":/\\"):
        raise ConfigError(f"register_reward: {name!r} must not be empty nor hold ':', '/' or '\\'.")

    def register(reward: Any) -> Any:
        known = _REGISTERED.get(name)
        if known is not None and _place_of(known) != _place_of(reward):
            raise ConfigError(f"register_reward: the name {name!r} is taken by {_place_of(known)}.")
        _REGISTERED[name] = reward
        return reward

    return register


def reward_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTERED)


def build_reward(name: str, **settings: Any) -> Any:
    """The reward of that name, constructed with the other keys of its config term.

    Returns:
        A `RewardFunction` or a `RewardCell`; a plain function is wrapped.

    Raises:
        ConfigError: unknown name, missing file or module, an object that is no reward, or settings that its
            constructor does not take.
    """
    reward = _find(name)
    if inspect.isclass(reward):
        return _construct(name, reward, settings)
    if not callable(reward):
        raise ConfigError(f"reward.terms: {name!r} is a {type(reward).__name__}, not a class or a function.")
    images_prompts_metadata = (None, None, None)
    _check_settings(name, reward, images_prompts_metadata, settings)
    return FunctionReward(reward, **settings)


def _find(name: str) -> Any:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"reward.terms: name must be a non-empty string, not {name!r}.")
    known = _REGISTERED.get(name)
    if known is not None:
        return _load(known, name) if isinstance(known, str) else known
    if ":" not in name:
        raise ConfigError(
            f"reward.terms: {name!r} is neither a registered reward nor module:Class nor file.py:Class; "
            f"{choices_text(name, reward_names())}"
        )
    return _load(name, name)


def _load(place: str, name: str) -> Any:
    """The attribute behind `module:Class` or `file.py:Class`."""
    source, _, attribute = place.rpartition(":")
    module = _module_of_file(Path(source)) if source.endswith(".py") else _module_of_name(source, name)
    if not hasattr(module, attribute):
        choices = [key for key, value in vars(module).items() if _is_own_reward(module, key, value)]
        raise ConfigError(
            f"reward.terms: {source} has no {attribute!r}; "
            f"it defines {', '.join(sorted(choices)) or 'no reward'}"
        )
    return getattr(module, attribute)


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward.terms: there is no file {path} (looked up from {Path.cwd()}).")
    # One module per file and process: two terms from one file share its classes and its state.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module_name = f"dancegrpo_user_reward_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: MindSpore's graph compiler and dataclasses look a class's module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"reward.terms: {path} cannot be imported: {_one_line(error)}") from error
    return module


def _module_of_name(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:
        raise ConfigError(
            f"reward.terms: {name!r}: module {source!r} cannot be imported: {_one_line(error)}"
        ) from error


def _construct(name: str, reward: type, settings: dict[str, Any]) -> Any:
    if not issubclass(reward, RewardFunction):
        from dancegrpo.rewards.cell import RewardCell  # loads MindSpore: only when it may be a cell

        if not issubclass(reward, RewardCell):
            raise ConfigError(
                f"reward.terms: {name!r} derives neither from RewardFunction nor from RewardCell."
            )
    _check_settings(name, reward, (), settings)
    try:
        return reward(**settings)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms: {name!r} refuses its settings: {_one_line(error)}") from error


def _check_settings(name: str, target: Callable[..., Any], args: tuple, settings: dict[str, Any]) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(*args, **settings)
    except TypeError as error:
        takes = list(signature.parameters)[len(args) :]
        raise ConfigError(
            f"reward.terms: {name!r}: {_one_line(error)}; it takes {', '.join(takes) or 'no settings'}, "
            "beside name, weight and label of every term."
        ) from error


def _is_own_reward(module: ModuleType, key: str, value: Any) -> bool:
    return (
        not key.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and getattr(value, "__module__", None) == module.__name__
    )


def _place_of(reward: str | Callable[..., Any]) -> str:
    return reward if isinstance(reward, str) else f"{reward.__module__}:{reward.__qualname__}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
