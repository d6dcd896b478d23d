"""One broker that lets nobody in without proof, for every test here."""

from __future__ import annotations

import pytest

from undercurrent.acls import Service
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.testing.secured import secured_kafka

USERS = (*(service.value for service in Service), "stranger")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory):
    yield from or_skip(secured_kafka(tmp_path_factory.mktemp("secured"), USERS))
