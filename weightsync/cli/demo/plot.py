"""A timeline of the run as a picture: loss, versions, request latency and swap pauses over one time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.cli.demo.schedule import Schedule
from weightsync.cli.demo.sparkline import smoothed
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.view import describe_model, describe_replicas, describe_transport

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def save_plot(tally: Tally, path: Path) -> None:
    """Write the picture in the format that the file's suffix names. Needs matplotlib, opens no window."""
    from matplotlib.figure import Figure

    schedule = tally.schedule
    if schedule is None:
        raise ValueError("the run never began: there is nothing to plot")
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    axes: Any = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 2, 2))
    figure.suptitle(
        f"weightsync demo: {describe_model(tally)}\n"
        f"{describe_replicas(tally)}, transport {describe_transport(tally)}, swap {tally.settings.swap}",
        fontsize=11,
    )
    for panel, draw in zip(axes, (_draw_loss, _draw_versions, _draw_requests, _draw_pauses), strict=True):
        _shade_off(panel, schedule)
        draw(panel, tally, schedule.begin_s)
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(0, schedule.end_s - schedule.begin_s)
    figure.savefig(path, dpi=130)


def _shade_off(panel: Axes, schedule: Schedule) -> None:
    label = "syncing off"
    for phase in schedule.phases:
        if not phase.is_syncing:
            panel.axvspan(
                phase.begin_s - schedule.begin_s,
                phase.end_s - schedule.begin_s,
                color="0.92",
                lw=0,
                label=label,
                zorder=0,
            )
            label = "_"


def _draw_loss(panel: Axes, tally: Tally, begin_s: float) -> None:
    times_s = [loss.at_s - begin_s for loss in tally.losses]
    values = [loss.value for loss in tally.losses]
    panel.plot(times_s, values, color="0.75", lw=0.8, zorder=1)
    panel.plot(times_s, smoothed(values), color="black", lw=1.5, label="training", zorder=2)
    for color, server in zip(_colors(tally), tally.servers.values(), strict=True):
        panel.plot(
            [heldout.at_s - begin_s for heldout in server.heldout],
            [heldout.loss for heldout in server.heldout],
            color=color,
            lw=1.2,
            marker=".",
            ms=4,
            drawstyle="steps-post",
            label=f"held out, {server.name}",
        )
    panel.set_ylabel("loss, nats per byte")


def _draw_versions(panel: Axes, tally: Tally, begin_s: float) -> None:
    panel.plot(
        [published.at_s - begin_s for published in tally.published],
        [published.version for published in tally.published],
        "k|",
        ms=9,
        label="published",
    )
    for color, server in zip(_colors(tally), tally.servers.values(), strict=True):
        times_s = [adopted.at_s - begin_s for adopted in server.adopted]
        versions = [adopted.version for adopted in server.adopted]
        if times_s and tally.schedule is not None:
            times_s.append(tally.schedule.end_s - begin_s)
            versions.append(versions[-1])
        panel.plot(
            times_s, versions, color=color, lw=1.2, drawstyle="steps-post", label=f"live, {server.name}"
        )
    panel.set_ylabel("version")


def _draw_requests(panel: Axes, tally: Tally, begin_s: float) -> None:
    for color, server in zip(_colors(tally), tally.servers.values(), strict=True):
        panel.plot(
            [answered.arrived_s - begin_s for answered in server.answered],
            [answered.latency_s * 1e3 for answered in server.answered],
            ".",
            color=color,
            ms=3,
            label=server.name,
        )
    panel.set_ylabel("request, ms")
    panel.set_ylim(bottom=0)


def _draw_pauses(panel: Axes, tally: Tally, begin_s: float) -> None:
    for color, server in zip(_colors(tally), tally.servers.values(), strict=True):
        panel.plot(
            [adopted.at_s - begin_s for adopted in server.adopted],
            [adopted.pause_s * 1e6 for adopted in server.adopted],
            "o",
            color=color,
            ms=3,
            label=server.name,
        )
    panel.set_ylabel("swap pause, µs")
    panel.set_yscale("log")


def _colors(tally: Tally) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(len(tally.servers))]
