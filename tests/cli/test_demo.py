"""The demo: what it measures, what it claims, what it writes, and a short real run of all its processes."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import weightsync as ws
from weightsync.cli.application import app
from weightsync.cli.demo.crew import ChildFailedError, Crew
from weightsync.cli.demo.events import (
    Adopted,
    Answered,
    HeldOut,
    Loss,
    Passes,
    Published,
    Receipts,
    Served,
    ServerUp,
    Synced,
    Trained,
    TrainerUp,
)
from weightsync.cli.demo.gpt import Gpt
from weightsync.cli.demo.line import Line
from weightsync.cli.demo.load import Load
from weightsync.cli.demo.outputs import Outputs, draw_svg
from weightsync.cli.demo.plain import describe_now, describe_start
from weightsync.cli.demo.record import Record
from weightsync.cli.demo.report import dump_report, make_report
from weightsync.cli.demo.schedule import plan_phases
from weightsync.cli.demo.server import Server
from weightsync.cli.demo.settings import ModelSize, Settings, pick_rate, threads_per_process
from weightsync.cli.demo.sizes import SIZES
from weightsync.cli.demo.sparkline import smoothed, sparkline
from weightsync.cli.demo.spread import Spread, spread_of
from weightsync.cli.demo.summary import Verdict, has_failed, judge_run
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.text import draw_windows, load_text, spaced_windows
from weightsync.cli.demo.view import draw_view
from weightsync.errors import ConfigError, DigestError, EvictedError

REPORT_KEYS = {
    "versions_published", "digest_failures", "time_to_staged_ms", "time_to_live_ms", "request_ms",
    "request_ms_sync_off", "tokens_per_s", "servers",
}  # fmt: skip
SERVER_KEYS = {
    "versions_live", "forward_passes", "mixed_forward_passes", "passes_checked", "swap_pause_us",
    "heldout_loss_first", "heldout_loss_last",
}  # fmt: skip
RUN_S = 150.0  # a whole short run, start-up included, on a slow and busy machine


def served(name: str, at_s: float, *, passes: Passes, receipts: Receipts, loss: float) -> Served:
    version = receipts.versions_live
    return Served(
        name=name,
        at_s=at_s,
        live_version=version,
        tokens=100 * version,
        waiting=0,
        passes=passes,
        receipts=receipts,
        answered=(Answered(101.0, 0.010), Answered(103.0, 0.030)),
        adopted=(Adopted(at_s, version, 25e-6),),
        heldout=(HeldOut(at_s, version, loss),),
        failures=(),
        sample=("def fo", "o(x):"),
    )


def a_good_run() -> Tally:
    """Six seconds from 100.0 on: off, on, on, off, on, on; three versions of 1 MiB on two servers."""
    tally = Tally(Settings(seconds=6.0))
    tally.schedule = plan_phases(100.0, 6.0)
    tally.rate = 5.0
    tally.fold(TrainerUp("tcp://127.0.0.1:1", 262144, 10, 2**20))
    tally.fold(
        Trained(
            losses=(Loss(100.5, 1, 5.5), Loss(101.5, 2, 4.0)),
            published=(Published(99.0, 1, 0, 1e-3), Published(101.5, 2, 2, 2e-3)),
            synced=(Synced(1, 2**20, 0.1, 0.8, 1.0, (0.5, 0.5)),),
            skipped=0,
        )
    )
    synced = (Synced(2, 2**20, 0.003, 0.018, 0.020, (0.001,)), Synced(3, 2**20, 0.002, None, None, ()))
    tally.fold(Trained((Loss(105.0, 3, 3.0),), (Published(105.0, 3, 3, 1e-3),), synced, skipped=1))
    for name in tally.servers:
        tally.fold(ServerUp(name, 0.005))
        tally.fold(served(name, 100.2, passes=Passes(10, 2, 0), receipts=Receipts("shm", 1, 1), loss=5.5))
        receipts = Receipts("shm", 3, 3, bytes_received=3 * 2**20)
        tally.fold(served(name, 105.2, passes=Passes(80, 10, 0, 0.02), receipts=receipts, loss=3.25))
    return tally


def spoil(tally: Tally, *, passes: Passes | None = None, receipts: Receipts | None = None) -> Tally:
    server = tally.servers["server-1"]
    server.passes = passes or server.passes
    server.receipts = receipts or server.receipts
    return tally


def verdicts(tally: Tally) -> dict[str, Verdict]:
    return {claim.title: claim.verdict for claim in judge_run(tally)}


# --- measuring


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=137)
    spread = spread_of(values.tolist())
    assert spread.p50 == pytest.approx(np.percentile(values, 50))
    assert spread.p99 == pytest.approx(np.percentile(values, 99))
    assert spread_of([]) == Spread(None, None)
    assert spread_of([]).scaled(1e3).as_dict() == {"p50": None, "p99": None}
    assert spread_of([2.0]) == Spread(2.0, 2.0)


def test_syncing_is_off_for_a_third_of_the_run_and_phases_alternate() -> None:
    schedule = plan_phases(10.0, 12.0)
    states = [schedule.is_syncing(10.0 + tenth / 10) for tenth in range(120)]
    assert states.count(False) == 40
    assert [phase.is_syncing for phase in schedule.phases] == [False, True, False, True]
    assert schedule.begin_s == 10.0
    assert schedule.end_s == pytest.approx(22.0)
    assert not schedule.is_syncing(9.0)
    assert schedule.is_syncing(23.0)


def test_requests_arrive_by_the_clock_and_not_when_the_server_looks() -> None:
    prompts = torch.arange(8).view(2, 4)
    load = Load(10.0, 11.0, rate=10.0, prompts=prompts, tokens=3)
    assert list(load.arrivals(9.9)) == []
    assert [request.arrived_s for request in load.arrivals(10.0)] == [10.0]
    late = list(load.arrivals(10.95))  # a stall of almost a second hides no request and no waiting time
    assert [request.arrived_s for request in late] == pytest.approx([10.0 + i / 10 for i in range(1, 10)])
    assert load.next_s is None
    request = late[0]
    request.append(99)
    assert request.window.tolist() == [5, 6, 7, 99]
    assert (request.tokens_left, request.sample()[1]) == (2, "c")


def test_a_server_is_asked_for_less_than_it_can_do() -> None:
    size = SIZES["small"]
    assert pick_rate(0.010, size) * 0.010 * size.reply_tokens == pytest.approx(0.4)
    assert [threads_per_process(cores, 2) for cores in (1, 2, 6, 64)] == [1, 1, 2, 4]


def test_a_pass_is_mixed_when_a_tensor_differs_or_the_label_moves() -> None:
    record = Record("server-0")
    record.note_pass(3, 3, [], is_checked=True, is_busy=True)
    assert (record.passes, record.mixed) == (1, 0)
    record.note_pass(3, 3, ["blocks.0.qkv.weight"], is_checked=True, is_busy=True)
    record.note_pass(3, 4, [], is_checked=False, is_busy=True)
    assert (record.passes, record.mixed) == (3, 2)


def test_only_wrong_digests_count_as_digest_failures() -> None:
    record = Record("server-0")
    record.note_failed(4, DigestError("bytes differ"))
    record.note_failed(5, EvictedError("too slow"))
    assert record.digest_failures == 1


def test_a_curve_fits_its_width() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([float(i) for i in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert smoothed([4.0, 2.0, 0.0], window=2) == [4.0, 3.0, 1.0]


# --- model and text


def test_every_model_size_is_an_option() -> None:
    assert get_args(ModelSize) == tuple(SIZES)


def test_text_is_split_the_same_way_every_time() -> None:
    text, again = load_text(limit_bytes=1 << 18), load_text(limit_bytes=1 << 18)
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.heldout, again.heldout)
    assert len(text.train) > 4 * len(text.heldout) > 0
    assert spaced_windows(text.heldout, 4, 33).shape == (4, 33)


def test_the_gpt_is_causal_tied_and_starts_without_knowledge() -> None:
    model = Gpt(SIZES["tiny"]).eval()
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    with torch.inference_mode():
        before, after = model.hidden(tokens), model.hidden(changed)
        assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5)
        assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-5)
        assert model.loss(tokens).item() == pytest.approx(math.log(256), abs=0.3)
    assert model.head.weight is model.embedding.weight


def test_the_gpt_learns_within_a_few_steps() -> None:
    size, text = SIZES["tiny"], load_text(limit_bytes=1 << 18)
    model, draws = Gpt(size), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    losses = []
    for _ in range(20):
        loss = model.loss(draw_windows(text.train, size.batch, size.context + 1, draws))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


# --- claims and files


def test_a_good_run_passes_every_claim() -> None:
    tally = a_good_run()
    assert set(verdicts(tally).values()) == {Verdict.PASS}
    assert not has_failed(judge_run(tally))


@pytest.mark.parametrize(
    ("title", "spoiled"),
    [
        ("no pass mixed versions", {"passes": Passes(80, 10, 1)}),
        ("no pass mixed versions", {"passes": Passes(80, 0, 0)}),
        ("every byte was right", {"receipts": Receipts("shm", 3, 3, 1, 1)}),
        ("servers switched while serving", {"receipts": Receipts("shm", 1, 1)}),
    ],
)
def test_a_run_fails_for(title: str, spoiled: dict[str, Passes | Receipts]) -> None:
    tally = spoil(a_good_run(), **spoiled)  # type: ignore[arg-type]
    if "passes" in spoiled and spoiled["passes"].checked == 0:  # type: ignore[union-attr]
        tally.servers["server-0"].passes = Passes(80, 0, 0)
    assert verdicts(tally)[title] is Verdict.FAIL
    assert has_failed(judge_run(tally))


def test_slow_requests_are_noted_but_do_not_fail_a_run() -> None:
    tally = a_good_run()
    for server in tally.servers.values():
        server.answered = [Answered(100.5, 0.05), Answered(102.0, 0.5)]
    assert verdicts(tally)["syncing stays out of the way"] is Verdict.NOTE
    assert not has_failed(judge_run(tally))


def test_the_report_has_every_promised_figure() -> None:
    tally = a_good_run()
    report = json.loads(dump_report(make_report(tally, judge_run(tally), is_complete=True)))
    assert report.keys() >= REPORT_KEYS
    assert all(server.keys() >= SERVER_KEYS for server in report["servers"])
    assert report["versions_published"] == 3
    assert report["versions_skipped"] == 1
    assert report["time_to_staged_ms"]["p50"] == pytest.approx(2.5)
    assert report["time_to_live_ms"] == {"p50": pytest.approx(20.0), "p99": pytest.approx(20.0)}
    assert report["gib_per_s"] == pytest.approx(1 / 1.024, rel=1e-3)
    assert report["tokens_per_s"] == pytest.approx(600 / 5.2, rel=1e-3)
    first = report["servers"][0]
    assert first["swap_pause_us"] == {"p50": pytest.approx(25.0), "p99": pytest.approx(25.0)}
    assert (first["heldout_loss_first"], first["heldout_loss_last"]) == (5.5, 3.25)


def test_requests_are_told_apart_by_the_phase_they_arrived_in() -> None:
    tally = a_good_run()
    for server in tally.servers.values():
        server.answered = [Answered(100.9, 0.010), Answered(101.1, 0.030), Answered(103.5, 0.010)]
    assert tally.request_s(is_syncing=False) == Spread(0.010, 0.010)
    assert tally.request_s(is_syncing=True, name="server-1") == Spread(0.030, 0.030)


def test_a_run_that_measured_nothing_still_reports() -> None:
    tally = Tally(Settings())
    report = json.loads(dump_report(make_report(tally, judge_run(tally), is_complete=False)))
    assert report["time_to_live_ms"] == {"p50": None, "p99": None}
    assert report["servers"][1]["heldout_loss_last"] is None
    assert has_failed(judge_run(tally))
    assert describe_start(tally)
    assert describe_now(tally, 0.0)


def test_a_loss_that_is_not_a_number_is_null_in_the_report() -> None:
    tally = a_good_run()
    tally.losses.append(Loss(105.5, 4, math.nan))
    tally.servers["server-0"].heldout.append(HeldOut(105.5, 3, math.inf))
    report = json.loads(dump_report(make_report(tally, judge_run(tally), is_complete=True)))
    assert report["training_loss_last"] is None
    assert report["servers"][0]["heldout_loss_last"] is None


def test_the_view_shows_versions_pauses_and_latency() -> None:
    console = Console(width=112, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(draw_view(a_good_run(), 103.0))
    shown = console.export_text()
    console.file.close()
    for expected in (
        "syncing off",
        "5.50 → 4.17",
        "25.0 / 25.0",
        "server-1",
        "20.0 / 20.0 ms",
        "in 3 optimizer",
    ):
        assert expected in shown
    assert "</svg>" in draw_svg(a_good_run(), 103.0)


def test_all_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = Outputs(tmp_path / "run.json", tmp_path / "run.png", tmp_path / "run.svg")
    outputs.check()
    assert list(tmp_path.iterdir()) == []
    tally = a_good_run()
    assert len(outputs.write(tally, judge_run(tally), 106.0, is_complete=True)) == 3
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "weightsync" in (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["is_complete"] is True


def test_a_file_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .*nowhere"):
        Outputs(json=tmp_path / "nowhere" / "run.json").check()
    with pytest.raises(ConfigError, match="--svg"):
        Outputs(svg=tmp_path).check()
    with pytest.raises(ConfigError, match=r"\.png"):
        Outputs(plot=tmp_path / "run.xyz").check()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_matplotlib_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        Outputs(plot=tmp_path / "run.png").check()


# --- the command and its processes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--seconds", "inf"], "--seconds"),
        (["--replicas", "0"], "--replicas"),
        (["--rate", "-1"], "--rate"),
        (["--check-every", "0"], "--check-every"),
        (["--publish-every", "0"], "--publish-every"),
        (["--swap", "teleport"], "--swap"),
    ],
)
def test_bad_options_are_refused_at_once(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments], env={"TERMINAL_WIDTH": "200", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert named in result.output


@pytest.mark.timeout(RUN_S + 60)
def test_a_child_that_crashes_is_reported_with_its_traceback() -> None:
    settings = Settings(model_size="no such size")  # type: ignore[arg-type]
    with Crew(settings) as crew, pytest.raises(ChildFailedError) as caught:
        await_failure(crew)
    assert "Traceback" in str(caught.value)
    assert "no such size" in str(caught.value)
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(RUN_S + 60)
def test_a_child_that_is_killed_is_named() -> None:
    with Crew(Settings(replicas=1, model_size="tiny")) as crew:
        victim = next(child for child in multiprocessing.active_children() if child.name == "server-0")
        victim.kill()
        with pytest.raises(ChildFailedError, match="server-0 was killed by SIGKILL"):
            await_failure(crew)
    assert multiprocessing.active_children() == []


def test_weights_that_change_within_a_pass_are_found_out() -> None:
    """The proof of the demo can fail: a model that scribbles over its own weights is a mixed pass."""

    class Scribbler(Gpt):
        is_scribbling = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            if self.is_scribbling:
                self.blocks[1].qkv.weight[3, 5] += 1e-3  # type: ignore[index, operator, union-attr]
            return logits

    settings, model = Settings(replicas=1, model_size="tiny", check_every=1), Scribbler(SIZES["tiny"], seed=1)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, ws.Publisher("tcp://127.0.0.1:0") as publisher, torch.inference_mode():
        publisher.register(Gpt(SIZES["tiny"], seed=2))
        publisher.publish()
        with Server(settings, 0, model, publisher.address, Line(theirs)) as server:
            server.forward(torch.zeros(1, 32, dtype=torch.long))
            assert (server.record.passes, server.record.mixed) == (1, 0)
            model.is_scribbling = True
            server.forward(torch.zeros(1, 32, dtype=torch.long))
            assert (server.record.passes, server.record.mixed) == (2, 1)


def await_failure(crew: Crew) -> None:
    deadline_s = time.monotonic() + RUN_S
    while time.monotonic() < deadline_s:
        crew.events(0.2)


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weightsync.cli", "demo", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end_demo(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output of the demo, once it and all its children are gone; whatever happened, none is left."""
    try:
        shown, errors = process.communicate(timeout=RUN_S)
        deadline_s = time.monotonic() + 10.0
        while (left := living_members(process.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert left == []
        return shown, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def living_members(group: int) -> list[str]:
    """Processes of a process group, without zombies that nobody has reaped yet."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


@pytest.mark.timeout(RUN_S + 60)
def test_a_real_run_proves_its_claims(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    process = start_demo("--seconds", "10", "--json", str(target), "--svg", str(tmp_path / "run.svg"))
    shown, errors = end_demo(process)
    assert process.returncode == 0, shown + errors
    report = json.loads(target.read_text(encoding="utf-8"))
    assert report.keys() >= REPORT_KEYS
    assert report["is_complete"] is True
    assert report["versions_published"] >= 2
    assert report["digest_failures"] == 0
    assert report["training_loss_last"] < report["training_loss_first"]
    assert report["time_to_staged_ms"]["p50"] <= report["time_to_live_ms"]["p99"]
    assert report["request_ms"]["p50"] > 0
    assert report["request_ms_sync_off"]["p50"] > 0
    assert report["tokens_per_s"] > 0
    assert len(report["servers"]) == 2
    for server in report["servers"]:
        assert server.keys() >= SERVER_KEYS
        assert server["versions_live"] >= 2
        assert server["live_version"] == report["versions_published"]
        assert server["mixed_forward_passes"] == 0
        assert server["forward_passes"] > server["passes_checked"] > 0
        assert server["swap_pause_us"]["p99"] > 0
        assert server["heldout_loss_last"] < server["heldout_loss_first"]
    assert "no pass mixed versions" in shown


@pytest.mark.timeout(RUN_S + 60)
def test_ctrl_c_stops_all_processes_and_still_prints_the_summary() -> None:
    process = start_demo("--seconds", "600", "--model-size", "tiny")
    assert process.stdout is not None
    for line in process.stdout:
        if "published" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    shown, errors = end_demo(process)
    assert process.returncode == 130, shown + errors
    assert "no pass mixed versions" in shown
    assert "interrupted" in shown
    assert "Traceback" not in shown + errors
