"""A steady, open-loop stream of requests: they arrive by the clock, whether or not the server keeps up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsync.cli.demo.text import draw_windows


@dataclass(slots=True)
class Request:
    """Asks for `tokens_left` more bytes after `window`, the newest `context` bytes of prompt and reply."""

    arrived_s: float
    window: Tensor
    tokens_left: int
    reply: bytearray = field(default_factory=bytearray)

    def append(self, token: int) -> None:
        self.window = torch.cat((self.window[1:], torch.tensor([token])))
        self.reply.append(token)
        self.tokens_left -= 1

    def sample(self) -> tuple[str, str]:
        """The end of the prompt, and the reply, for people to read."""
        prompt = bytes(self.window[: -len(self.reply)].tolist())
        return prompt.decode("ascii", errors="replace"), self.reply.decode("ascii", errors="replace")


class Load:
    """Requests due between `begin_s` and `end_s`, one every `1 / rate` seconds.

    A request counts as arrived when it was due, not when the server looked: a stall can't hide by delaying arrivals.
    """

    def __init__(self, begin_s: float, end_s: float, rate: float, prompts: Tensor, tokens: int) -> None:
        self._begin_s = begin_s
        self._end_s = end_s
        self._interval_s = 1.0 / rate
        self._prompts = prompts
        self._tokens = tokens
        self._arrived = 0

    @property
    def next_s(self) -> float | None:
        """When the next request arrives; None after the last."""
        due_s = self._begin_s + self._arrived * self._interval_s
        return due_s if due_s < self._end_s else None

    def arrivals(self, now_s: float) -> Iterator[Request]:
        """Every request that has arrived by now and was not handed out before."""
        while (due_s := self.next_s) is not None and due_s <= now_s:
            prompt = self._prompts[self._arrived % len(self._prompts)]
            self._arrived += 1
            yield Request(due_s, prompt, self._tokens)


def draw_prompts(heldout: Tensor, context: int, seed: int, count: int = 256) -> Tensor:
    """`(count, context)` prompts from text that is never trained on."""
    return draw_windows(heldout, count, context, torch.Generator().manual_seed(seed))
