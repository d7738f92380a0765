"""Shows a run while it goes on: the live view on a terminal, a plain line every second or two elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live

from weightsync.cli.demo.plain import describe_now, describe_start
from weightsync.cli.demo.summary import Claim, draw_claims, draw_figures
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.view import draw_view

REDRAW_S = 0.25
LINE_S = 1.5


class Screen:
    """A context manager around the run; `show` may be called as often as one likes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_s = 0.0
        self._has_begun = False

    def __enter__(self) -> Screen:
        if self._live is None:
            self._print("starting one trainer and its servers; importing torch takes a few seconds")
        else:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, tally: Tally) -> None:
        now_s = time.monotonic()
        if self._live is not None:
            if now_s - self._shown_s >= REDRAW_S:
                self._shown_s = now_s
                self._live.update(draw_view(tally, now_s), refresh=True)
            return
        if tally.schedule is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._shown_s = now_s
            self._print(describe_start(tally))
        elif now_s - self._shown_s >= LINE_S:
            self._shown_s = now_s
            self._print(describe_now(tally, now_s))

    def show_last(self, tally: Tally) -> None:
        """The state at the end, so that what stays on the terminal is complete."""
        if self._live is not None:
            self._live.update(draw_view(tally, time.monotonic()), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def print_summary(console: Console, tally: Tally, claims: list[Claim]) -> None:
    console.print()
    console.print(draw_figures(tally))
    console.print()
    console.print(draw_claims(claims))
    failures = [
        f"{server.name}: {failure}" for server in tally.servers.values() for failure in server.failures
    ]
    for failure in failures[:10]:
        console.print(failure, style="red", markup=False)
