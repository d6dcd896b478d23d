"""Every error that Undercurrent raises, under one root.

    ProbingError
    ├── ConfigError              a configuration file, variable or option is wrong
    ├── SpecError                an extraction-point spec is wrong
    │   ├── SpecValidationError  a point or a field of it
    │   └── PositionSyntaxError  a position selector
    ├── ProbeError               a probe class, folder or registration is wrong
    │   ├── ProbeNotFoundError   no probe has that name
    │   ├── ProbeSetChangedError  a partition was read with another probe set
    │   └── ShapeError           an array has not the shape that a probe needs
    ├── RouterError              the in-process router is misused
    ├── CodecError               bytes and records do not fit together
    │   ├── DecodeError          bytes that no schema here can read
    │   └── EncodeError          a record that its schema refuses
    ├── ProtocolError            a message that breaks the protocol's rules
    ├── TopicError               a topic is missing, or not as its plan says
    ├── NotAllowedError          the brokers do not let this client do what it has to
    ├── UnreachableError         a broker or an engine does not answer
    ├── ProducerFatalError       a producer can write nothing any more
    ├── CommitError              offsets of a consumer group could not be committed
    ├── TransactionError         a Kafka transaction did not go through
    │   ├── RetriableTransactionError  the same call may be made again
    │   ├── AbortableTransactionError  the transaction must be aborted, the writer lives on
    │   ├── FencedError                another writer took over, or this one is beyond use
    │   └── StrandedError              nobody did, yet this one is beyond use; another can go on
    ├── CaptureError             activations cannot be captured
    │   ├── RingError            the shared-memory ring is unusable
    │   ├── SeqMapperError       a row belongs to a request that nobody registered
    │   ├── WorkerExtractionError  a point cannot be captured on this model
    │   ├── VLLMIntrospectionError  vLLM's internals have another shape than expected
    │   └── VLLMAdapterLimitationError  an embedded engine is asked for what it does not do
    ├── EngineError              an engine refuses a request or died
    │   ├── BadRequestError      this request, for a reason its sender can mend
    │   ├── EngineDeadError      the engine as a whole
    │   └── EngineReplacedError  its name is another process's by now
    ├── DatasetError             a folder of recorded activations, or a file of labels, cannot be used
    │   └── ChoiceError          it has nothing of the name that was asked for
    ├── EvaluationError          scores, labels and what else is known do not fit together
    └── ReplayError              a recorded range cannot be replayed

Whoever catches `ProbingError` catches them all.
"""

from __future__ import annotations


class ProbingError(Exception):
    """Root of every error raised by Undercurrent."""


class ConfigError(ProbingError):
    """A configuration file, an environment variable or an option is wrong."""


class SpecError(ProbingError):
    """An extraction-point spec is wrong."""


class SpecValidationError(SpecError):
    """A point of a spec, or one of its fields, is wrong.

    Args:
        message: what is wrong and what would be right.
        point: name of the extraction point, if known.
        field: name of the field, if known.
    """

    def __init__(self, message: str, *, point: str | None = None, field: str | None = None) -> None:
        self.reason = message
        self.point = point
        self.field = field
        where = " ".join(
            part for part in (f"point {point!r}" if point else "", f"field {field!r}" if field else "") if part
        )
        super().__init__(f"{where}: {message}" if where else message)


class PositionSyntaxError(SpecError):
    """A position selector cannot be read."""


class ProbeError(ProbingError):
    """A probe class, a probe folder or a registration is wrong."""


class ProbeNotFoundError(ProbeError):
    """No probe has the name asked for."""


class ProbeSetChangedError(ProbeError):
    """A partition was read with another probe set, and nobody said that this one may go on.

    Args:
        last: fingerprint of the set that committed last.
        mine: of the one that runs now.
    """

    def __init__(self, last: str, mine: str) -> None:
        self.last = last
        self.mine = mine
        super().__init__(
            f"the probe set has fingerprint {mine}; the group's offsets were committed by a set with {last or 'none'}. "
            f"Run the same bindings and artefacts as the group's other members, or start with --change to go on with "
            f"these: what was said already stays as it is"
        )


class ShapeError(ProbeError):
    """An array has not the shape that a probe needs."""


class RouterError(ProbingError):
    """The in-process router is misused."""


class CodecError(ProbingError):
    """Bytes and records do not fit together."""


class DecodeError(CodecError):
    """Bytes that no known schema can read.

    Args:
        reason: what about the bytes is wrong.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class EncodeError(CodecError):
    """A record that its schema refuses."""


class ProtocolError(ProbingError):
    """A message that breaks the protocol's rules."""


class TopicError(ProbingError):
    """A topic is missing, or is not what the plan says."""


class NotAllowedError(ProbingError):
    """The brokers do not let this client do what it has to: the operation, and the topic or group, are named."""


class UnreachableError(ProbingError):
    """A broker or an engine does not answer within its deadline."""


class ProducerFatalError(ProbingError):
    """A producer is fenced or broken; what became of its last records is unknown."""


class CommitError(ProbingError):
    """Offsets of a consumer group could not be committed.

    Args:
        message: what the broker or the client said.
        retriable: whether the same commit may be tried again.
    """

    def __init__(self, message: str, *, retriable: bool) -> None:
        self.retriable = retriable
        super().__init__(message)


class TransactionError(ProbingError):
    """A Kafka transaction did not go through."""


class RetriableTransactionError(TransactionError):
    """The same call may be made again; nothing was decided."""


class AbortableTransactionError(TransactionError):
    """The open transaction must be aborted; the writer can begin another."""


class FencedError(TransactionError):
    """Another writer took over the transactional id, or this writer is beyond use; it must be closed."""


class StrandedError(TransactionError):
    """This writer cannot go on, though nobody took its id; close it, and another one can go on in its place."""


class CaptureError(ProbingError):
    """Activations cannot be captured."""


class RingError(CaptureError):
    """The shared-memory ring cannot be created, opened or trusted.

    Args:
        message: what is wrong.
        offset: byte offset from the start of the ring's data, where one is known.
    """

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        self.offset = offset
        super().__init__(message if offset is None else f"at byte {offset}: {message}")


class SeqMapperError(CaptureError):
    """A row of a step belongs to a request that nobody registered, or a registration makes no sense."""


class WorkerExtractionError(CaptureError):
    """An extraction point cannot be captured on this model, or this worker was not asked to capture."""


class VLLMIntrospectionError(CaptureError):
    """vLLM's internals have another shape than this version of the adapter knows."""


class VLLMAdapterLimitationError(CaptureError):
    """An embedded engine is asked for what it does not do, by name."""


class EngineError(ProbingError):
    """An engine refuses a request or died."""


class BadRequestError(EngineError):
    """One request is refused, for a reason that its sender can mend."""


class EngineDeadError(EngineError):
    """The engine as a whole is gone; no request of it can finish."""


class EngineReplacedError(EngineError):
    """An engine's name has gone to a later process, or was retired.

    Args:
        engine: the name.
        how: what happened to it, in words.
        incarnation: that it has now.
    """

    def __init__(self, engine: str, how: str, incarnation: int) -> None:
        super().__init__(
            f"engine {engine} {how}, as incarnation {incarnation}; this process ends: one name is one process's"
        )
        self.engine = engine
        self.incarnation = incarnation


class EvaluationError(ProbingError):
    """Scores, labels and what else is known of the requests do not fit together, or are not what they should be."""


class ReplayError(ProbingError):
    """A recorded range cannot be replayed."""


class DatasetError(ProbingError):
    """A folder of recorded activations, or a file of labels, cannot be used: the file and field are named."""


class ChoiceError(DatasetError):
    """Something was asked for by a name that the data does not have.

    Args:
        field: what was asked for: point, layers, label, source, judged-by, group-by or slice.
        reason: in words, with the names that there are.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(reason)
