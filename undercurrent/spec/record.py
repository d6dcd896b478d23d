"""One activation, as probe code sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from undercurrent.spec.enums import TensorType


@dataclass(frozen=True, slots=True, eq=False)
class ActivationRecord:
    """The activation of one (token, layer) of a request at one point.

    It compares by identity: what `==` means between tensors is the tensors' affair.

    Args:
        request_id: the producer's id.
        extraction_point_name: the point that wanted it.
        layer: 0-based; the output of that decoder block.
        token_pos: absolute over prompt plus generation.
        tensor_type: which tensor of the layer.
        tensor: [width], [2, kv_heads, head_dim] of `kv`, [2, k] of `router_topk`; usually a read-only view on a larger
            buffer: copy what is kept beyond the call.
        is_generated: whether the token was generated rather than given.
        timestamp: when it was captured, seconds since the Unix epoch.
    """

    request_id: str
    extraction_point_name: str
    layer: int
    token_pos: int
    tensor_type: TensorType
    tensor: Any
    is_generated: bool
    timestamp: float = field(default_factory=time.time)

    def metadata(self) -> dict[str, Any]:
        """Return every field but the tensor."""
        return {
            "request_id": self.request_id,
            "extraction_point_name": self.extraction_point_name,
            "layer": self.layer,
            "token_pos": self.token_pos,
            "tensor_type": self.tensor_type,
            "is_generated": self.is_generated,
            "timestamp": self.timestamp,
        }
