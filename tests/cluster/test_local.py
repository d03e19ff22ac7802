"""One torchrun for all machines: ranks and a machine are lost, and all go on from the memory of the machines."""

import shutil
from pathlib import Path

import pytest

from tests.cluster.test_survival import as_root, in_space, kill, machines, says, until
from tests.docs.pages import DOCS, code_blocks

SETTINGS, _ = code_blocks(DOCS / "clusters.md", "tests/cluster/test_rehearsal.py")
(COMMAND,) = code_blocks(DOCS / "survive.md", "tests/cluster/test_local.py")
WITHOUT_END = "--updates 100000000 --every 50"
RANKS_OF = "examples/cluster/local_checkpoints.py"


def words_of(node: int, folder: Path) -> str:
    """What is typed on a machine: the pages' lines, for a folder of the test."""
    place = f"THIS_NODE=10.77.0.{node + 1} IS_FIRST={1 - node}"
    settings = SETTINGS.replace("THIS_NODE=10.77.0.1 IS_FIRST=1", place, 1)
    return settings + COMMAND.replace("/dev/shm/my-run", f"{folder / str(node)} {WITHOUT_END}", 1)


def a_rank(space: str) -> set[int]:
    """One of the ranks on a machine, without its agent."""
    ranks = set()
    for process in in_space(space):
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        ranks |= {process} if RANKS_OF in words[1:3] else set()
    return {min(ranks)}


def goes_on(logs: list[Path], times: int) -> bool:
    """Whether all ranks have gone on from memory so often, after some hundred updates; rank 0 may be on any machine."""
    said = [log.read_text() for log in logs]
    return sum(text.count("resuming from update") for text in said) >= times and any(
        text.rpartition("resuming from update")[2].count("update ") > 2 for text in said
    )


@pytest.mark.long
@as_root
def test_ranks_and_then_a_whole_machine_are_lost_and_all_go_on_from_what_the_machines_remember(
    tmp_path: Path,
) -> None:
    with machines(tmp_path, 2) as (spaces, logs, start):
        for node in range(2):
            start(node, words_of(node, tmp_path))
        until(lambda: any(says(log, "update 200:")() for log in logs), "updates", *logs)
        kill(a_rank(spaces[1]))
        until(lambda: goes_on(logs, 1), "a start from memory", *logs)
        kill(in_space(spaces[1]))
        shutil.rmtree(tmp_path / "1")
        until(lambda: not in_space(spaces[1]), "the end of the machine", *logs)
        before = logs[1].read_text()
        start(1, words_of(1, tmp_path))
        until(lambda: goes_on(logs, 2 - before.count("resuming")), "a start from what is left", *logs)
    assert not any("from update 0" in text.partition("resuming")[2] for text in map(Path.read_text, logs))
