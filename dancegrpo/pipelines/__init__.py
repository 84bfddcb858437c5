"""What turns a prompt into an image with one backbone family."""

from dancegrpo.pipelines.base import Pipeline, PipelineOptions
from dancegrpo.pipelines.loading import load_pipeline, read_process, resolve_checkpoint

__all__ = ["Pipeline", "PipelineOptions", "load_pipeline", "read_process", "resolve_checkpoint"]
