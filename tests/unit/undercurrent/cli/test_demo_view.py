"""What a viewer sees, with and without a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from undercurrent.cli.demo.story import Story, Teller
from undercurrent.cli.demo.view import LiveView, PlainView, final_table, requests_table
from undercurrent.protocol.messages import Outcome


@pytest.fixture
def story() -> Story:
    stopped = Teller("ask-1", "vault", "Who asks?", text="First, the " * 9, tokens=99, scores={70: -1.0, 71: 4.25})
    stopped.outcome, stopped.score_at_abort = Outcome.ABORTED, 4.25
    stopped.applied_at_us, stopped.captured_at_us = 50_000, 10_000
    running = Teller("ask-2", "other", "Who else?", text="First, [red]", tokens=12, scores={60: -2.5})
    return Story([stopped, running, Teller("ask-3", "other", "And who?")], probe="vault-guard")


def plain(width: int = 140) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=width, color_system=None), out


def test_plain_lines_tell_phase_abort_and_final_once(story: Story) -> None:
    console, out = plain()
    view = PlainView(console)
    view.phase("broker: embedded", "topics")
    view.done("at 127.0.0.1:9092")
    with view.requests(story, 2.0):
        view.tick([story["ask-1"]])
        view.tick([story["ask-1"]])
    text = out.getvalue()
    assert "broker: embedded (next: topics)" in text
    assert text.count("abort applied after 40 ms") == 1
    assert text.count("aborted after 99 tokens at score +4.25") == 1
    assert "ask-2 12 tokens, score -2.50" in text


def test_the_table_shows_tokens_score_and_state_of_each_request(story: Story) -> None:
    console, out = plain()
    console.print(requests_table(story, 2.0))
    rows = {line.split()[1]: line for line in out.getvalue().splitlines() if "ask-" in line}
    assert "+4.25" in rows["ask-1"]
    assert "aborted" in rows["ask-1"]
    assert "-2.50" in rows["ask-2"]
    assert "runs" in rows["ask-2"]
    assert "[red]" in rows["ask-2"]  # what a model writes is no markup
    assert "waits" in rows["ask-3"]


def test_the_live_picture_leaves_a_line_per_phase_and_the_last_table(story: Story) -> None:
    out = StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=140, color_system=None))
    view.phase("engine worker: starting, 40-100 s", "8 prompts")
    with view.requests(story, 2.0):
        view.tick()
    view.done("ready")
    view.close()
    text = out.getvalue()
    assert "next: 8 prompts" in text
    assert "✓ engine worker: starting, 40-100 s  ready" in text
    assert "ask-1" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_the_final_table_has_a_column_for_everything_promised() -> None:
    console, out = plain()
    console.print(final_table([["ask-1", "vault", "aborted", "12", "150", "138", "+4.25", "40 ms"]]))
    for cell in ("request", "outcome", "tokens", "lead in tokens", "score at abort", "captured -> applied", "138"):
        assert cell in out.getvalue()
