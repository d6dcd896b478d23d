"""What it costs an API server of a bare vLLM server to say how long its requests are, in vLLM's own output processing.

python -m benchmarks.server_lengths --requests 16 --requests 256

Two of vLLM's output processors get the same outputs of the same requests in turn, one token each, one of them followed.
The difference is time of the API server's event loop, not of the engine.
"""

from __future__ import annotations

import json
import statistics
import time
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from engine_worker.server_lengths import ServerLengths
from undercurrent.adapters.vllm.compat.server import follow_requests
from undercurrent.capture.ring import Ring
from undercurrent.capture.tellers import begin_telling


class _Listener(ServerLengths):
    def adding(self, engine_id: str, external_id: str, index: int, raw: object) -> tuple[str | None, int]:
        return None, self.take(engine_id)

    def sent(self, engine_id: str) -> None:
        return None


def _processor(requests: int, listener: Any = None) -> OutputProcessor:  # noqa: ANN401 - a RequestsListener
    processor = OutputProcessor(None, log_stats=False)
    if listener is not None:
        core = SimpleNamespace(add_request_async=None)
        core.add_request_async = lambda request: request
        follow_requests(SimpleNamespace(output_processor=processor, engine_core=core), listener)
    for number in range(requests):
        params = SamplingParams(max_tokens=1 << 20)
        fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9]) | {
            "request_id": f"r{number}-00000000", "external_req_id": f"r{number}", "arrival_time": 0.0,
            "prompt_token_ids": [1, 2, 3], "sampling_params": params,
        }  # fmt: skip
        request: Any = EngineCoreRequest(**fields)
        processor.add_request(request, None, None, 0, RequestOutputCollector(params.output_kind, request.request_id))
    return processor


def _step_us(processor: OutputProcessor, requests: int) -> float:
    outputs = [EngineCoreOutput(f"r{number}-00000000", [7]) for number in range(requests)]
    began = time.perf_counter()
    processor.process_outputs(outputs)
    return (time.perf_counter() - began) * 1e6


def main(requests: Annotated[list[int], typer.Option()] = [16, 256], steps: int = 400) -> None:  # noqa: B006 - typer's
    """Measure."""
    result = {}
    for count in requests:
        ring = Ring.create(1 << 20)
        plain, followed = _processor(count), _processor(count, _Listener(begin_telling([ring], 0, 1), [ring]))
        times = [(_step_us(plain, count), _step_us(followed, count)) for _ in range(steps)]
        alone, both = (statistics.median(one[place] for one in times) for place in (0, 1))
        result[str(count)] = {"plain_us": round(alone, 1), "followed_us": round(both, 1)}
        typer.echo(f"{count} requests: {alone:.0f} us a step, {both:.0f} us when their lengths are told")
    typer.echo(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
