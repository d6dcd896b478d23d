"""Sections that the configuration files of several services have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from undercurrent.protocol.brake import BrakeLimits
from undercurrent.service.logging import LogFormat

HoldoutShare = Annotated[float, Field(ge=0, lt=1)]
"""Share of the requests, by hash of their id, that runs to its end whatever a probe asks for."""


class BrakeSection(BaseModel):
    """When a probe that stops too many requests is not listened to any more, until it is resumed.

    Off by default: whoever can make requests that a probe stops can put the brake on.

    Args:
        max_abort_share: largest share of the window that one probe may stop.
        window: requests that are looked back at, of those that this process gave to its engine.
        min_requests: with fewer in the window nothing is braked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_abort_share: Annotated[float, Field(gt=0, le=1)] | None = None
    window: Annotated[int, Field(gt=0, le=1_000_000)] = 500
    min_requests: Annotated[int, Field(gt=0)] = 100

    @model_validator(mode="after")
    def _reachable(self) -> BrakeSection:
        if self.min_requests > self.window:
            raise ValueError(f"min_requests {self.min_requests} is above window {self.window}: it would never brake")
        return self

    @property
    def limits(self) -> BrakeLimits:
        """The same, as the protocol takes it."""
        return BrakeLimits(max_abort_share=self.max_abort_share, window=self.window, min_requests=self.min_requests)


class MetricsSection(BaseModel):
    """Where /metrics, /healthz and /readyz are served.

    Args:
        host: the interface.
        port: 0 for any free one; the log names it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0


class LoggingSection(BaseModel):
    """How the log looks.

    Args:
        format: `text` or `json`.
        level: least level that is shown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: LogFormat = LogFormat.TEXT
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
