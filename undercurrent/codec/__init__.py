"""Records to bytes and back: Avro, its framing, and the tensors inside."""

from undercurrent.codec.avro import Codec
from undercurrent.codec.blocks import BlockDecoder, BlockEncoder
from undercurrent.codec.tensors import as_array, check_size, positions, row_shape, token_ids, views

__all__ = [
    "BlockDecoder",
    "BlockEncoder",
    "Codec",
    "as_array",
    "check_size",
    "positions",
    "row_shape",
    "token_ids",
    "views",
]
