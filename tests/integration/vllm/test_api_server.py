"""What an API server's request processing tells us of its requests: vLLM's own output processor, no engine behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from undercurrent.adapters.vllm.settings import CONFIG_KEY, SLOT_KEY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


class Listener:
    """Notes what it hears; gives slots, and an order where it has one."""

    def __init__(self):
        self.heard, self.order, self.slot = [], None, 70

    def adding(self, engine_id, external_id, index, raw):
        self.heard.append(("adding", engine_id, external_id, raw))
        self.slot += self.slot >= 0
        return self.order, self.slot

    def counted(self, engine_id, length):
        self.heard.append(("counted", engine_id, length))

    def ended(self, engine_id):
        self.heard.append(("ended", engine_id))

    def sent(self, engine_id):
        self.heard.append(("sent", engine_id))


class Core:
    """Keeps what would go to the engine."""

    def __init__(self):
        self.requests = []

    async def add_request_async(self, request):
        self.requests.append(request)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def llm(listener):
    from vllm.v1.engine.output_processor import OutputProcessor

    from undercurrent.adapters.vllm.compat import server as compat

    made = SimpleNamespace(output_processor=OutputProcessor(None, log_stats=False), engine_core=Core())
    compat.follow_requests(made, listener)
    return made


def request_of(name, extra=None, **more):
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9]) | {"request_id": name, "arrival_time": 0.0}
    params = SamplingParams(max_tokens=9, extra_args=extra)
    fields |= {"prompt_token_ids": [1, 2, 3], "sampling_params": params, "external_req_id": name[:-9], **more}
    return EngineCoreRequest(**fields)


def add(llm, request):
    from vllm.v1.engine.output_processor import RequestOutputCollector

    queue = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
    llm.output_processor.add_request(request, None, None, 0, queue)
    asyncio.run(llm.engine_core.add_request_async(request))
    return request


def output(name, tokens, finish=None):
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(name, tokens, finish_reason=None if finish is None else FinishReason[finish])


def test_a_request_is_counted_after_each_output_and_ends_once(llm, listener):
    add(llm, request_of("a-00000000"))
    llm.output_processor.process_outputs([output("a-00000000", [5]), output("b-00000000", [6])])
    llm.output_processor.process_outputs([output("a-00000000", [7, 8], "LENGTH")])
    llm.output_processor.process_outputs([output("a-00000000", [9])])
    assert listener.heard == [
        ("adding", "a-00000000", "a", None), ("sent", "a-00000000"),
        ("counted", "a-00000000", 4), ("counted", "a-00000000", 6), ("ended", "a-00000000"),
    ]  # fmt: skip


def test_an_abort_ends_what_it_meets_by_either_id_and_nothing_else(llm, listener):
    for name in ("a-00000000", "b-00000000"):
        add(llm, request_of(name))
    listener.heard.clear()
    assert llm.output_processor.abort_requests(["nobody", "a"], internal=False) == ["a-00000000"]
    for _ in range(2):
        llm.output_processor.abort_requests(["b-00000000"], internal=True)
    assert listener.heard == [("ended", "a-00000000"), ("ended", "b-00000000")]


def test_one_that_vllm_refuses_in_the_end_keeps_no_slot(llm, listener):
    with pytest.raises(AssertionError):
        llm.output_processor.add_request(request_of("a-00000000", external_req_id=None), None)
    assert listener.heard[-1] == ("ended", "a-00000000")


def test_a_slot_that_a_client_made_up_never_reaches_the_engine(llm, listener):
    forged = {SLOT_KEY: 5, CONFIG_KEY: "{}", "other": 1}
    first = add(llm, request_of("a-00000000", forged))
    assert first.sampling_params.extra_args == {SLOT_KEY: 71, CONFIG_KEY: "{}", "other": 1}
    listener.slot, listener.order = -1, "ours"
    second = add(llm, request_of("b-00000000", forged))
    assert second.sampling_params.extra_args == {CONFIG_KEY: "ours", "other": 1}
    assert forged[SLOT_KEY] == 5, "the client's own parameters are shared by its children"


def test_whatever_goes_wrong_with_us_the_request_runs_and_the_slot_stays_out(llm, listener):
    def broken(*_):
        raise ZeroDivisionError

    listener.adding = listener.counted = listener.ended = listener.sent = broken
    request = add(llm, request_of("a-00000000", {SLOT_KEY: 5}))
    assert SLOT_KEY not in request.sampling_params.extra_args
    llm.output_processor.process_outputs([output("a-00000000", [5], "STOP")])
    assert not llm.output_processor.request_states
    add(llm, request_of("b-00000000"))
    llm.output_processor.abort_requests(["b-00000000"], internal=True)
    assert not llm.output_processor.request_states


@pytest.mark.parametrize("slot", [None, True, -3, "7", 1.5, [7], 1 << 60])
def test_only_a_slot_is_taken_for_one(slot):
    from undercurrent.adapters.vllm.compat import slot_of

    new = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={SLOT_KEY: slot}))
    assert slot_of(new, SLOT_KEY) == -1
