"""Models by their tensor shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync import Box, Shard


def llama_like(layers: int = 16) -> dict[str, tuple[int, ...]]:
    """A Llama with hidden 1536, ffn 4096, 4 KV heads of 128, vocabulary 43648: 147 tensors and 1.0 GiB in bf16 at 16 layers."""
    hidden, ffn, kv, vocabulary = 1536, 4096, 512, 43648
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def many_small(count: int = 10_000, size_bytes: int = 4096) -> dict[str, tuple[int, ...]]:
    """`count` bf16 tensors of `size_bytes` each."""
    return {f"t{number}": (size_bytes // 2,) for number in range(count)}


def one_large(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """One bf16 tensor."""
    return {"t": (size_bytes // 2,)}


def make_state(shapes: dict[str, tuple[int, ...]], *, seed: int | None = None) -> dict[str, torch.Tensor]:
    """bf16 tensors of these shapes, as separate allocations; random with a seed, else zero."""
    if seed is None:
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15 - 1, shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, shape in shapes.items()
    }


def change(state: dict[str, torch.Tensor]) -> None:
    """Change every element, as an optimizer step would."""
    for tensor in state.values():
        tensor.view(torch.int16).add_(1)


def size_of(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


@dataclass(frozen=True)
class Cut:
    """Rank `rank` of `ranks` holds its part of every tensor along `axis`; of one with fewer dimensions along the last."""

    rank: int
    ranks: int
    axis: int

    def box(self, shape: tuple[int, ...]) -> Box:
        axis = min(self.axis, len(shape) - 1)
        begin, end = (shape[axis] * (self.rank + more) // self.ranks for more in (0, 1))
        start = tuple(begin if d == axis else 0 for d in range(len(shape)))
        stop = tuple(end if d == axis else n for d, n in enumerate(shape))
        return Box(start, stop)

    def shards(self, whole: dict[str, torch.Tensor]) -> list[Shard]:
        """The rank's parts as memory of their own."""
        found = []
        for name, tensor in whole.items():
            box = self.box(tuple(tensor.shape))
            part = tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].clone()
            found.append(Shard(name, box, part, tuple(tensor.shape)))
        return found
