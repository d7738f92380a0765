"""The files a run writes. Whether they can be written is found out before the run, not after it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from weightsync.cli.demo.plot import save_plot
from weightsync.cli.demo.report import dump_report, make_report
from weightsync.cli.demo.summary import Claim
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.view import draw_view
from weightsync.errors import ConfigError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
SVG_WIDTH = 112


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to write; None: not asked for."""

    json: Path | None = None
    plot: Path | None = None
    svg: Path | None = None

    def check(self) -> None:
        """ConfigError: a file can't be written, or what draws it is missing."""
        for option, path in (("--json", self.json), ("--plot", self.plot), ("--svg", self.svg)):
            if path is not None:
                _require_writable(option, path)
        if self.plot is not None:
            if self.plot.suffix not in PLOT_SUFFIXES:
                raise ConfigError(f"--plot {self.plot}: end the name in one of {', '.join(PLOT_SUFFIXES)}")
            if importlib.util.find_spec("matplotlib") is None:
                raise ConfigError(
                    "--plot draws with matplotlib, which is not installed: pip install matplotlib"
                )

    def write(self, tally: Tally, claims: list[Claim], now_s: float, *, is_complete: bool) -> list[Path]:
        """Write what was asked for; returns the files written. The plot needs a run that has begun."""
        written = []
        if self.json is not None:
            report = make_report(tally, claims, is_complete=is_complete)
            self.json.write_text(dump_report(report), encoding="utf-8")
            written.append(self.json)
        if self.svg is not None:
            self.svg.write_text(draw_svg(tally, now_s), encoding="utf-8")
            written.append(self.svg)
        if self.plot is not None and tally.schedule is not None:
            save_plot(tally, self.plot)
            written.append(self.plot)
        return written


def draw_svg(tally: Tally, now_s: float) -> str:
    """The live view as rich's SVG, whether or not this run had a terminal."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(
            record=True, width=SVG_WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(draw_view(tally, now_s))
    return console.export_svg(title="weightsync demo")


def _require_writable(option: str, path: Path) -> None:
    """Open the file as the end of the run will; leave no new file behind."""
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: can't be written: {error.strerror}") from error
