"""The store where processes of a job meet, if the job survives lost ranks; none of the ranks hosts it."""

import dataclasses
import threading
from collections.abc import Callable

from stretto.errors import ConfigError
from stretto_lab.train.workers import host_store


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeetConfig:
    """The address where processes of a job meet."""

    host: str = "127.0.0.1"
    """Name or address of this machine; at a loopback address the store accepts only this machine, at any other address
    all machines."""
    port: int = 29400
    """Port of the store; 0 lets the system choose."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port}: expected a number from 0 to 65535")


def meet(config: MeetConfig, log: Callable[[str], None]) -> None:
    """Host the store until the process is ended.

    Args:
        config: The address.
        log: Called with one line of text that names the address.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        store = host_store(config.host, config.port)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{config.host}:{config.port}: cannot listen there ({str(error).splitlines()[0]}); choose another --port"
        ) from error
    log(f"meeting at {config.host}:{store.port}, until this command is ended")
    threading.Event().wait()
