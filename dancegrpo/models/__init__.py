"""Backbones, autoencoders and encoders as static-graph cells, in the layout of diffusers and transformers."""

from dancegrpo.models.loading import load_model
from dancegrpo.models.saving import save_model
from dancegrpo.models.tokenizers import load_tokenizer

__all__ = ["load_model", "load_tokenizer", "save_model"]
