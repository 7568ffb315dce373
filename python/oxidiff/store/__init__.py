"""What outlives the process: saved programs, the cache folder, the tuning database.

:mod:`describe` says what a graph depends on, :mod:`encode` and :mod:`stages` turn captured graphs into plain data and back,
:mod:`artifact` is a file of them, :mod:`cache` decides which file and does the reading and writing.
"""

from .artifact import Artifact, Body, Row, Tuned, read_artifact
from .cache import GraphStore, cache_folder, complain, graphs_folder, save
from .describe import Description

__all__ = [
    "Artifact",
    "Body",
    "Description",
    "GraphStore",
    "Row",
    "Tuned",
    "cache_folder",
    "complain",
    "graphs_folder",
    "read_artifact",
    "save",
]
