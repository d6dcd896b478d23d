"""Bytes to and from Kafka: the one package that knows a Kafka client, and no schema.

client.py        settings, configurations of every kind of client, `ping`
records.py       `Record`, `Partition`
publisher.py     `Publisher`: idempotent writes, errors as values
transactions.py  `TransactionalWriter`: outputs and offsets together
subscriber.py    `GroupSubscriber`: a group member whose owner says where partitions start and what is committed
reader.py        `AssignedReader`: partitions named by hand
offsets.py       `OffsetLookup`: where logs begin and end
ranges.py        `TopicRange`: a bounded part of a topic, for replay
admin.py         topics as planned and as they are
"""
