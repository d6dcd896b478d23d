"""Sections that the configuration file of every service has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from undercurrent.service.logging import LogFormat


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
