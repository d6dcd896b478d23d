"""What the bench that most tests look through lets them see."""

from __future__ import annotations

import pytest

from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


def test_a_record_of_a_transaction_that_was_aborted_is_not_seen(apache_broker, tmp_path):
    """A host aborts one over all its logs where its broker was killed: no letter of anything."""
    with EngineBench(apache_broker.settings(), tmp_path) as bench:
        letters = bench.plan.dlq(bench.plan.prompts)
        writer = TransactionalWriter(bench.settings, bench.plan.prefix)
        writer.init(30.0)
        for end in (writer.abort, writer.commit):
            writer.begin()
            writer.produce(letters, end.__name__.encode(), partition=0)
            writer.flush()
            end()
        writer.close()
        bench.wait(lambda: [record.value for record in bench.read(letters)] == [b"commit"], "what was committed")
