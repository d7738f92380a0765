"""A server process: generates continuously under load, and switches versions between two forward passes."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from types import TracebackType

import torch
from torch import Tensor

import weightsync as ws
from weightsync.cli.demo.events import Answered, Begin, Connect, HeldOut, ServerDone, ServerUp
from weightsync.cli.demo.gpt import Gpt
from weightsync.cli.demo.line import Line
from weightsync.cli.demo.load import Load, Request, draw_prompts
from weightsync.cli.demo.record import Record
from weightsync.cli.demo.settings import Settings, count_cores, threads_per_process
from weightsync.cli.demo.text import load_text, spaced_windows

MAX_BATCH = 8  # requests generated together; later ones wait
HELD_OUT_ROWS = 8
HELD_OUT_EVERY_S = 0.5  # the same cadence whether or not versions arrive, so that it burdens both alike
REPORT_EVERY_S = 0.25
REHEARSAL_S = 1.0
IDLE_S = 0.02
START_S = 120.0
DRAIN_S = 10.0
TEMPERATURE = 0.7


def run_server(settings: Settings, index: int, line: Line) -> None:
    torch.set_num_threads(threads_per_process(count_cores(), settings.replicas))
    model = Gpt(settings.size, seed=settings.seed + 1 + index).eval()  # weights of its own, until version 1
    connect = line.wait(Connect, START_S)
    if connect is None:
        return
    with Server(settings, index, model, connect.address, line) as server, torch.inference_mode():
        line.send(ServerUp(settings.server_names[index], server.rehearse()))
        begin = line.wait(Begin, START_S)
        if begin is not None:
            server.serve(begin)
            line.send(ServerDone(settings.server_names[index]))


class Server:
    """One loop of forward passes over the requests in hand, each pass pinned to one version.

    Entering it joins the publisher and waits for the first version; leaving it leaves the publisher.
    """

    def __init__(self, settings: Settings, index: int, model: Gpt, address: str, line: Line) -> None:
        self.record = Record(settings.server_names[index])
        self._settings = settings
        self._index = index
        self._model = model
        self._line = line
        self._wake = threading.Event()
        heldout = load_text().heldout
        self._prompts = draw_prompts(heldout, settings.size.context, seed=settings.seed + index)
        self._heldout = spaced_windows(heldout, HELD_OUT_ROWS, settings.size.context + 1)
        self._heldout_due_s = 0.0
        self._chance = torch.Generator().manual_seed(settings.seed + index)
        self._active: list[Request] = []
        self._queue: list[Request] = []
        self._subscriber = ws.Subscriber(
            address,
            model,
            swap=settings.swap,
            transport=settings.transport,
            name=self.record.name,
            on_ready=lambda version: self._wake.set(),
            on_live=self.record.note_live,
            on_failed=self.record.note_failed,
        )

    def __enter__(self) -> Server:
        self._subscriber.start(timeout_s=START_S)
        self._subscriber.wait_for(1, timeout_s=START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscriber.close()

    def rehearse(self) -> float:
        """Seconds of a typical forward pass over one request, measured beside the other processes."""
        self.forward(self._prompts[:1])
        times_s = [time.monotonic()]
        while len(times_s) < 4 or times_s[-1] - times_s[0] < REHEARSAL_S:
            self.forward(self._prompts[:1])
            times_s.append(time.monotonic())
        return statistics.median(after - before for before, after in itertools.pairwise(times_s))

    def serve(self, begin: Begin) -> None:
        """Answer requests until told to stop; then finish those in hand and adopt what is still pending."""
        schedule, size = begin.schedule, self._settings.size
        first_s = schedule.begin_s + self._index / self._settings.replicas / begin.rate  # servers take turns
        load = Load(first_s, schedule.end_s, begin.rate, self._prompts, size.reply_tokens)
        while not self._line.is_stopped():
            self._turn(load)
        deadline_s = time.monotonic() + DRAIN_S
        while (self._active or self._queue) and time.monotonic() < deadline_s:
            self._generate()
        self._evaluate()
        self._report()

    def _turn(self, load: Load) -> None:
        now_s = time.monotonic()
        self._queue.extend(load.arrivals(now_s))
        if now_s >= self._heldout_due_s:
            self._evaluate()
        elif self._active or self._queue:
            self._generate()
        else:
            self._idle(load.next_s, now_s)
        if now_s >= self.record.reported_s + REPORT_EVERY_S:
            self._report()

    def _generate(self) -> None:
        """One token for every request in hand: one forward pass, one version."""
        while self._queue and len(self._active) < MAX_BATCH:
            self._active.append(self._queue.pop(0))
        logits = self.forward(torch.stack([request.window for request in self._active]))
        odds = torch.softmax(logits / TEMPERATURE, dim=-1)
        tokens = torch.multinomial(odds, 1, generator=self._chance).flatten().tolist()
        for request, token in zip(self._active, tokens, strict=True):
            request.append(token)
        self.record.tokens += len(tokens)
        now_s = time.monotonic()
        for request in self._active:
            if request.tokens_left == 0:
                self.record.answered.append(Answered(request.arrived_s, now_s - request.arrived_s))
                self.record.sample = request.sample()
        self._active = [request for request in self._active if request.tokens_left > 0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes: the one forward pass of all this, on whichever version is live as it begins."""
        with self._subscriber.step() as version:
            logits: Tensor = self._model(tokens)
            self._account(version)
        return logits

    def _evaluate(self) -> None:
        """Held-out loss of the live version: a forward pass like any other."""
        began_s = time.monotonic()
        with self._subscriber.step() as version:
            loss = self._model.loss(self._heldout).item()
            self._account(version)
        now_s = time.monotonic()
        self.record.heldout.append(HeldOut(now_s, version, loss))
        self._heldout_due_s = now_s + max(HELD_OUT_EVERY_S, 10 * (now_s - began_s))

    def _account(self, version: int) -> None:
        """Count this pass and, every few passes, prove it while its version is still pinned.

        The weights are re-digested after the last layer used them, and compared with the manifest of the version
        that the pass was told it runs on. Had they changed at any moment of the pass, they would no longer match, or
        the label would have moved.
        """
        is_checked = self.record.passes % self._settings.check_every == 0
        differing = self._subscriber.check() if is_checked else []
        label = self._subscriber.version
        is_busy = bool(self._active or self._queue)
        self.record.note_pass(version, label, differing, is_checked=is_checked, is_busy=is_busy)

    def _idle(self, next_s: float | None, now_s: float) -> None:
        """Wait for the next request, or for a version to adopt: an idle server switches at once too."""
        wait_s = IDLE_S if next_s is None else min(IDLE_S, next_s - now_s)
        if wait_s > 0 and self._wake.wait(wait_s):
            self._wake.clear()
        with self._subscriber.step():
            pass  # adopts a pending version; nothing is computed, so nothing is counted

    def _report(self) -> None:
        waiting = len(self._active) + len(self._queue)
        self._line.send(self.record.report(self._subscriber, waiting))
