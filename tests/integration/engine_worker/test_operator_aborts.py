"""An operator stops requests by command: before, during and after the run, across crashes of worker and command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from undercurrent.protocol.messages import AckOutcome, CommandSource, Outcome, PromptRequest, Sampling
from undercurrent.service.processes import tied_command
from undercurrent.testing.brokers import QUICK
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

# A killed member's partitions are free after this; production leaves more time.


class Operator:
    """Runs `undercurrent abort` on a bench's topics."""

    def __init__(self, bench, config):
        self.bench = bench
        self.config = config

    def start(self, *arguments):
        command = [sys.executable, "-m", "undercurrent.cli", "abort", *arguments, "--config", str(self.config)]
        pipe = subprocess.PIPE
        return subprocess.Popen(tied_command(command), stdout=pipe, stderr=pipe, text=True)

    def abort(self, *arguments, code):
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}\n{self.bench.logs()}"
        return out, err

    def outcomes(self, request_id):
        """Return what was answered for a request, in log order."""
        found = [ack for acks in self.bench.acks().values() for ack in acks if ack.request_id == request_id]
        return [ack.outcome for ack in found]


@pytest.fixture
def bench(apache_broker, tmp_path):
    with EngineBench(apache_broker.settings(**QUICK), tmp_path) as built:
        yield built


def test_before_during_and_after_the_run(bench):
    config = bench.configure()
    operator = Operator(bench, config)
    worker = bench.start_worker(config)
    worker.wait_ready()

    out, _ = operator.abort("not-yet", "--reason", "will not be wanted", code=0)
    assert out.startswith("not-yet: command ")
    bench.wait(lambda: operator.outcomes("not-yet") == [AckOutcome.UNKNOWN], "the worker to say that it knows no such")
    sampling = Sampling(max_tokens=8)
    bench.send_request(PromptRequest(request_id="not-yet", prompt="p", sampling=sampling, created_at_us=0))
    (final,) = bench.wait_finals(["not-yet"])["not-yet"]
    assert (final.outcome, final.generated_tokens) == (Outcome.ABORTED, 0)
    assert (final.abort.source, final.abort.reason) == (CommandSource.OPERATOR, "will not be wanted")
    bench.wait(lambda: operator.outcomes("not-yet") == [AckOutcome.UNKNOWN, AckOutcome.APPLIED], "its answer")

    running, done = bench.send(["long"], max_tokens=4000) + bench.send(["short"], max_tokens=4)
    bench.wait(lambda: running in bench.between_tokens(), "first tokens")
    out, _ = operator.abort(running, "--reason", "a customer called", "--wait", "--timeout", "60", "--json", code=0)
    command, ack = map(json.loads, out.splitlines())
    (final,) = bench.wait_finals([running, done])[running]
    assert (final.outcome, final.abort.command_id) == (Outcome.ABORTED, command["command_id"])
    assert (ack["outcome"], ack["command_id"], ack["engine"]) == ("applied", command["command_id"], "engine-0")
    assert 0 < ack["token_index"] == final.generated_tokens < 4000
    assert command["issued_at_us"] == ack["decided_at_us"] <= ack["received_at_us"] <= ack["applied_at_us"]
    metrics = worker.get("/metrics")[1]
    for stage in ("received", "applied"):
        assert f'undercurrent_engine_operator_abort_seconds_count{{stage="{stage}"}} 2.0' in metrics

    # Over, and stopped by another command: both at once, and the one that nothing stopped decides the exit code.
    out, _ = operator.abort(running, done, "--reason", "again", "--wait", "--timeout", "60", code=1)
    assert f"{running}: already stopped by another command" in out
    assert f"{done}: too late: it had ended before" in out
    assert len(bench.finals()[running]) == len(bench.finals()[done]) == 1
    assert worker.terminate() == 0, worker.tail()


def test_a_command_outlives_who_wrote_it_and_the_worker_that_was_to_obey(bench):
    config = bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}})
    operator = Operator(bench, config)
    first = bench.start_worker(config)
    first.wait_ready()
    (stopped,) = bench.send(["long"], max_tokens=4000)
    bench.wait(lambda: stopped in bench.between_tokens(), "first tokens")

    first.freeze()
    process = operator.start(stopped, "--reason", "r", "--wait", "--timeout", "600")
    assert "is written" in process.stdout.readline()
    process.kill()
    process.communicate()
    first.kill()
    _, err = operator.abort(stopped, "--reason", "nobody there", "--wait", "--timeout", "0.5", code=3)
    assert f"no engine has answered for {stopped} within 0.5 s. The commands stand" in err

    (spared,) = bench.send(["short"], max_tokens=4)
    second = bench.start_worker(config)
    finals = bench.wait_finals([stopped, spared], 120)
    assert [(f.outcome, f.abort.reason) for f in finals[stopped]] == [(Outcome.ABORTED, "r")]
    assert [f.outcome for f in finals[spared]] == [Outcome.COMPLETED]
    answered = [AckOutcome.APPLIED, AckOutcome.ALREADY]
    bench.wait(lambda: sorted(operator.outcomes(stopped)) == sorted(answered), "an answer to each command")
    out, _ = operator.abort(stopped, "--reason", "to be sure", "--wait", "--timeout", "60", code=0)
    assert f"{stopped}: already stopped by another command" in out
    assert second.terminate() == 0, second.tail()
