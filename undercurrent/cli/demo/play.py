"""The demo from curtain to curtain: each phase starts or asks something, and waits for a fact that shows it worked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from undercurrent.cli.demo.cast import asks, tellers
from undercurrent.cli.demo.processes import Processes, ProcessFailedError, describe, last_lines
from undercurrent.cli.demo.report import Replayed, Row, broken_promises, least_lead, report, row_of
from undercurrent.cli.demo.stage import Stage
from undercurrent.cli.demo.story import Story
from undercurrent.cli.demo.view import View, final_table, panel
from undercurrent.cli.demo.watch import Watch
from undercurrent.counts import counted
from undercurrent.errors import UnreachableError
from undercurrent.files import write_text
from undercurrent.testing import demo_model as vault

ENGINE_START_S = 300.0
READY_S = 60.0
COMMAND_S = 60.0
GENERATION_S = 180.0
STOP_S = 60.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Ending:
    """How the demo went.

    Args:
        report: the report as plain data.
        broken: promises that did not hold, in words.
    """

    report: dict[str, Any]
    broken: list[str]


class Play:
    """Runs the phases.

    Args:
        stage: configuration files, commands and addresses.
        processes: starts and watches them.
        view: what the viewer sees.
        prompts: the viewer's own prompts.
    """

    def __init__(self, stage: Stage, processes: Processes, view: View, prompts: Sequence[str]) -> None:
        self._stage = stage
        self._processes = processes
        self._view = view
        self._asks = asks(prompts)
        self._running: list[str] = []

    def run(self) -> Ending:
        """Run everything.

        Raises:
            ProcessFailedError: a process did not do its part.
            UnreachableError: a broker that was given does not answer.
        """
        self._broker()
        self._topics()
        self._ring()
        stories = self._requests()
        self._lower()
        replayed = self._replay()
        rows = self._rows(*stories)
        broker, versions, figures = self._stage.broker_facts(), self._stage.versions(), self._stage.figures()
        made = report(rows, figures, replayed, broker=broker, versions=versions)
        self._view.show(final_table([row.cells() for row in rows]), self._closing(rows))
        return Ending(made, broken_promises(rows, figures, replayed))

    def farewell(self) -> list[RenderableType]:
        """Return how to go on."""
        return self._stage.farewell()

    def _broker(self) -> None:
        broker = self._stage.broker
        self._view.phase(f"broker: {broker.title}", "topics")
        address = broker.address
        if address is None:
            self._start("broker", self._stage.broker_argv)
            address = self._address()
        self._stage = self._stage.at(address)
        if not self._stage.broker_answers():
            raise UnreachableError(f"no broker answers at {address}")
        self._view.done(f"at {address}")

    def _address(self) -> str:
        log = self._processes.log("broker")
        for _ in self._patience("broker", READY_S, "has not said its address"):
            if (address := self._stage.address_in(last_lines(log))) is not None:
                return address
            time.sleep(LOOK_S)
        raise AssertionError("patience ends by raising")

    def _topics(self) -> None:
        name, patience = self._stage.engine_words
        self._view.phase("topics", f"an engine worker with {name}, which takes {patience} to start")
        self._command("topics", self._stage.topics_argv)
        self._view.done(f"with the prefix {self._stage.prefix}")

    def _ring(self) -> None:
        """Start engine worker and probe host side by side; meanwhile show what will be judged by what."""
        stage = self._stage
        name, patience = stage.engine_words
        self._view.phase(
            f"engine worker and probe host: starting, {patience} for {name} alone", f"{len(self._asks)} prompts"
        )
        self._start("engine", stage.engine_argv)
        self._start("probes", stage.probes_argv)
        self._view.show(panel("what you will see", stage.introduction()))
        self._until("probes", stage.probes_ready, READY_S, "is not ready")
        self._until("engine", stage.engine_ready, ENGINE_START_S, "is not ready")
        self._view.done("both ready")

    def _requests(self) -> tuple[Story, Story]:
        """Send the prompts, watch them, then send them again with nobody listening."""
        live, alone = (Story(tellers(self._asks, alone=alone), self._stage.probe_name) for alone in (False, True))
        self._view.phase(f"producer: {len(self._asks)} prompts; the probe listens", "the same prompts without it")
        with Watch(self._stage.settings, self._stage.plan, [live]) as watch:
            self._start("producer", self._stage.send_argv(self._asks, alone=False))
            with self._view.requests(live, self._stage.threshold):
                self._follow(watch, live, lambda: live.finished and live.judged)
            self._command_ends("producer")
        aborted = sum(teller.score_at_abort is not None for teller in live)
        self._view.done(f"{aborted} stopped, {len(self._asks) - aborted} left alone")
        self._view.phase("the same prompts and seeds, capturing nothing: what would have come", "stopping the ring")
        with Watch(self._stage.settings, self._stage.plan, [alone]) as watch:
            self._start("producer-alone", self._stage.send_argv(self._asks, alone=True))
            self._follow(watch, alone, lambda: alone.finished)
            self._command_ends("producer-alone")
        recited = sum(vault.first_digit(teller.text) is not None for teller in alone)
        self._view.done(f"{recited} of {len(self._asks)} recite the code when nobody stops them")
        return live, alone

    def _lower(self) -> None:
        """Stop probe host and engine worker as a deployment would, unless they are to stay."""
        if self._stage.keep:
            return
        self._view.phase("stopping probe host and engine worker (SIGTERM)", "replay")
        for name in ("probes", "engine"):
            self._running.remove(name)
            if (code := self._processes.stop(name, STOP_S)) != 0:
                raise ProcessFailedError(name, f"ended on SIGTERM, {describe(code)}", self._processes.log(name))
        self._view.done("both flushed and ended with exit code 0")

    def _replay(self) -> Replayed:
        self._view.phase("replay of the recorded activations through the same probe", "the result")
        code = self._command("replay", self._stage.replay_argv, accept=(0, 1))
        replayed = self._stage.read_replay(code)
        equal = "all equal to the live ones" if replayed.equal else "NOT equal"
        self._view.done(
            f"{counted(replayed.verdicts, 'verdict')} and {counted(replayed.scores, 'score')} compared, {equal}"
        )
        return replayed

    def _rows(self, live: Story, alone: Story) -> list[Row]:
        rows = []
        for ask in self._asks:
            reference = alone[ask.reference_id]
            rows.append(row_of(live[ask.id], ask.label, reference, vault.first_digit(reference.text)))
        return rows

    def _closing(self, rows: Sequence[Row]) -> str:
        lead = least_lead(rows)
        least = f"The least lead was {counted(lead, 'token')}. " if lead is not None else ""
        return (
            f"{least}Where the first digit would have stood is known from the second run: same prompt, same seed, same "
            "engine, no capture. It counts only where the text up to the stop is the same."
        )

    def _start(self, name: str, argv: Sequence[str]) -> None:
        self._processes.start(name, argv)
        if not name.startswith("producer"):
            self._running.append(name)

    def _command(self, name: str, argv: Sequence[str], accept: Sequence[int] = (0,)) -> int:
        self._processes.start(name, argv)
        return self._command_ends(name, accept)

    def _command_ends(self, name: str, accept: Sequence[int] = (0,)) -> int:
        self._until(name, lambda: self._processes.code(name) is not None, COMMAND_S, "still runs")
        if (code := self._processes.wait(name, 0.0)) not in accept:
            raise ProcessFailedError(name, f"ended, {describe(code)}", self._processes.log(name))
        return code

    def _until(self, name: str, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        for _ in self._patience(name, timeout_s, otherwise):
            if condition():
                return
            time.sleep(LOOK_S)

    def _follow(self, watch: Watch, story: Story, over: Callable[[], bool]) -> None:
        for _ in self._patience("engine", GENERATION_S, "did not finish the requests"):
            self._view.tick(watch.look(LOOK_S))
            if over():
                return

    def _patience(self, name: str, timeout_s: float, otherwise: str) -> Iterator[None]:
        """Yield until the time is over, and make sure in between that what should run runs.

        Raises:
            ProcessFailedError: a process ended, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._processes.check(*self._running)
            self._view.tick()
            yield
        raise ProcessFailedError(name, f"{otherwise} after {timeout_s:g} s", self._processes.log(name))


def write_report(path: Path, ending: Ending) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**ending.report, "broken_promises": ending.broken}, indent=2) + "\n")
