"""The offline side: figures of probes and text baselines, by request, on data that no part of a probe was fitted on.

Needs the extra `eval` (scikit-learn, scipy), which do the statistics.
"""
