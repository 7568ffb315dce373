"""Whole diffusers pipelines: every network of one compiled with one call."""

from .parts import PARTS
from .pipe import compile_pipe, load_pipe, save_pipe

__all__ = ["PARTS", "compile_pipe", "load_pipe", "save_pipe"]
