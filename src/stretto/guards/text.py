"""Guards as words on the command line, such as `rest`, `replica` or `audit:rate=0.02:seed=1`."""

from stretto.fields import read_record
from stretto.guards import GUARDS, Guard


def parse_guard(text: str) -> Guard:
    """Read a guard; its settings are the fields of its class.

    Raises:
        UnknownName: No such guard, or the guard has no such setting.
        ConfigError: A value cannot be read, or is not allowed.
    """
    guard: Guard = read_record("guard", text, GUARDS)
    return guard
