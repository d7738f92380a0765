"""`weightsync bench`: rows that were really measured and checked, on one host and between two ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Run
from weightsync.cli.bench import command
from weightsync.cli.bench.content import Content
from weightsync.cli.bench.reader import Received

SMALL = ("--size", "300kB", "--tensors", "7", "--rounds", "3")


def test_every_transport_is_measured_and_checked(weightsync: Run, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    said = weightsync("bench", *SMALL, "--transport", "shm", "--transport", "zmq", "--json", str(out)).join()
    document = json.loads(out.read_text())
    assert sorted(document) == ["date", "machine", "rows", "weightsync"]
    assert [(row["transport"], row["swap"], row["tensors"], row["bytes"]) for row in document["rows"]] == [
        ("shm", "remap", 7, 300_000), ("zmq", "remap", 7, 300_000),
    ]  # fmt: skip
    for row in document["rows"]:
        assert row["wrong"] == 0 and row["rounds"] == 3
        assert 0 < row["stage_s"] < row["live_s"] <= row["live_p99_s"]
        assert row["ratio"] == pytest.approx(row["live_s"] / row["plain_copy_s"])
    assert "wrong" in said and said.count("remap") >= 2


def test_two_ends_that_are_started_apart_find_each_other(weightsync: Run, tmp_path: Path) -> None:
    sent, received = tmp_path / "sent.json", tmp_path / "received.json"
    address = f"ipc://{tmp_path}/bench"
    sender = weightsync("bench", *SMALL, "--serve", address, "--json", str(sent))
    weightsync(
        "bench", address, *SMALL, "--transport", "shm", "--swap", "flip", "--json", str(received)
    ).join()
    sender.join()
    (there,), (here,) = (json.loads(file.read_text())["rows"] for file in (sent, received))
    assert there["transport"] == here["transport"] == "shm"
    assert there["live_s"] > 0 and there["wrong"] is None
    assert here["read_s"] > 0 and here["wrong"] == 0 and here["live_s"] is None


def test_a_way_that_does_not_exist_is_one_clear_error(weightsync: Run) -> None:
    said = weightsync("bench", *SMALL, "--transport", "zmq", "--swap", "adopt").join(code=1)
    assert "can't map slots" in said and "Traceback" not in said


@pytest.mark.parametrize(("arguments", "says"), [
    (["--transport", "pigeon"], "installed are"), (["tcp://127.0.0.1:1", "--serve", "tcp://127.0.0.1:2"], "one of them"),
    (["--size", "much"], "no size"), (["--serve", "tcp://0.0.0.0:0"], "other hosts can reach"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(call: Call, arguments: list[str], says: str) -> None:
    code, said = call("bench", *arguments)
    assert code != 0 and says in said


def test_one_wrong_element_is_counted_and_fails_the_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Content(4096, 3)
    content.go_to(5)
    assert content.wrong(5) == 0 and content.wrong(6) == 2048
    content.state["weight.1"][7] = 0.5
    assert content.wrong(5) == 1
    received = [Received(1, "shm", 0.1, 0.001, 0), Received(2, "shm", 0.1, 0.001, 1)]
    monkeypatch.setattr(
        command._Job, "here", lambda job, names, swaps: [job._row("shm", "remap", 4096, [], received)]
    )
    code, said = call("bench")
    assert code == 1 and said.splitlines()[1].endswith(" 1")
