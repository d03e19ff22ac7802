"""A temporary replacement of one object's method, which copies of the object do not have."""

from collections.abc import Callable
from typing import Any


class MethodPatch:
    """A function that is called instead of an object's method until it is removed.

    Args:
        owner: The object.
        name: Name of the method.
        call: The replacement.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        self._before = vars(owner).get(name)
        vars(owner)[name] = self  # past the setters of compiled models

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(*args, **named)

    def __reduce__(self) -> Any:
        """Return the class's own method, for a copy or a pickle of the owner."""
        return getattr, (self._owner, self._name)

    def remove(self) -> None:
        """Restore the owner's method, unless other code has replaced it since."""
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        del attributes[self._name]
        if self._before is not None:
            attributes[self._name] = self._before
