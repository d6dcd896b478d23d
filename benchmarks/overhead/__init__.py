"""The parts of `benchmarks/engine_overhead.py`: engines and readers in processes of their own, and the arithmetic."""
