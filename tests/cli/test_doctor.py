"""`weightsync doctor`: really done, not guessed; a finding says what it costs and how to mend it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.cli.conftest import Call, Run
from weightsync.cli.doctor import command, memory, paths, peer, software
from weightsync.cli.doctor.finding import Finding, State

NAMES = [
    "python", "native core", "cpu", "torch", "encryption", "cupy", "nixl", "shared memory", "huge pages",
    "/dev/shm", "memory", "locked memory", "open files", "remap", "shm transport", "zmq transport",
    *(["nixl transport"] if find_spec("nixl") else []),
]  # fmt: skip


def assert_helpful(finding: dict[str, Any]) -> None:
    assert finding["found"]
    if finding["state"] == "ok":
        assert not finding["cost"] and not finding["fix"]
    else:
        assert finding["cost"] and finding["fix"], finding


def test_json_has_the_documented_keys_and_everything_was_really_done(weightsync: Run) -> None:
    document = json.loads(weightsync("doctor", "--json").join())
    assert sorted(document) == ["findings", "ok", "weightsync"]
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert list(findings) == NAMES and document["ok"] is True
    for finding in findings.values():
        assert sorted(finding) == ["cost", "fix", "found", "name", "state"]
        assert_helpful(finding)
    assert "exchanged in" in findings["remap"]["found"]
    for name in NAMES[NAMES.index("shm transport") :]:
        assert "every bit equal" in findings[name]["found"]


def test_text_has_a_line_for_each_finding(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "check_transport", lambda name: Finding(f"{name} transport", State.OK, "yes"))
    code, said = call("doctor")
    assert code == 0
    for name in NAMES:
        assert any(f"{name}: " in line for line in said.splitlines()), name
    assert " ok, " in said.splitlines()[-1] and "0 fail" in said.splitlines()[-1]


def test_the_pure_twin_is_a_warning_that_says_how_to_get_the_core(spawn: Run) -> None:
    script = (
        "from weightsync.cli.doctor.software import check_native_core\n"
        "finding = check_native_core(); print(finding.state.value, finding.fix)"
    )
    said = spawn("-c", script, WEIGHTSYNC_NATIVE="off").join()
    assert said.startswith("warn ") and "WEIGHTSYNC_NATIVE=require" in said


def test_wrong_bits_in_the_second_process_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = peer.sample_tensors()
    honest["mask"] = ~honest["mask"]
    monkeypatch.setattr(paths, "sample_tensors", lambda: honest)
    finding = paths.check_transport("shm")
    assert finding.state is State.FAIL and "wrong bits in mask" in finding.found


def test_a_broken_check_is_a_finding_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    def explode() -> Finding:
        raise OSError("no such luck")

    monkeypatch.setattr(software, "check_cpu", explode)
    for module, check in ((paths, "check_exchange"), (memory, "check_huge_pages")):
        monkeypatch.setattr(module, check, lambda: Finding("fine", State.OK, "yes"))
    monkeypatch.setattr(paths, "check_transport", lambda name: Finding(name, State.OK, "yes"))
    with pytest.raises(typer.Exit) as end:
        command.doctor(as_json=True)
    assert end.value.exit_code == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and len(document["findings"]) == len(NAMES)
    broken = [finding for finding in document["findings"] if finding["state"] == "fail"]
    assert [finding["name"] for finding in broken] == ["cpu"] and "no such luck" in broken[0]["found"]


def test_few_open_files_are_a_warning(spawn: Run) -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from weightsync.cli.doctor.memory import check_open_files\n"
        "finding = check_open_files(); print(finding.state.value, finding.fix)"
    )
    assert spawn("-c", script).join().startswith("warn ulimit -n")
