"""What turns a prompt into an image with one backbone family."""

from dancegrpo.pipelines.base import Pipeline
from dancegrpo.pipelines.loading import load_pipeline, resolve_checkpoint

__all__ = ["Pipeline", "load_pipeline", "resolve_checkpoint"]
