"""The circuit of a point: opened by failures in a row, closed by as many answers in a row.

A point's bindings of all requests share one, since what makes a probe hang or raise is rarely one request's affair.
"""

from __future__ import annotations

from threading import Lock


class Circuit:
    """Counts the failures in a row of one point.

    Args:
        threshold: failures in a row that open it, answers in a row that close it; None: it never opens.
    """

    __slots__ = ("_answers", "_lock", "failures", "is_open", "threshold", "users")

    def __init__(self, threshold: int | None) -> None:
        self.threshold = threshold
        self.failures = 0
        self.is_open = False
        self.users = 0
        self._answers = 0
        self._lock = Lock()

    def failed(self) -> bool:
        """Count a failure; return whether it opened the circuit."""
        with self._lock:
            self.failures += 1
            self._answers = 0
            if self.is_open or self.threshold is None or self.failures < self.threshold:
                return False
            self.is_open = True
            return True

    def answered(self) -> bool:
        """Count an answer; return whether it closed the circuit. Nothing to count where `failures` is 0."""
        with self._lock:
            if not self.is_open:
                self.failures = 0
                return False
            self._answers += 1
            if self.threshold is not None and self._answers < self.threshold:
                return False
            self.is_open, self.failures, self._answers = False, 0, 0
            return True


class Circuits:
    """The circuits of a router by point name; one without failures is forgotten with its last request.

    Args:
        threshold: of each circuit.
    """

    def __init__(self, threshold: int | None) -> None:
        self._threshold = threshold
        self._known: dict[str, Circuit] = {}
        self._lock = Lock()

    def join(self, name: str) -> Circuit:
        """Return the circuit of a point for one more user."""
        with self._lock:
            circuit = self._known.setdefault(name, Circuit(self._threshold))
            circuit.users += 1
            return circuit

    def leave(self, name: str) -> None:
        """Count a user less."""
        with self._lock:
            circuit = self._known[name]
            circuit.users -= 1
            if not circuit.users and not circuit.failures:
                del self._known[name]

    def __len__(self) -> int:
        return len(self._known)
