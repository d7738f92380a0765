"""The `doctor` command: run all checks, show findings, exit 1 if one failed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import typer
from rich.console import Console
from rich.text import Text

from weightsync import __version__
from weightsync.cli.doctor.finding import Finding, State
from weightsync.cli.options import AsJson, Verbose

_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def doctor(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Tell what works on this host, what the rest costs, and how to get it. Exits with 1 if something fails.

    Memory is really exchanged, and weights are really moved between two processes over each transport.

    Example:  weightsync doctor

    [bold]--json[/bold] prints an object with the keys weightsync (release), ok (bool: nothing failed), and
    findings: a list of objects with name, state ("ok", "warn" or "fail"), found, cost and fix (empty when
    ok).
    """
    findings: list[Finding] = []
    console = Console()
    for finding in examine():
        findings.append(finding)
        if not as_json:
            console.print(_render(finding), soft_wrap=not console.is_terminal)
    is_ok = all(finding.state is not State.FAIL for finding in findings)
    if as_json:
        listed = [{**asdict(finding), "state": finding.state.value} for finding in findings]
        document = {"weightsync": __version__, "ok": is_ok, "findings": listed}
        print(json.dumps(document, indent=2))
    else:
        counts = ", ".join(f"{sum(f.state is state for f in findings)} {state.value}" for state in State)
        print(f"weightsync {__version__}: {counts}")
    if not is_ok:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, cheap checks first. A check that breaks is itself a finding; the rest still runs."""
    from weightsync.cli.doctor import memory, paths, software

    checks: dict[str, Callable[[], Finding]] = {
        "python": software.check_python,
        "native core": software.check_native_core,
        "cpu": software.check_cpu,
        "torch": software.check_torch,
        "encryption": software.check_encryption,
        "cupy": software.check_cupy,
        "nixl": software.check_nixl,
        "shared memory": memory.check_segments,
        "huge pages": memory.check_huge_pages,
        "/dev/shm": memory.check_dev_shm,
        "memory": memory.check_memory,
        "locked memory": memory.check_locked_memory,
        "open files": memory.check_open_files,
        "remap": paths.check_exchange,
        **{f"{name} transport": partial(paths.check_transport, name) for name in paths.installed()},
    }
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:  # the doctor's job is to say what is broken, whatever it is
            logging.getLogger(__name__).info("%s", name, exc_info=True)
            found = f"{type(error).__name__}: {error}"
            yield Finding(
                name,
                State.FAIL,
                found,
                "something that weightsync needs is broken",
                "see weightsync --verbose doctor",
            )


def _render(finding: Finding) -> Text:
    text = Text.assemble(
        (f"{finding.state.value:<5}", _STYLES[finding.state]), (f"{finding.name}: ", "bold"), finding.found
    )
    if finding.cost:
        text.append(f"\n       costs: {finding.cost}")
    if finding.fix:
        text.append(f"\n       fix:   {finding.fix}", "cyan")
    return text
