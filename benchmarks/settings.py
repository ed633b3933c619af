"""What every case is told, and the sizes that product and baseline share."""

from dataclasses import dataclass

__all__ = ["BATCH", "CLAIM", "CONNECTIONS", "PAYLOAD_BYTES", "Settings"]

BATCH = 250  # messages a producer appends at once
CLAIM = 4_000  # ids a consumer takes at once
CONNECTIONS = 4  # of a producer
PAYLOAD_BYTES = 1_000  # of JSON


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large a run is; None leaves it to the case.

    Attributes:
        seconds: how long each measurement lasts.
        rounds: how often baseline and product take turns.
        full: whether to take the sizes that the bars are for.
    """

    seconds: float | None = None
    rounds: int | None = None
    full: bool = False
