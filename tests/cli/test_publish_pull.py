"""`weightsync publish` and `weightsync pull`: real checkpoints through two real processes, bit for bit."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.cli.conftest import Call, Run
from tests.conftest import Child

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def load(path: Path) -> Tensors:
    """What any other program would read: a file, or the folder that an index describes."""
    files = {path: None}
    if path.is_dir():
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        files = dict.fromkeys(path / file for file in weight_map.values())
    found: Tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in list(content.keys()):
                assert name not in found
                assert not path.is_dir() or weight_map[name] == file.name
                found[name] = content.get_tensor(name)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(got: Tensors, wanted: Tensors) -> None:
    assert sorted(got) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]) == bits(tensor), name


def save_folder(folder: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    mapped = weight_map or {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return folder


def serve(weightsync: Run, path: Path, address: str, *arguments: object) -> Child:
    publisher = weightsync("publish", path, "--address", address, *arguments)
    publisher.wait_for("fetch it with: ")
    return publisher


def pull(call: Call, *arguments: object, code: int = 0) -> str:
    got, said = call("pull", *arguments)
    assert got == code, said
    return said


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs permission to mount a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_arrives_bit_for_bit(
    weightsync: Run, address: str, file: Path, tmp_path: Path, tensors: Tensors
) -> None:
    publisher = serve(weightsync, file, address)
    out = tmp_path / "got.safetensors"
    said = weightsync("pull", address, "--out", out).join()
    assert "version 1: 11 tensors" in said
    assert "all digests verified" in said
    assert "GiB/s" in said
    publisher.interrupt()
    publisher.join()
    assert_equal(load(out), tensors)
    with safe_open(out, framework="pt") as content:
        assert content.metadata() == {"format": "pt", "weightsync_version": "1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got.safetensors", "model.safetensors"]


def test_a_sharded_folder_arrives_as_a_sharded_folder(
    weightsync: Run, call: Call, address: str, tmp_path: Path, tensors: Tensors
) -> None:
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:4]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[4:]},
    }
    publisher = serve(weightsync, save_folder(tmp_path / "in", shards), address)
    out = tmp_path / "out"
    pull(call, address, "--out", out, "--shard-size", "40KB")
    publisher.interrupt()
    assert "stopped" in publisher.join()
    assert_equal(load(out), tensors)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    total = json.loads((out / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in tensors.values())


def test_the_printed_line_fetches_over_tcp(
    weightsync: Run, call: Call, file: Path, tmp_path: Path, tensors: Tensors
) -> None:
    publisher = serve(weightsync, file, "tcp://127.0.0.1:0")
    line = publisher.wait_for(r"fetch it with: weightsync (pull tcp://127\.0\.0\.1:[1-9]\d*) --out")
    assert call(*line[1].split(), "--out", tmp_path / "got.safetensors")[0] == 0
    publisher.interrupt()
    publisher.join()
    assert_equal(load(tmp_path / "got.safetensors"), tensors)


def test_tensors_that_share_memory_arrive_under_each_name(
    weightsync: Run, call: Call, spawn: Run, address: str, tmp_path: Path
) -> None:
    trainer = spawn(
        "-c",
        "import sys, time, torch, weightsync as ws\n"
        "tied = torch.arange(8.0)\n"
        "with ws.Publisher(sys.argv[1]) as publisher:\n"
        "    publisher.register({'a': tied, 'b': tied, 'c': tied[2:4]})\n"
        "    publisher.publish()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n",
        address,
    )
    trainer.wait_for("ready")
    pull(call, address, "--out", tmp_path / "got.safetensors")
    trainer.kill()
    tied = torch.arange(8.0)
    assert_equal(load(tmp_path / "got.safetensors"), {"a": tied, "b": tied, "c": tied[2:4]})


def test_nothing_is_overwritten_without_force(
    weightsync: Run, call: Call, address: str, file: Path, tmp_path: Path, tensors: Tensors
) -> None:
    publisher = serve(weightsync, file, address)
    old = tmp_path / "old.safetensors"
    old.write_bytes(b"old")
    folder = save_folder(tmp_path / "old", {"model-00001-of-00001.safetensors": {"x": torch.ones(1)}})
    (folder / "config.json").write_text("{}")
    for out in (old, folder):
        said = pull(call, address, "--out", out, code=1)
        assert said.startswith("error: ") and "--force" in said and said.count("\n") == 1
    assert old.read_bytes() == b"old"
    assert list(load(folder)) == ["x"]

    for out in (old, folder):
        pull(call, address, "--out", out, "--force", "--shard-size", "40KB")
        assert_equal(load(out), tensors)
    assert (folder / "config.json").read_text() == "{}"
    publisher.interrupt()
    publisher.join()


def test_a_full_disk_is_told_before_anything_is_read(
    weightsync: Run, call: Call, address: str, tmp_path: Path, file: Path
) -> None:
    publisher = serve(weightsync, file, address)
    with small_disk(tmp_path / "small", "64k") as disk:
        said = pull(call, address, "--out", disk / "got.safetensors", code=1)
        assert "needs" in said and "are free" in said and "Traceback" not in said
        assert not list(disk.iterdir())
    publisher.interrupt()
    publisher.join()


def test_a_disk_that_fills_up_while_writing_is_left_clean(tmp_path: Path) -> None:
    from weightsync.cli.checkpoint_sink import CheckpointSink
    from weightsync.errors import CapacityError

    with small_disk(tmp_path / "small", "256k") as disk:
        for out in (disk / "got.safetensors", disk / "got"):
            sink = CheckpointSink(out, shard_bytes=100_000)
            with pytest.raises(CapacityError, match="disk is full"):
                sink.write({f"t{i}": torch.ones(20_000) for i in range(5)}, {})
            assert not list(disk.iterdir())


@pytest.mark.parametrize("out", ["got.safetensors", "got"])
def test_a_pull_that_is_stopped_leaves_nothing(
    weightsync: Run, spawn: Run, tmp_path: Path, address: str, out: str
) -> None:
    trainer = spawn(
        "-c",
        "import sys, time, torch, weightsync as ws\n"
        "with ws.Publisher(sys.argv[1]) as publisher:\n"
        "    publisher.register({'a': torch.ones(4)})\n"
        "    publisher.wait_for_members(1)\n"
        "    print('joined', flush=True)\n"
        "    time.sleep(60)\n",
        address,
    )
    pulling = weightsync("pull", address, "--out", tmp_path / out)
    trainer.wait_for("joined")
    pulling.process.terminate()
    assert "nothing was written" in pulling.join(130)
    trainer.kill()
    assert not list(tmp_path.iterdir())


def test_once_ends_when_the_wanted_number_have_it(
    weightsync: Run, call: Call, address: str, file: Path, tmp_path: Path
) -> None:
    publisher = serve(weightsync, file, address, "--once", 2, "--for", 60)
    for name in ("first", "second"):
        assert publisher.process.poll() is None
        pull(call, address, "--out", tmp_path / name)
    assert "done: 2 of 2" in publisher.join()


def test_nobody_there_is_one_line(call: Call, address: str, tmp_path: Path) -> None:
    ask = ("pull", address, "--out", tmp_path / "x", "--timeout", 0.3)
    code, said = call(*ask)
    assert code == 1 and said.startswith("error: ") and address in said and said.count("\n") == 1
    for verbose in ((*ask, "--verbose"), ("--verbose", *ask)):
        assert "Traceback" in call(*verbose)[1]


def test_a_goal_that_is_not_reached_in_time_fails(weightsync: Run, address: str, file: Path) -> None:
    said = weightsync("publish", file, "--address", address, "--once", 2, "--for", 0.5).join(1)
    assert "error: 0 of 2 members had version 1 live after 0.5 s; connected without it: nobody" in said


def test_a_second_publisher_is_refused_and_takes_over_when_asked(
    weightsync: Run, call: Call, address: str, file: Path, tmp_path: Path, tensors: Tensors
) -> None:
    first = serve(weightsync, file, address, "--name", "first")
    said = weightsync("publish", file, "--address", address).join(1)
    assert "first" in said.splitlines()[-1] and "Traceback" not in said
    second = serve(weightsync, file, address, "--takeover")
    assert "fenced" in first.join(1)
    pull(call, address, "--out", tmp_path / "got.safetensors")
    assert_equal(load(tmp_path / "got.safetensors"), tensors)
    second.interrupt()
    second.join()


def test_keys_guard_the_weights(
    weightsync: Run, call: Call, file: Path, tmp_path: Path, tensors: Tensors
) -> None:
    for name in ("fleet", "strangers"):
        call("keys", "new", tmp_path / name)
    publisher = serve(weightsync, file, "tcp://127.0.0.1:0", "--keys", tmp_path / "fleet")
    address = publisher.wait_for(r"serving at (\S+)")[1]
    out = tmp_path / "got.safetensors"
    pull(call, address, "--out", out, "--timeout", 1, code=1)
    pull(call, address, "--out", out, "--timeout", 1, "--keys", tmp_path / "strangers", code=1)
    assert not out.exists()
    pull(call, address, "--out", out, "--keys", tmp_path / "fleet")
    assert_equal(load(out), tensors)
    publisher.interrupt()
    publisher.join()


def test_an_open_address_needs_keys(call: Call, file: Path) -> None:
    code, said = call("publish", file, "--address", "tcp://0.0.0.0:0")
    assert code == 1 and "keys" in said.splitlines()[-1] and "insecure" in said.splitlines()[-1]


def test_everything_wrong_with_a_folder_is_listed(call: Call, address: str, tmp_path: Path) -> None:
    x = torch.ones(64)
    folder = save_folder(
        tmp_path / "bad",
        {
            "one.safetensors": {"a": x, "b": x.clone()},
            "two.safetensors": {"b": x, "extra": x.clone()},
            "cut.safetensors": {"d": x},
        },
        {"a": "one.safetensors", "b": "one.safetensors", "lost": "two.safetensors", "d": "cut.safetensors"}
        | {"e": "gone.safetensors", "f": "../out.safetensors"},
    )
    cut = folder / "cut.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    index = folder / INDEX
    entry = '"a": "one.safetensors"'
    index.write_text(index.read_text().replace(entry, f"{entry}, {entry}"))
    code, said = call("publish", folder, "--address", address)
    assert code == 1 and said.count("error: ") == 1 and "Traceback" not in said
    problems = [line.removeprefix("  - ") for line in said.splitlines() if line.startswith("  - ")]
    expected = [
        (INDEX, "names 1 of the tensors twice: a"),
        ("gone.safetensors", "missing"),
        ("'../out.safetensors'", "out of the folder"),
        ("cut.safetensors", "truncated, corrupt"),
        ("two.safetensors", "shares 1 of its tensors with one.safetensors: b"),
        ("two.safetensors", "lacks 1 of the tensors that the index puts there: lost"),
        ("two.safetensors", "holds 1 of its tensors without the index knowing: extra"),
    ]
    for parts in expected:
        assert any(all(part in problem for part in parts) for problem in problems), (parts, said)
    assert len(problems) == len(expected), said


def doubled_header() -> bytes:
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.safetensors", b"", "truncated, corrupt, or not a safetensors file"),
        ("huge.safetensors", struct.pack("<Q", 2**63) + b"{}", "truncated, corrupt"),
        ("noise.safetensors", bytes(range(256)) * 8, "truncated, corrupt"),
        ("doubled.safetensors", doubled_header(), "names 1 of the tensors twice: a"),
        ("none.safetensors", struct.pack("<Q", 2) + b"{}", "holds no tensors"),
        ("index.safetensors.index.json", b"{", "not readable as JSON"),
        ("index.safetensors.index.json", b"[]", "weight_map"),
        ("index.safetensors.index.json", b'{"weight_map": {"a": 1}}', "weight_map"),
        ("index.safetensors.index.json", b'{"weight_map": {}}', "holds no tensors"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    from weightsync.cli.checkpoint_source import open_checkpoint
    from weightsync.errors import ConfigError

    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ConfigError, match=expected):
            open_checkpoint(path)


def test_a_path_without_weights_says_what_is_there(call: Call, address: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path, expected in ((tmp_path, "convert to safetensors"), (tmp_path / "no", "no such file or folder")):
        code, said = call("publish", path, "--address", address)
        assert code == 1 and expected in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull"],
        ["pull", "ipc://@x"],
        ["pull", "ipc://@x", "--out", "y", "--shard-size", "many"],
        ["pull", "ipc://@x", "--out", "y", "--shard-size", "0"],
        ["publish", "x", "--once", "0"],
        ["nonsense"],
        ["publish", "x", "--nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(call: Call, arguments: list[str]) -> None:
    code, said = call(*arguments)
    assert code == 2 and "Traceback" not in said


@pytest.mark.parametrize("command", ["demo", "publish", "pull", "status", "doctor", "keys new", "keys add"])
def test_help_teaches_with_an_example(call: Call, command: str) -> None:
    code, said = call(*command.split(), "--help")
    assert code == 0 and said.count(f"weightsync {command}") >= 2, "the usage line, and at least one example"


def test_the_version_is_that_of_the_package(call: Call) -> None:
    import weightsync as package

    assert call("--version") == (0, f"weightsync {package.__version__}\n")
