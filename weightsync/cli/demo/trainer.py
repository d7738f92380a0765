"""The trainer process: AdamW on real text, and a publish every few optimizer steps."""

from __future__ import annotations

import time

import torch

import weightsync as ws
from weightsync.cli.demo.events import Begin, Loss, Published, Stop, Synced, Trained, TrainerDone, TrainerUp
from weightsync.cli.demo.gpt import Gpt
from weightsync.cli.demo.line import Line
from weightsync.cli.demo.schedule import Schedule
from weightsync.cli.demo.settings import Settings, count_cores, threads_per_process
from weightsync.cli.demo.text import draw_windows, load_text
from weightsync.errors import SyncTimeoutError

WARMUP_STEPS = 20  # of the learning rate
REPORT_EVERY_S = 0.25
FORGET_AFTER_S = 10.0  # a version that isn't live by then was overtaken or has failed
LAST_VERSION_S = 15.0  # time for the fleet to adopt the last version
START_S = 120.0


def run_trainer(settings: Settings, line: Line) -> None:
    torch.set_num_threads(threads_per_process(count_cores(), settings.replicas))
    learner = Learner(settings)
    with ws.Publisher("tcp://127.0.0.1:0", when_full="skip", name="trainer") as publisher:
        publisher.register(learner.model)
        state = learner.model.state_dict()
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}
        parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        line.send(TrainerUp(publisher.address, parameters, len(state), sum(sizes.values())))
        journal = Journal(publisher, line)
        if not await_members(publisher, settings.replicas, line):
            return
        journal.publish(learner.steps)  # version 1: the untrained weights
        journal.report_if_due(is_due=True)
        begin = rehearse(learner, line)
        if begin is None:
            return
        train(learner, journal, begin.schedule, settings, line)
        if line.is_stopped():
            return
        journal.publish(learner.steps)
        journal.settle(LAST_VERSION_S)
        line.send(TrainerDone())
        line.wait(Stop, START_S)


def await_members(publisher: ws.Publisher, count: int, line: Line) -> bool:
    """True when all servers have joined; False when told to stop, or when they are still missing at the deadline."""
    deadline_s = time.monotonic() + START_S
    while not line.is_stopped():
        try:
            publisher.wait_for_members(count, timeout_s=0.5)
            return True
        except SyncTimeoutError:
            if time.monotonic() > deadline_s:
                raise
    return False


def rehearse(learner: Learner, line: Line) -> Begin | None:
    """Work as in training but learn nothing, so that the servers measure their speed beside a busy trainer."""
    deadline_s = time.monotonic() + START_S
    load_optimizer_code()
    while not line.is_stopped() and time.monotonic() < deadline_s:
        learner.differentiate()
        begin = line.wait(Begin, 0.0)
        if begin is not None:
            return begin
    return None


def load_optimizer_code() -> None:
    """The first step of any optimizer imports a large part of torch; better before the run than in it."""
    scratch = torch.nn.Parameter(torch.zeros(1))
    scratch.grad = torch.zeros(1)
    torch.optim.AdamW([scratch]).step()


def train(learner: Learner, journal: Journal, schedule: Schedule, settings: Settings, line: Line) -> None:
    while not line.is_stopped() and time.monotonic() < schedule.end_s:
        loss = learner.step()
        now_s = time.monotonic()
        journal.losses.append(Loss(now_s, learner.steps, loss))
        if learner.steps % settings.steps_per_version == 0 and schedule.is_syncing(now_s):
            journal.publish(learner.steps)
        journal.report_if_due()


class Learner:
    """A model, its optimizer and its data."""

    def __init__(self, settings: Settings) -> None:
        self.model = Gpt(settings.size, settings.seed)
        self.steps = 0
        self._size = settings.size
        self._data = load_text().train
        self._draws = torch.Generator().manual_seed(settings.seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=self._size.learning_rate)

    def differentiate(self) -> float:
        """Gradients of the loss on fresh text; returns that loss."""
        tokens = draw_windows(self._data, self._size.batch, self._size.context + 1, self._draws)
        self._optimizer.zero_grad()
        loss = self.model.loss(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    def step(self) -> float:
        """One optimizer step: changes the weights in place, as every real trainer does."""
        loss = self.differentiate()
        self.steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._size.learning_rate * min(1.0, self.steps / WARMUP_STEPS)
        self._optimizer.step()
        return loss


class Journal:
    """Publishes versions, follows each until it is live everywhere, and reports what happened."""

    def __init__(self, publisher: ws.Publisher, line: Line) -> None:
        self.losses: list[Loss] = []
        self._publisher = publisher
        self._line = line
        self._open: list[tuple[float, ws.Ticket]] = []
        self._published: list[Published] = []
        self._synced: list[Synced] = []
        self._skipped = 0
        self._reported_s = 0.0

    def publish(self, step: int) -> None:
        began_s = time.monotonic()
        ticket = self._publisher.publish()
        call_s = time.monotonic() - began_s
        if ticket.skipped:
            self._skipped += 1
            return
        self._open.append((began_s, ticket))
        self._published.append(Published(began_s, ticket.version, step, call_s))

    def report_if_due(self, is_due: bool = False) -> None:
        now_s = time.monotonic()
        if not is_due and now_s - self._reported_s < REPORT_EVERY_S:
            return
        self._reported_s = now_s
        self._collect(now_s)
        self._line.send(
            Trained(tuple(self.losses), tuple(self._published), tuple(self._synced), self._skipped)
        )
        self.losses, self._published, self._synced = [], [], []

    def settle(self, timeout_s: float) -> None:
        """Wait until the newest version is live on all servers, then report everything still open."""
        deadline_s = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline_s and not self._line.is_stopped():
            self.report_if_due()
            if self._open and self._open[-1][1].report.live_s is None:
                self._line.wait(Stop, 0.02)
            else:
                break
        self._collect(float("inf"))
        self.report_if_due(is_due=True)

    def _collect(self, now_s: float) -> None:
        """Close the tickets that are live, or so old that they never will be."""
        still_open = []
        for published_s, ticket in self._open:
            report = ticket.report
            if report.live_s is None and now_s - published_s < FORGET_AFTER_S:
                still_open.append((published_s, ticket))
                continue
            reads_s = tuple(member.read_s for member in report.members.values() if member.read_s is not None)
            self._synced.append(
                Synced(
                    report.version, report.size_bytes, report.stage_s, report.ready_s, report.live_s, reads_s
                )
            )
        self._open = still_open
