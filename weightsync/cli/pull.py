"""`weightsync pull`: write what a publisher serves to disk, bit for bit."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.options import Address, Insecure, KeysDirectory, TimeoutS, Verbose
from weightsync.cli.progress import ByteProgress, busy, rate_text, size_text
from weightsync.cli.signals import sigterm_as_interrupt

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower().removesuffix("b") + "b" if match[2] else "") if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise typer.BadParameter(f"{text!r} is no size; write it like 5GB, 512MiB or 1000000")
    return int(float(match[1]) * unit)


def pull(
    address: Address,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="PATH",
            show_default=False,
            help="A .safetensors file, or a folder for a sharded checkpoint.",
        ),
    ],
    shard_size: Annotated[
        str,
        typer.Option("--shard-size", metavar="SIZE", help="Largest file of a folder, like 5GB or 512MiB."),
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace weights that are there already.")] = False,
    keys: KeysDirectory = None,
    insecure: Insecure = False,
    timeout_s: TimeoutS = 60.0,
    verbose: Verbose = False,
) -> None:
    """Fetch the newest version and write it to disk, bit for bit, after its digests were verified.

    Files appear complete or not at all.

    Examples:

      weightsync pull tcp://127.0.0.1:7077 --out model.safetensors

      weightsync pull tcp://trainer0:7077 --keys ~/fleet-keys --out ./checkpoint --shard-size 2GB
    """
    shard_bytes = parse_size(shard_size)
    try:
        with sigterm_as_interrupt():
            _pull(address, out, shard_bytes, force, keys, insecure, timeout_s)
    except KeyboardInterrupt:
        print("stopped; nothing was written")
        raise typer.Exit(130) from None


def _pull(
    address: str,
    out: Path,
    shard_bytes: int,
    force: bool,
    keys: Path | None,
    insecure: bool,
    timeout_s: float,
) -> None:
    import weightsync as ws
    from weightsync.cli.checkpoint_sink import CheckpointSink
    from weightsync.types import DTYPES

    sink = CheckpointSink(out, shard_bytes=shard_bytes)
    sink.refuse_existing(force=force)
    layout = ws.fetch_layout(address, keys=keys, insecure=insecure, timeout_s=timeout_s)
    sizes = {spec.name: math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in layout.tensors}
    total = sum(sizes.values()) + sum(sizes[target] for target in layout.aliases.values())
    sink.refuse_full_disk(total, len(sizes) + len(layout.aliases))

    started = time.monotonic()
    with ByteProgress("reading") as progress:
        version, tensors = ws.pull(
            address, keys=keys, insecure=insecure, timeout_s=timeout_s, progress=progress
        )
    read_s = time.monotonic() - started
    started = time.monotonic()
    with busy(f"writing {out}"):
        paths = sink.write(tensors, {"format": "pt", "weightsync_version": str(version)})
    write_s = time.monotonic() - started
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(
        f"version {version}: {len(tensors)} tensors, {size_text(size)}, all digests verified\n"
        f"read in {read_s:.2f} s ({rate_text(size, read_s)}), "
        f"written in {write_s:.2f} s ({rate_text(size, write_s)})\n"
        f"wrote {out}" + (f" ({len(paths)} files)" if len(paths) > 1 else "")
    )
