"""Prompt sets and the shapes world."""

from .prompts import PromptSet, load_prompts

__all__ = ["PromptSet", "load_prompts"]
