"""The options of the doctor, and what it refuses before an engine starts."""

from __future__ import annotations

import pytest

from undercurrent.cli.doctor.command import parse_settings
from undercurrent.errors import ConfigError


def test_settings_are_yaml():
    settings = ["max_num_seqs=64", "dtype=float32", "enforce_eager=false", "speculative_config={method: ngram}"]
    assert parse_settings(settings) == {
        "max_num_seqs": 64,
        "dtype": "float32",
        "enforce_eager": False,
        "speculative_config": {"method": "ngram"},
    }


@pytest.mark.parametrize("text", ["max_num_seqs", "=3", "a b=3", "x={"])
def test_what_is_no_setting_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        parse_settings([text])
