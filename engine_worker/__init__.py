"""The engine worker: takes prompts, runs them in an inference engine, publishes what it generates and what it captures.

config.py        the configuration file
intake.py        a record of the prompts topic as a prompt, or what is wrong with it          (pure)
deltas.py        tokens gathered to one event per request and interval                        (pure)
records.py       dead letters and lost ends of streams                                        (pure)
member.py        the Kafka thread: polls, rebalances, commits
tail.py          reads generations, control, acknowledgements and verdicts on a thread
outbox.py        queues before the producer of everything but activations
writer.py        what is written there
driver.py        requests into the engine, deltas out of it
publishing.py    the publisher process, seen from here
worker.py        the asyncio loop that owns the protocol and carries out what it decides; parts.py: what it works with
stall.py         how long something stands still
observer.py      metrics and readiness
children.py      ends the processes below this one
building.py      the engine, and the rings that it writes to
publisher.py, publisher_streams.py   the publisher process itself
__main__.py      builds the clients
"""
