"""FSDP2 trains, tensor parallel servers follow: torchrun --nproc-per-node 2 examples/fsdp2_to_tp.py"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from weightsync.integrations.torch_sharding import torch_shards

STEPS, TP, WIDTH, INNER, PROMPT = 5, 2, 32, 128, torch.linspace(-1, 1, 256).reshape(8, 32)


def serve(address, rank, meeting_point, results):
    """One rank of a server, with half of the hidden layer: rows of the first matrix, columns of the second."""
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=TP)
    up, down = torch.zeros(INNER // TP, WIDTH), torch.zeros(WIDTH, INNER // TP)
    a, b = rank * INNER // TP, (rank + 1) * INNER // TP
    first = ws.Shard("0.weight", ws.Box((a, 0), (b, WIDTH)), up, (INNER, WIDTH))  # which box of which tensor
    second = ws.Shard("2.weight", ws.Box((0, a), (WIDTH, b)), down, (WIDTH, INNER))  # lands in which memory
    answers = {}
    with ws.Subscriber(address, [first, second], group=dist.group.WORLD) as sub:
        while STEPS not in answers:
            with sub.step() as version:  # one version in all ranks of the group, until the step ends
                dist.all_reduce(answer := torch.relu(PROMPT @ up.T) @ down.T)
                answers[version] = answer.tolist(), sub.check()  # digests the weights again: nothing is wrong
    results.put((rank, answers))


def train():
    dist.init_process_group("gloo")
    model = [torch.nn.Linear(WIDTH, INNER, False), torch.nn.ReLU(), torch.nn.Linear(INNER, WIDTH, False)]
    model = fully_shard(torch.nn.Sequential(*model))  # each rank holds half of the rows of each matrix
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ws.Publisher.from_process_group("tcp://127.0.0.1:0") as publisher:  # one in every rank
        publisher.register(torch_shards(model))  # views of what this rank holds; once
        spawned, place = torch.multiprocessing.get_context("spawn"), f"file://{tempfile.mkdtemp()}/meet"
        results, expected, servers = spawned.Queue(), {}, range(TP) if dist.get_rank() == 0 else ()
        for rank in servers:
            spawned.Process(target=serve, args=(publisher.address, rank, place, results), daemon=True).start()
        publisher.wait_for_members(TP)
        for step in range(1, STEPS + 1):
            (model(PROMPT) - PROMPT.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step], ticket = model(PROMPT), publisher.publish()  # copied: training may go on
            ticket.wait("live")  # only for the example: let the servers answer with every version
        for rank, answers in (results.get(timeout=20) for _ in servers):
            for version, (answer, wrong) in answers.items():
                assert not wrong and torch.allclose(torch.tensor(answer), expected[version], atol=1e-5)
            print(f"server rank {rank} answered as the trainer does in versions {sorted(answers)}")
        dist.barrier()  # rank 0 holds the address, so it leaves last
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
