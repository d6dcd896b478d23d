"""Probe hosts: run probes on activations, live and in replay.

__main__.py        builds the clients; `undercurrent-probes`
cli.py             `undercurrent probes run`
config.py          what a file may say
service.py         a process: one loop per point, and the observer
point_host.py      a loop: poll, decide, commit; what is decided stands in undercurrent.protocol.host
decoding.py        from a record to what the protocol reads
runner.py, run.py  bindings on streams: one scoring call per batch, one `Run` per stream and binding
bound.py           a binding with its probe, and the messages that it writes
transactor.py      verdicts, dead letters and offsets, all or none
aborts.py          abort commands, at once
observer.py        true lag, heartbeats, readiness
metrics.py         what is counted
replay*.py         the same core over a bounded range, and the comparison; `undercurrent replay`
"""
