"""The scripts of `examples/`, run as a user runs them."""

from contextlib import ExitStack

from torch.distributed import TCPStore

from tests.processes import Command
from tests.style.source import ROOT

EXAMPLES = ROOT / "examples"


def printed(*words: str, launcher: tuple[str, ...] = ()) -> list[str]:
    """Run a program in the test's own folder, and return the lines that it prints.

    Args:
        words: The script's path in `examples/`, and its arguments.
        launcher: The module that starts the script, and its arguments; none for a plain process.
    """
    before = ("-m", *launcher) if launcher else ()
    script, *arguments = words
    with Command(*before, str(EXAMPLES / script), *arguments) as command:
        return _lines(command)


def printed_by_ranks(script: str, world_size: int, *arguments: str) -> list[str]:
    """Run a script on ranks that know of each other what torchrun tells them; return the lines that rank 0 prints."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": store.port}
    told = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told |= {name: str(value) for name, value in shared.items()}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Command(
                    str(EXAMPLES / script),
                    *arguments,
                    variables=told | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(world_size)
        ]
        first, *others = [_lines(rank) for rank in ranks]
    assert others == [[]] * (world_size - 1)
    return first


def _lines(command: Command) -> list[str]:
    shown, complaint = command.communicate()
    assert command.returncode == 0, complaint
    return shown.splitlines()
