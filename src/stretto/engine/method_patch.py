"""A method of one object that is replaced for a while, and not in copies of the object."""

from collections.abc import Callable
from typing import Any


class MethodPatch:
    """Is called instead of an object's method, until it is removed.

    Args:
        owner: The object.
        name: Of the method.
        call: The replacement.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        self._before = vars(owner).get(name)
        vars(owner)[name] = self  # past the setters of compiled models

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(*args, **named)

    def __reduce__(self) -> Any:
        """Be the class's own method in a copy or a pickle of the owner."""
        return getattr, (self._owner, self._name)

    def remove(self) -> None:
        """Give the owner back what it had, unless somebody has replaced that since."""
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        del attributes[self._name]
        if self._before is not None:
            attributes[self._name] = self._before
