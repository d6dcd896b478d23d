"""In-process dispatch of records to probes."""
