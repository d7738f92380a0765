"""`weightsync plan`: what moving a model between two shardings takes, computed from shapes alone."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from weightsync.cli.options import Verbose
from weightsync.cli.progress import size_text
from weightsync.errors import ConfigError

if TYPE_CHECKING:
    from weightsync.wire.summary import PlanSummary

T = TypeVar("T")


def plan(
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="A public model by name.")
    ] = None,
    trainer: Annotated[
        str, typer.Option("--trainer", metavar="DEGREES", help="The trainer's parallelism.")
    ] = "fsdp=8",
    servers: Annotated[
        str, typer.Option("--servers", metavar="DEGREES", help="The servers' parallelism.")
    ] = "tp=8",
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A Hugging Face config.json, instead of --model."),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(
            "--placement",
            metavar="FILE",
            help="Experts of each group: JSON, [ep][slots] or [sparse layers][ep][slots].",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON; '-' is stdout."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Plan a sync between two shardings of a model, and show moves, reads, bytes and their balance. Moves nothing.

    Example:  weightsync plan --model kimi-k2 --trainer "fsdp=32,ep=8" --servers "tp=8,ep=16,replicas=1"

    [bold]DEGREES[/bold] are pairs key=number with commas between them; a key that is left out is 1.

    [bold]--trainer[/bold]: tp (tensor), pp (pipeline), ep (expert), etp (tensor parallel inside experts; tp if left
    out), fsdp (sharding along dimension 0), hsdp (replicas of all that), host (ranks per host; 8). There are
    tp*pp*ep*fsdp*hsdp ranks. Dense tensors are sharded over fsdp*ep ranks; without fsdp they are replicated over ep,
    as in Megatron. Experts are dealt to ep, and each group shards its experts over fsdp.

    [bold]--servers[/bold]: tp, pp, ep, etp, dp (copies of the dense part), replicas, host (8). A replica has
    pp*tp*dp ranks, and tp*dp = ep*etp. Without dp and etp: dp = ep, etp = tp. So tp=8,ep=16 is 128 ranks, each
    with an eighth of the dense part and an eighth of a sixteenth of the experts; tp=8,ep=32,etp=1 is 32 ranks
    with whole experts.

    [bold]--json[/bold] writes an object with the keys seconds (to compute layouts and plans), peak_rss_bytes (of this
    process), moves, ranges (contiguous reads), bytes_needed, bytes_moved, moved_over_needed, egress_max_over_mean,
    egress_bound_max_over_mean (the least any choice of holders could reach), pairs, ranges_per_pair_mean and _max,
    bytes_per_pair_min, _median and _max, egress_max_bytes, egress_mean_bytes, ingress_max_over_mean,
    slot_bytes_max, slot_bytes_total, slot_bytes_over_distinct, bytes_by_distance, source_ranks, target_ranks, tensors,
    patterns, parcels, model, parameters, trainer and servers.
    """
    from weightsync.models import (
        ServerMesh,
        TrainerMesh,
        catalog_of,
        load_config,
        model_of,
        named_config,
        serve,
        train,
    )
    from weightsync.models import names as model_names
    from weightsync.wire.planner import plan_fleet
    from weightsync.wire.summary import summarize

    if (model is None) == (config is None):
        raise ConfigError(f"give one of --model and --config; models are {', '.join(model_names())}")
    mesh, server_mesh = (
        _degrees(trainer, TrainerMesh, "--trainer"),
        _degrees(servers, ServerMesh, "--servers"),
    )
    shape = model_of(load_config(config) if config is not None else named_config(str(model)))
    placed = None if placement is None else _read_placement(placement)
    started = time.perf_counter()
    catalog = catalog_of(shape)
    sources = train(catalog, mesh)
    targets = serve(catalog, server_mesh, placement=placed, first_host=mesh.ranks).side
    summary = summarize(plan_fleet(catalog.table, sources, targets))
    document = {
        "model": model or str(config),
        "parameters": shape.parameters,
        "trainer": trainer,
        "servers": servers,
        "seconds": time.perf_counter() - started,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **_builtins(summary),
    }
    if json_file is None or str(json_file) != "-":
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(_render(document))
    if json_file is not None:
        text = json.dumps(document)
        if str(json_file) == "-":
            print(text)
        else:
            try:
                json_file.write_text(text + "\n")
            except OSError as error:
                raise ConfigError(f"--json {json_file}: {error}") from error


def _degrees(text: str, kind: type[T], option: str) -> T:
    """A mesh from `key=number,...`."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, number = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise ConfigError(f"{option}: no key {key!r}; there are {', '.join(known)}")
        if key in values:
            raise ConfigError(f"{option}: {key} is given twice")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"{option}: {key}={number!r}, expected a number of at least 1, as in {key}=8")
        values[key] = int(number)
    return kind(**values)


def _read_placement(path: Path) -> Any:
    import numpy as np

    try:
        return np.array(json.loads(path.read_bytes()), np.int64)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--placement {path}: {error}") from error


def _builtins(summary: PlanSummary) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(summary)
    return found


def _render(document: dict[str, Any]) -> Table:
    d = document
    title = (
        f"{d['model']}: {d['parameters'] / 1e9:.1f} B parameters in {d['tensors']} tensors, "
        f"{d['source_ranks']} trainer ranks to {d['target_ranks']} server ranks"
    )
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    far = {name: size for name, size in d["bytes_by_distance"].items() if size}
    rows = {
        "planned in": f"{d['seconds']:.2f} s, {d['peak_rss_bytes'] / 2**20:.0f} MiB; {d['patterns']} patterns",
        "moves": f"{d['moves']:,} ({d['parcels']:,} boxes staged)",
        "ranges": f"{d['ranges']:,} over {d['pairs']:,} pairs: {d['ranges_per_pair_mean']:.2f} per pair, "
        f"at most {d['ranges_per_pair_max']} (least possible 1)",
        "bytes moved": f"{size_text(d['bytes_moved'])}, {d['moved_over_needed']:.6f} times what is needed "
        "(least possible 1)",
        "bytes per pair": f"{size_text(d['bytes_per_pair_median'])} in the middle, "
        f"{size_text(d['bytes_per_pair_min'])} to {size_text(d['bytes_per_pair_max'])}",
        "egress": f"at most {size_text(d['egress_max_bytes'])} from one rank, "
        f"{d['egress_max_over_mean']:.3f} times the mean (bound {d['egress_bound_max_over_mean']:.3f})",
        "ingress": f"{d['ingress_max_over_mean']:.3f} times the mean at most",
        "slots": f"{size_text(d['slot_bytes_max'])} at most, "
        f"{d['slot_bytes_over_distinct']:.4f} times the distinct bytes",
        "distance": ", ".join(f"{name} {size_text(size)}" for name, size in far.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
