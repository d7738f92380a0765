"""The `weightsync` command: each subcommand is one module, imported when it is asked for.

Takes an address or a checkpoint path, gives lines for people or `--json` for programs. Promises one clear
error line and exit code 1 for anything this library refuses (2 for wrong usage). The library imports nothing
from here.
"""

from __future__ import annotations

from weightsync.cli.application import main

__all__ = ["main"]
