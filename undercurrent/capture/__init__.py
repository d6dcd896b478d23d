"""Engine-neutral capture: from the rows of a step to frames in a shared-memory ring.

`ring` moves frames between two processes, `frames` says what stands in them, `tracker` decides which rows of a
scheduler step belong to which stream. NumPy only: every engine writes the same frames, and whoever reads them needs
neither torch nor the engine.
"""
