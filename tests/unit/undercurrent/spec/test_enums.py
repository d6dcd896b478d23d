"""The vocabularies: what files of the first release write must go on being read."""

from __future__ import annotations

import pytest

from undercurrent import spec

CONTRACT = {
    "TensorType": "residual_stream attn_out mlp_out kv final_norm layer_input router_topk",
    "ProbeKind": "single_shot trajectory",
    "ExecutionMode": "inline async",
    "UntilKind": "generation_end fixed_count stop_token",
    "InterventionMode": "reject block_until_signal",
    "TimeoutAction": "continue abort",
    "PositionKind": "absolute prompt_index generated_index generated_wildcard generated_slice",
}


@pytest.mark.parametrize("name", CONTRACT)
def test_members_are_called_as_their_values_in_capitals(name):
    kind = getattr(spec, name)
    assert [member.name.lower() for member in kind] == [member.value for member in kind]
    assert set(CONTRACT[name].split()) <= {member.value for member in kind}
