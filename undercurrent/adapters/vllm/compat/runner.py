"""What capture needs of a model runner, whichever of vLLM's it is."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from undercurrent.adapters.vllm.compat.steps import After, Before, Spent
from undercurrent.capture.plan import Batch


class Held:
    """What both of vLLM's model runners have.

    Args:
        runner: vLLM's model runner, its model loaded.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        self._runner = runner

    @property
    def model(self) -> Any:  # noqa: ANN401 - a torch module
        """The loaded model."""
        return self._runner.get_model()

    @property
    def device_type(self) -> str:
        """Where the model runs, as torch calls it."""
        return str(self._runner.device.type)


class Runner(Protocol):
    """One of vLLM's model runners, its model loaded.

    Attributes:
        max_rows: most rows of a step.
        vocab_size: of the model.
    """

    max_rows: int
    vocab_size: int

    @property
    def model(self) -> Any:  # noqa: ANN401 - a torch module
        """The loaded model."""

    @property
    def device_type(self) -> str:
        """Where the model runs, as torch calls it."""

    def wrap_steps(self, before: Before, after: After, spent: Spent) -> None:
        """Call `before` and `after` around every step; neither may raise.

        Args:
            before: gets the scheduler's output before the batch is changed.
            after: gets it when it is known which rows are real and the batch still is this step's.
            spent: gets the CPU time of this thread that both took, nanoseconds.
        """

    def new_requests(self, scheduler_output: Any) -> list[Any]:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the requests that are scheduled for the first time; one that was preempted is none of them.

        Args:
            scheduler_output: of a step that has not run; asked once per step.
        """

    def batch(self, step: int, rows: int) -> Batch:
        """Return the batch of the step that just ran.

        Args:
            step: its number.
            rows: tokens that the scheduler asked for.

        Raises:
            CaptureError: what the runner says does not fit together.
        """

    def dummy_run(self, token_ids: np.ndarray) -> None:
        """Run the model's forward pass on some token ids, without requests and without a KV cache.

        Args:
            token_ids: int32 [n].
        """
