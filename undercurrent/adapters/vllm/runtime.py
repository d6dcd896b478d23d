"""What runs in vLLM's worker: it joins the taps, the tracker and the ring to the steps of the model runner.

Nothing raised here leaves `execute_model`: what concerns one request ends its capture with an error, what concerns a
step ends the capture of the requests in it, and serving goes on. At start it is the other way round: whatever is not
understood refuses to start, by name.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig

from undercurrent.adapters.vllm import compat
from undercurrent.adapters.vllm.checked_taps import CheckedTaps
from undercurrent.adapters.vllm.orphan import end_with
from undercurrent.adapters.vllm.server import ServerSide
from undercurrent.adapters.vllm.settings import (
    CONFIG_KEY,
    LENGTHS_CALL,
    SLOT_KEY,
    CaptureSettings,
    graph_key,
    tap_set,
)
from undercurrent.adapters.vllm.silent_rank import SilentRank
from undercurrent.adapters.vllm.tap import Way
from undercurrent.adapters.vllm.version_check import check_vllm_version
from undercurrent.capture.idle import IdleWriter
from undercurrent.capture.points import CapturePoint, Order, child_index, parse_order, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.server_orders import safe_id
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError, ProbingError
from undercurrent.spec import ExtractionPoint

logger = logging.getLogger(__name__)


def attach(worker: Any, settings: CaptureSettings) -> Callable[[], None]:  # noqa: ANN401 - a vLLM worker
    """Prepare capture on a worker whose model is not loaded yet; return what to call when it is.

    Args:
        worker: of vLLM.
        settings: from the driver.

    Raises:
        CaptureError: this engine cannot capture; the reason is in the ring's note as well.
    """
    if settings.owner_pid:
        end_with(settings.owner_pid)
    rank = compat.rank_here()
    server = None if settings.server is None or not rank.publishes else ServerSide(settings.server, worker)
    path = "" if settings.server is not None else settings.rings[rank.pipeline]
    ring = None if not rank.publishes else Ring.open(path) if server is None else server.ring
    told = _Told(ring, path)
    with told:
        worker.vllm_config.additional_config = graph_key(worker.vllm_config.additional_config, tap_set(settings.points))
        check_vllm_version()
        compat.check_supported(
            worker.vllm_config, v2_runner=worker.use_v2_model_runner, allow_untested=settings.allow_untested
        )

    def finish() -> None:
        with told:
            config, runner = worker.vllm_config, compat.runner_for(worker)
            capture: WorkerCapture | SilentRank
            if ring is None:
                capture = SilentRank(settings, config, runner, rank)
            else:
                capture = WorkerCapture(settings, ring, config, runner, rank, server)
            compat.answer_calls(worker, LENGTHS_CALL, lambda: None if server is None else server.tell_lengths())
            capture.taps.before_compiling()
            compat.keep_runtime(worker, capture)
            compat.watch_weights(worker, capture.on_weights)
        warm_up = worker.compile_or_warm_up_model

        # The KV cache exists and nothing is served yet: the moment for the self-check.
        @functools.wraps(warm_up)
        def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
            result = warm_up(*args, **kwargs)
            with told:
                if server is not None:
                    server.wait_ready()
                capture.start()
            return result

        worker.compile_or_warm_up_model = checked

    return finish


class _Told:
    """Writes an error that prevents the start into the ring, where the driver finds it, and lets it go on.

    Args:
        ring: of this worker, None where another writes to it.
        path: of that one's, empty where this process cannot open it.
    """

    def __init__(self, ring: Ring | None, path: str) -> None:
        self._ring = ring
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            text = str(error) if isinstance(error, ProbingError) else f"{type(error).__name__}: {error}"
            ring = self._ring or (Ring.open(self._path) if self._path else None)
            if ring is not None:
                ring.set_note(json.dumps({"error": text}))


class WorkerCapture:
    """Capture in one worker.

    Args:
        settings: from the driver.
        ring: where frames go.
        config: of the engine.
        runner: the model runner, its model loaded.
        rank: which worker this is.
        server: where nobody prepares the orders of requests.

    Raises:
        CaptureError: a point cannot be captured on this model.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        ring: Ring,
        config: VllmConfig,
        runner: compat.Runner,
        rank: compat.Rank,
        server: ServerSide | None = None,
    ) -> None:
        layers, width, dtype = compat.model_shape(config)
        points = compat.capture_points(config, settings.points, rank.pipeline)
        self._settings = settings
        self._config = config
        self._runner = runner
        self._rank = rank
        self._server = server
        self._orders = None if server is None else server.orders
        self._ring = ring
        self.taps = CheckedTaps(runner, config, tap_groups(points), settings.max_tap_bytes)
        self._taps = self.taps.set
        writer = ring.writer()
        self._spent = writer.count_time
        self._idle = IdleWriter(writer)
        self._tracker = Tracker(
            points,
            self._taps.rows_as_bytes(),
            writer,
            block_timeout_s=settings.block_timeout_s,
            check_plans=settings.check_plans,
        )
        # An order names the points of all stages.
        self._known = frozenset(point.name for point in settings.points)
        self._step = 1
        self._weights = 0
        self._armed = False
        self._dead = False
        self.report: dict[str, Any] = {"layers": layers, "width": width, "dtype": dtype}

    def start(self) -> None:
        """Check the taps on the running model, then begin to capture.

        Raises:
            CaptureError: the self-check failed.
        """
        self.taps.when_warm(everything=self._settings.open_points)
        self.report |= {
            "taps": len(self._taps.taps),
            "tap_bytes": self._taps.bytes,
            "taps_in_graph": self._taps.way is Way.GRAPH,
            "residual_stream": self.taps.stream,
            "vllm": check_vllm_version(),
        }
        self._runner.wrap_steps(self._idle.guarded(self._before), self._idle.guarded(self._after), self._spent)
        self._ring.set_note(json.dumps(self.report))
        logger.info("capture is on: %s", self.report)

    def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points; called between steps. Streams that are open keep theirs.

        Args:
            points: from the driver.

        Raises:
            CaptureError: one of them cannot be captured, by name; nothing has changed then.
        """
        if self._dead:
            raise CaptureError("capture has stopped in this worker; its log says why")
        captured = compat.capture_points(self._config, points, self._rank.pipeline)
        for point in captured:
            reason = self.taps.refused(point.group.tensor_type)
            if reason:
                raise CaptureError(f"point {point.name!r}: {reason}")
        known: dict[str, CapturePoint] = {p.name: p for p in (*captured, *self._tracker.used_points)}
        taps = self.taps.prepare(tap_groups(tuple(known.values())))
        self._tracker.set_points(tuple(known.values()), taps.rows_as_bytes())
        # First: if they cannot be put on now, they stay silent, and their rows are declared lost.
        self._taps = taps
        self.taps.use(taps)
        self._known = frozenset(point.name for point in points)

    def on_weights(self, how: str) -> None:
        """End every stream: what follows is computed by other weights. Called between steps.

        Args:
            how: they are changed.
        """
        self._weights += 1
        if self._dead:
            return
        with self._idle:
            try:
                self._tracker.supersede(f"the model's weights changed: {how}")
            # As in a step: whatever we did wrong must not stop the engine.
            except Exception as exc:
                self._give_up(exc)

    def _before(self, scheduler_output: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
        if self._dead:
            return
        try:
            # Finished requests may come in a step without tokens, and before a new one of the same id.
            for engine_id in compat.finished_ids(scheduler_output):
                self._close(engine_id)
            for request in self._runner.new_requests(scheduler_output):
                self._open(request)
            self._step += 1
            rows = scheduler_output.total_num_scheduled_tokens
            self._armed = rows > 0 and self._tracker.live
            if self._armed:
                self._taps.arm(self._step, rows)
        # The engine's step is our loop's edge: whatever we did wrong must not stop the engine.
        except Exception as exc:
            self._give_up(exc)

    def _after(self, scheduler_output: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
        if self._dead:
            return
        taps, step = self._taps, self._step
        try:
            taps.disarm()
            if not self._armed:
                self._tracker.idle(step)
                return
            rows = scheduler_output.total_num_scheduled_tokens
            try:
                stale = taps.stale(step, rows)
                self._tracker.step(self._runner.batch(step, rows), stale)
            # As above: the requests of this step lose their capture, and only that.
            except Exception as exc:
                logger.exception("capture failed in step %d", step)
                self._tracker.fail(list(scheduler_output.num_scheduled_tokens), f"{type(exc).__name__}: {exc}")
        # As above.
        except Exception as exc:
            self._give_up(exc)

    def _close(self, engine_id: str) -> None:
        try:
            if self._orders is not None:
                self._orders.close(engine_id)
            self._tracker.close(engine_id)
        # As in a step: this request's capture ends with an error, and only that.
        except Exception as exc:
            logger.exception("the capture of request %r failed at its end", safe_id(engine_id))
            self._tracker.fail([engine_id], f"{type(exc).__name__}: {exc}")

    def _open(self, request: Any) -> None:  # noqa: ANN401 - vLLM's NewRequestData
        engine_id = request.req_id
        if self._tracker.captures(engine_id):
            # A session whose input goes on: its positions may come again as others, under a prompt that grew.
            self._tracker.fail([engine_id], "more input came for a request that is being captured")
            return
        try:
            order = self._order_of(request)
            if order is None:
                return
            if request.prompt_token_ids is None or request.mm_features:
                raise CaptureError("a prompt of embeddings or other media has no token ids to capture by")
            self._tracker.open(
                engine_id,
                order,
                index=child_index(order, engine_id),
                prompt_len=len(request.prompt_token_ids),
                cached_prefix=request.num_computed_tokens,
                prompt_ids=request.prompt_token_ids,
                lora=compat.lora_of(request),
                weights_version=str(self._weights) if self._weights else "",
            )
        # As in a step: this request runs uncaptured, and only it.
        except Exception as exc:
            self._not_opened(engine_id, exc)

    def _not_opened(self, engine_id: str, error: Exception) -> None:
        is_order, is_told = isinstance(error, CaptureError), True
        detail = str(error) if is_order else f"{type(error).__name__}: {error}"
        if self._tracker.captures(engine_id):
            self._tracker.fail([engine_id], detail)
        # Every stage finds the same fault of an order; one says it.
        elif not is_order or self._rank.pipeline == 0:
            is_told = self._tracker.fault("bad_order" if is_order else "capture_error", detail, safe_id(engine_id))
        # Where nobody reads the ring for long it is only counted: a log must not grow with every request either.
        if is_told:
            logger.warning("request %r runs uncaptured: %s", safe_id(engine_id), detail, exc_info=not is_order)

    def _order_of(self, request: Any) -> Order | None:  # noqa: ANN401 - vLLM's NewRequestData
        raw = compat.order_of(request, CONFIG_KEY)
        if self._server is None:
            return None if raw is None else parse_order(raw, self._known)
        slot = self._server.slot(compat.slot_of(request, SLOT_KEY))
        taken = self._server.orders.take(request.req_id, raw, slot)
        if taken.fault:
            self._tracker.fault("bad_order", taken.fault, safe_id(request.req_id))
        return taken.order

    def _give_up(self, error: Exception) -> None:
        """Stop capturing for good, after an error that cannot be put down to a request or a step."""
        logger.error("capture stops, serving goes on", exc_info=error)
        self._dead = True
        self._taps.disarm()
        try:
            self._tracker.fault("capture_error", f"capture stopped: {type(error).__name__}: {error}")
            self._tracker.fail_all(f"{type(error).__name__}: {error}")
        # The last resort of the same edge.
        except Exception:
            logger.exception("capture could not even say so")
