"""Undercurrent: activation probes on live LLM inference.

Shapes, units and sources stand in each public docstring. One convention holds everywhere: `layer` is 0-based and
means that decoder block's output, `token_pos` is absolute over prompt plus generation.
"""

__version__ = "0.1.0"
