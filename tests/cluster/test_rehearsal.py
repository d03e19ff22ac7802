"""The commands of docs/clusters.md, on two network namespaces, of which one is lost in mid-run. Needs root."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.namespaces import Namespaces
from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from tests.cluster.test_survival import as_root, in_space, kill
from tests.docs.pages import DOCS, code_blocks

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
UPDATES = 150
OPTIONS = f"--updates {UPDATES} --checkpoint-every 5 --evaluate-every 5 --no-tensorboard"
SETTINGS, COMMAND = code_blocks(DOCS / "clusters.md", "tests/cluster/test_rehearsal.py")


def in_words(node: int) -> str:
    """What is typed on a node: the page's commands, for a tiny recipe and a folder of the test."""
    settings = SETTINGS.replace(
        "THIS_NODE=10.77.0.1 IS_FIRST=1", f"THIS_NODE=10.77.0.{node + 1} IS_FIRST={1 - node}", 1
    )
    command = COMMAND.replace("stdlib-gpt", f"{shlex.quote(TINY)} {OPTIONS}", 1).replace(
        "/shared/my-run", "shared", 1
    )
    return settings + "exec " + command


@contextmanager
def started(spaces: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the commands on both nodes; what a node prints comes through a pipe, its complaints are in a file."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, "bash", "-c", in_words(node)],
                    env={**os.environ, "PATH": path},
                    stdout=subprocess.PIPE,
                    stderr=stack.enter_context(Path(f"complaints of {node}").open("w")),
                    text=True,
                )
            )
            for node, space in enumerate(spaces)
        ]
        try:
            yield nodes
        finally:
            for space in spaces:
                kill(in_space(space))


def killed_in_mid_run(spaces: Sequence[str]) -> list[str]:
    """Train until the second node is lost, and return the lines in which the ranks of the first one say so."""
    with started(spaces) as (first, second):
        next(line for line in first.stdout if " after 10 updates" in line)
        kill(in_space(spaces[1]))
        first.stdout.read()  # until nothing is left that could print
        assert (first.wait(), second.wait()) == (1, -signal.SIGKILL)
    return [line for line in Path("complaints of 0").read_text().splitlines() if line.startswith("stretto: ")]


@pytest.mark.long
@as_root
def test_the_commands_of_the_page_train_on_two_nodes_and_go_on_to_the_same_bits_when_one_was_lost() -> None:
    undisturbed = f"{OPTIONS} --workers 4 --ranks-per-node 2 --run-dir whole"
    assert main(["train", TINY, *undisturbed.split()]) == 0
    whole = read_json_lines(Path("whole/updates.jsonl"))
    with Namespaces(2, "none") as network:
        told = killed_in_mid_run(network.spaces)
        # One rank or both: torchrun ends the other one as soon as one has ended, and rank 0 takes the store along.
        assert 1 <= len(told) <= 2
        for line in told:
            assert re.match(r"stretto: rank ([01]) of 4 failed: PeerFailed: rank \1, after step \d+, ", line)
        # On a busy machine a rank of the first node, too, may not answer in time.
        assert any(
            re.search(r"(one of ranks \[.*[23]\], which do not answer,|rank [23]) died", line)
            for line in told
        )
        assert 10 <= len(read_json_lines(Path("shared/updates.jsonl"))) < UPDATES
        with started(network.spaces) as nodes:
            for node in nodes:
                node.stdout.read()
            assert [node.wait() for node in nodes] == [0, 0], Path("complaints of 0").read_text()
    shared = read_json_lines(Path("shared/updates.jsonl"))
    assert [row["step"] for row in shared] == list(range(1, UPDATES + 1))
    assert [row["loss"] for row in shared] == [row["loss"] for row in whole]
    ours, theirs = (torch.load(Path(folder, "model.pt")) for folder in ("shared", "whole"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
