"""A stand-in for a device, which does nothing before somebody waits for it."""

from __future__ import annotations

import torch


class LaterStream:
    """Work that is done when it is waited for, in order."""

    def __init__(self):
        self.work = []
        self.done = 0

    def add(self, job):
        self.work.append(job)

    def wait_event(self, event):
        # As it is marked now: it may be recorded again before this is done.
        stream, at = event.stream, event.at
        self.add(lambda: stream.run_to(at))

    def run_to(self, count):
        while self.done < count:
            job = self.work[self.done]
            self.done += 1
            job()


class LaterEvent:
    def __init__(self):
        self.stream, self.at = None, 0

    def record(self, stream):
        self.stream, self.at = stream, len(stream.work)

    def synchronize(self):
        if self.stream is not None:
            self.stream.run_to(self.at)


class LaterDevice:
    """See the module."""

    def __init__(self):
        self.model, self.copies = LaterStream(), LaterStream()
        self.pinned_bytes = 0

    def current(self):
        return self.model

    def side(self):
        return self.copies

    def event(self):
        return LaterEvent()

    def pinned(self, like):
        self.pinned_bytes += like.nbytes
        return torch.zeros(like.shape, dtype=like.dtype)

    def copy(self, source, target, stream):
        stream.add(lambda: target.copy_(source))
