"""Checks for settings that an integration cannot support; each raises a one-line error with the remedy."""

from collections.abc import Mapping

from stretto.errors import ConfigError, UsageError


def refuse(who: str, settings: Mapping[str, tuple[bool, str]]) -> None:
    """Raise if a setting cannot work.

    Args:
        who: The integration.
        settings: By name, whether it is set, and the remedy.

    Raises:
        ConfigError: A setting is set; the message names the first.
    """
    for setting, (is_set, remedy) in settings.items():
        if is_set:
            raise ConfigError(f"{who} does not work with {setting}: {remedy}")


def check_unchanged(before: Mapping[str, object], now: Mapping[str, object], call: str) -> None:
    """Raise if a callback has changed a setting that the job took over when it started.

    Args:
        before: The settings at the start of the job, by name.
        now: The trainer's current settings.
        call: The trainer's call, for the message.

    Raises:
        UsageError: A setting differs; the message names the first.
    """
    for name, value in before.items():
        if now[name] != value:
            raise UsageError(
                f"{name}: expected {value!r} as at the start of {call}, found {now[name]!r}: a job has one "
                "clipping limit and one length of accumulations"
            )


def overrides(instance: object, base: type, hook: str) -> bool:
    """Return whether the class of `instance`, or `instance` itself, replaces this hook of `base`."""
    return getattr(getattr(instance, hook), "__func__", None) is not getattr(base, hook)


def reads_optimizer_state(scheduler: object) -> tuple[bool, str]:
    """Return whether a schedule reads the optimizer's state, which is empty during a job, and the remedy."""
    names = {kind.__name__ for kind in type(scheduler).__mro__}
    remedy = "the job keeps the state of the optimizer; set a rate: Adafactor(lr=1e-3, relative_step=False)"
    return "AdafactorSchedule" in names, remedy
