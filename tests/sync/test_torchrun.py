"""Real trainers under torchrun, sharded by torch itself, feed real servers of other shardings; checkpoints are the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import weightsync as ws
from tests import sharded
from tests.conftest import Child
from tests.processes import Peer
from tests.sync import trainer

STEPS = 3
Peers = Callable[[], Peer]
Spawn = Callable[..., Child]


@contextmanager
def torchrun(spawn: Spawn, address: str, folder: Path, kind: str, mesh: str, members: int) -> Iterator[Child]:
    """The trainer; asked to end its ranks if the test fails, which a killed torchrun would leave behind."""
    child = spawn(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", math.prod(map(int, mesh.split("x"))),
        "-m", "tests.sync.trainer", address, folder, kind, mesh, members, STEPS,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    try:
        yield child
        child.join(timeout_s=30.0)
    finally:
        if child.process.poll() is None:
            child.process.terminate()
            child.process.wait(30.0)
            print(child.output)


# ---- servers


def generate(state: SimpleNamespace, address: str, folder: str, kind: str) -> list[int]:
    """A server of one rank that generates in every version it sees, until the last; keeps what it said of each."""
    torch.set_num_threads(1)
    model = trainer.make(kind).eval()
    seen: list[int] = []
    with ws.Subscriber(address, model, name="generates", timeout_s=60.0) as sub:
        while not seen or seen[-1] < STEPS:
            with sub.step() as version, torch.no_grad():
                said = speak(model)
                if version not in seen:
                    torch.save(said, Path(folder) / f"said.v{version}.pt")
                    seen.append(int(version))
    return seen


@torch.no_grad()
def speak(model: Any) -> dict[str, torch.Tensor]:
    """Logits of a prompt, and the eight tokens that follow it one after the other."""
    tokens = torch.tensor([[1, 5, 9, 2], [3, 3, 8, 7]])
    logits = model(input_ids=tokens, use_cache=False).logits
    for _ in range(8):
        best = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    return {"logits": logits, "tokens": tokens}


def reshard(state: SimpleNamespace, folder: str, rank: int, ranks: int) -> tuple[int, int]:
    """Load the checkpoint as torch itself reshards it: matrices in this rank's cut, the others whole. They must be the
    slices that weightsync brought. Returns how many of each."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        slices = torch.load(f"{folder}/tp{ranks}.{rank}.v{STEPS}.pt")
        wanted: dict[str, torch.Tensor] = {}
        for name, tensor in torch.load(f"{folder}/v{STEPS}.pt").items():
            (box, *others) = [(start, stop) for found, start, stop, _ in slices if found == name]
            cut = [d for d, size in enumerate(tensor.shape) if box[1][d] - box[0][d] < size]
            if len(cut) == 1 and not others:
                wanted[name] = zeros(*tensor.shape, device_mesh=mesh, placements=[Shard(cut[0])])
            else:
                wanted[name] = torch.zeros_like(tensor)
        dcp.load(wanted, checkpoint_id=f"{folder}/dcp")
        for name, start, stop, held in slices:
            loaded = wanted[name]
            if isinstance(loaded, DTensor):
                assert torch.equal(loaded.to_local(), held), f"{name} of {rank}/{ranks}"
            else:
                assert torch.equal(loaded[tuple(map(slice, start, stop))], held), f"{name} of {rank}/{ranks}"
        matrices = sum(isinstance(tensor, DTensor) for tensor in wanted.values())
        return matrices, len(wanted) - matrices
    finally:
        dist.destroy_process_group()


# ---- the tests


@pytest.mark.parametrize(("kind", "mesh"), [("llama", "2"), ("mixtral", "2"), ("llama", "2x2")])
def test_servers_follow_a_trainer_of_torchrun(
    spawn: Spawn, peer: Peers, tmp_path: Path, kind: str, mesh: str
) -> None:
    address = f"ipc://{tmp_path}/sync"
    groups: dict[int, dict[str, str]] = {1: {}, 2: {"transport": "zmq"}, 4: {"swap": "copy"}}
    with torchrun(spawn, address, tmp_path, kind, mesh, 1 + sum(groups)):
        servers = [peer()]
        servers[0].tell(generate, address, str(tmp_path), kind)
        for ranks, options in groups.items():
            for rank in range(ranks):
                servers.append(peer())
                servers[-1].tell(sharded.serve_slices, address, rank, ranks, STEPS, str(tmp_path), **options)
        for server in servers:
            assert server.reply(40.0) == list(range(1, STEPS + 1))

    states = {version: torch.load(tmp_path / f"v{version}.pt") for version in range(1, STEPS + 1)}
    assert not torch.equal(states[1]["lm_head.weight"], states[2]["lm_head.weight"])
    for version, whole in states.items():
        for ranks in groups:
            counts = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
            for rank in range(ranks):
                for name, start_, stop, held in torch.load(tmp_path / f"tp{ranks}.{rank}.v{version}.pt"):
                    place = tuple(map(slice, start_, stop))
                    assert torch.equal(held, whole[name][place]), (
                        f"version {version}: {name} of {rank}/{ranks}"
                    )
                    counts[name][place] += 1
            assert all((count > 0).all() for count in counts.values()), "the group holds the whole model"

    torch.set_num_threads(1)
    judge = trainer.make(kind).eval()
    for version, whole in states.items():
        judge.load_state_dict(whole)
        said, expected = torch.load(tmp_path / f"said.v{version}.pt"), speak(judge)
        assert torch.equal(said["tokens"], expected["tokens"])
        torch.testing.assert_close(said["logits"], expected["logits"], rtol=1e-6, atol=1e-6)

    pair = [peer(), peer()]
    for rank, process in enumerate(pair):
        process.tell(reshard, str(tmp_path), rank, 2)
    for process in pair:
        matrices, others = process.reply()
        assert matrices > 8 and matrices + others == len(states[STEPS])
