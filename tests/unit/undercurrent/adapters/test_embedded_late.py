"""An embedded adapter whose engine runs ahead of it: no probe sees a row past the last token, and none is missing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.unit.undercurrent.adapters.embedded_doubles import LAYERS, PROMPT, WIDTH, a_point
from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.testing.fake_engine import FakeEngine
from undercurrent.testing.waiting import wait_until


class LateFake(FakeEngine):
    """Computes past the end of a request, and says what it has generated only while `gate` is open."""

    def __init__(self, gate, **options):
        super().__init__(overrun=4, **options)
        self.gate = gate

    async def submit(self, request):
        async for delta in super().submit(request):
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
            yield delta


class LateAdapter(EmbeddedAdapter):
    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _make_engine(self, model, ring, kwargs):
        self.fake = LateFake(self.gate, open_points=True, ring=ring, layers=LAYERS, width=WIDTH, step_s=0.001)
        return self.fake


@pytest.fixture(scope="module")
def late():
    with LateAdapter() as made:
        made.load_model("fake")
        yield made


def positions_of(router, request_id):
    return [position for position, *_ in router.ended[request_id]["p"].verdict]


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_no_probe_sees_a_row_past_the_last_token(late, router, tokens):
    for number in range(3):
        name = f"past-{tokens}-{number}"
        late.register_extraction(name, [a_point(position="*")])
        late.generate(name, PROMPT, {"max_tokens": tokens}, router)
        seen, length = positions_of(router, name), len(PROMPT) + tokens
        # The last token has a row of its own where the engine went on for long enough.
        assert seen in (list(range(length - 1)), list(range(length)))


def test_a_probe_that_stops_a_request_sees_nothing_past_what_was_generated(late, router):
    name = "past-stopped"
    late.register_extraction(name, [a_point(position="*", probe_args={"stop_at": len(PROMPT) + 4})])
    text = late.generate(name, PROMPT, {"max_tokens": 200}, router)
    assert positions_of(router, name)[-1] < len(PROMPT) + len(text) < len(PROMPT) + 100


def test_rows_wait_for_an_adapter_that_is_slower_than_its_engine(late, router):
    name = "waits"
    late.register_extraction(name, [a_point(position="*")])
    late.gate.clear()
    before = late.fake.steps
    runner = threading.Thread(target=late.generate, args=(name, PROMPT, {"max_tokens": 30}, router))
    runner.start()
    wait_until(lambda: late.fake.steps >= before + 34, 10, "the engine to have gone past the end")
    late.gate.set()
    runner.join(10)
    assert positions_of(router, name) == list(range(len(PROMPT) + 30))
