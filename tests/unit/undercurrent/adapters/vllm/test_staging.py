"""The ring of pinned buffers on a stand-in for a device, which does nothing before somebody waits for it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.undercurrent.adapters.vllm.later_device import LaterDevice
from undercurrent.adapters.vllm.staging import Cuda, Staging
from undercurrent.errors import CaptureError


@pytest.fixture
def device():
    return LaterDevice()


@pytest.fixture
def buffers():
    return [torch.zeros(6, 2, 3), torch.zeros(6, 1, 4)]


def a_step(device, buffers, value):
    """The model computes a step, later."""

    def compute():
        for buffer in buffers:
            buffer.fill_(value)

    device.model.add(compute)


def test_rows_are_those_that_the_model_had_computed_when_the_copy_was_asked_for(device, buffers):
    stamp = torch.zeros(1)
    staging = Staging(buffers, [stamp], device)
    a_step(device, buffers, 7.0)
    slot = staging.begin(4)
    assert not any(rows.any() for rows in staging.rows[slot])
    staging.wait(slot)
    for rows in staging.rows[slot]:
        assert torch.all(rows[:4] == 7)
        assert not rows[4:].any()


def test_the_next_step_overwrites_nothing_before_it_is_copied(device, buffers):
    staging = Staging(buffers, [], device, slots=2)
    a_step(device, buffers, 1.0)
    first = staging.begin(6)
    a_step(device, buffers, 2.0)
    second = staging.begin(6)
    # The model is the fastest: all of its work is done before the host asks for anything.
    device.model.run_to(len(device.model.work))
    staging.wait(second)
    staging.wait(first)
    assert [float(staging.rows[slot][0].mean()) for slot in (first, second)] == [1, 2]


def test_a_slot_is_taken_again_only_when_its_rows_were_written(device, buffers):
    staging = Staging(buffers, [], device, slots=2)
    slots = [staging.begin(1), staging.begin(1)]
    assert sorted(slots) == [0, 1]
    with pytest.raises(CaptureError, match="not written in time"):
        staging.begin(1)
    staging.wait(slots[0])
    with pytest.raises(CaptureError):
        staging.begin(1)
    staging.release(slots[0])
    staging.release(slots[0])
    assert staging.begin(1) == slots[0]
    with pytest.raises(CaptureError):
        staging.begin(1)


def test_a_slot_that_is_given_back_early_is_not_written_any_more(device, buffers):
    staging = Staging(buffers, [], device)
    a_step(device, buffers, 3.0)
    staging.release(staging.begin(2))
    assert device.copies.done == len(device.copies.work)


def test_memory_is_taken_once(device, buffers):
    staging = Staging(buffers, [torch.zeros(5)], device, slots=3)
    taken = device.pinned_bytes
    assert taken == 3 * (36 + 24 + 5) * 4
    for _ in range(10):
        staging.release(staging.begin(6))
    assert device.pinned_bytes == taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_rows_arrive():
    device = torch.device("cuda")
    buffer = torch.zeros(1024, 4, 256, device=device)
    staging = Staging([buffer], [], Cuda(device), slots=2)
    for value in range(1, 20):
        buffer.fill_(value)
        slot = staging.begin(1000)
        staging.wait(slot)
        assert torch.all(staging.rows[slot][0][:1000] == value)
        staging.release(slot)
