"""Rewards: what an image is worth, given its prompt.

A reward is one of two things:

* `RewardFunction` (or a plain function of the same signature): Python on the host, sees uint8 images;
* `RewardCell`: a static graph on the device, sees float images and what it encoded from the prompts.

`RewardSet` runs several of them and makes one number of theirs. Names resolve when they are first used, so
that host rewards and verifiers can be imported without MindSpore.
"""

from importlib import import_module

_HOMES = {
    "RewardFunction": "base",
    "FunctionReward": "base",
    "RewardError": "base",
    "RewardCell": "cell",
    "register_reward": "registry",
    "reward_names": "registry",
    "build_reward": "registry",
    "RewardSet": "composition",
    "LabelledReward": "composition",
    "build_reward_set": "composition",
    "ClipScoreReward": "clip_score",
    "ShapesRuleReward": "shapes_rule",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
