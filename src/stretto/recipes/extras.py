"""Optional packages, imported where they are used and missed with the command that installs them."""

import importlib
from types import ModuleType

from stretto import errors


def extra(module: str, purpose: str) -> ModuleType:
    """Imports a module that the extra `recipes` installs.

    Args:
        module: Its full name.
        purpose: What needs it, as the subject of the error's sentence.

    Raises:
        MissingExtra: It is not installed. An installed module that fails to import raises its own error.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, but something that it needs is not
        raise errors.MissingExtra(package, "recipes", purpose) from error
