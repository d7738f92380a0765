"""`weightsync keys`: private files, never overwritten, one clear line when refused."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run

PAIR = ["publisher.key", "publisher.key_secret", "subscriber.key", "subscriber.key_secret"]


def test_new_makes_two_pairs_with_private_secrets(weightsync: Run, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    said = weightsync("keys", "new", folder).join()
    assert sorted(path.name for path in folder.iterdir()) == PAIR
    assert all(str(folder / name) in said for name in PAIR)
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == (0 if path.suffix == ".key_secret" else 0o044), path


def test_keys_are_never_overwritten(weightsync: Run, tmp_path: Path) -> None:
    weightsync("keys", "new", tmp_path).join()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = weightsync("keys", "new", tmp_path).join(1)
    assert said.startswith("error: ") and said.count("\n") == 1
    weightsync("keys", "add", tmp_path, "subscriber").join(1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_add_makes_one_more_subscriber(weightsync: Run, tmp_path: Path) -> None:
    weightsync("keys", "new", tmp_path).join()
    weightsync("keys", "add", tmp_path, "rollout-17").join()
    assert (tmp_path / "rollout-17.key").exists() and (tmp_path / "rollout-17.key_secret").exists()


def test_add_refuses_a_folder_without_keys_and_names_with_paths(weightsync: Run, tmp_path: Path) -> None:
    assert "keys new" in weightsync("keys", "add", tmp_path, "rollout").join(1)
    weightsync("keys", "new", tmp_path / "keys").join()
    weightsync("keys", "add", tmp_path / "keys", "../rollout").join(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys"]


def test_a_folder_that_cannot_be_written_is_one_line(weightsync: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = weightsync("keys", "new", tmp_path / "file" / "keys").join(1)
    assert said.startswith("error: can't write keys") and said.count("\n") == 1
