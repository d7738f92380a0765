"""Shapes of public models, and the layouts that trainers and servers cut them into.

Takes a Hugging Face `config.json` (or a name from the registry) and parallel degrees; gives columnar layouts under
checkpoint names for the planner. Promises no weights and no downloads: only arithmetic on shapes.
"""

from __future__ import annotations

from weightsync.models.catalog import Catalog, catalog_of
from weightsync.models.families import model_of
from weightsync.models.registry import load_config, named_config, names
from weightsync.models.rules import ModelShape, Split, TensorRule
from weightsync.models.server import ServerLayout, ServerMesh, serve
from weightsync.models.trainer import TrainerMesh, train

__all__ = [
    "Catalog",
    "ModelShape",
    "ServerLayout",
    "ServerMesh",
    "Split",
    "TensorRule",
    "TrainerMesh",
    "catalog_of",
    "load_config",
    "model_of",
    "named_config",
    "names",
    "serve",
    "train",
]
