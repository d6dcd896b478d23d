"""For our tests and for users' tests: brokers, a scripted engine, streams, tiny models, the demo's model."""
