"""The doctor passes a healthy machine, and names the device, rank or link that is not."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConfigError
from stretto.groups import SoloGroup
from stretto_lab.cli import main
from stretto_lab.doctor import Examination, Report, examine
from stretto_lab.doctor.device import LARGE_OPERATORS, OPERATORS, Operator, repeat, write_and_read
from stretto_lab.doctor.examination import Subject
from stretto_lab.doctor.network import COLLECTIVES, CollectiveResult, Network
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup
from stretto_lab.faults.injector import Injector
from stretto_lab.faults.plan import WireSite
from tests.processes import run_program

RANKS, BAD = 3, 1
QUICK = Examination(seconds=0.2, memory_megabytes=1, link_megabytes=0.1)


class Flaky:
    """Work whose last bit is another at every other call."""

    def __init__(self, run: Callable[..., list[Tensor]]) -> None:
        self.run = run
        self.calls = 0

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        self.calls += 1
        results = self.run(*operands)
        if self.calls % 2 == 0:
            results[-1].view(torch.int32).view(-1)[7] ^= 1
        return results


def wrong(run: Callable[..., list[Tensor]], *operands: Tensor) -> list[Tensor]:
    """The same, and always the same, wrong result."""
    return [result + 1 for result in run(*operands)]


def with_work(name: str, change: Callable[[Any], Callable[..., list[Tensor]]]) -> dict[str, Operator]:
    changed = dataclasses.replace(OPERATORS[name], run=change(OPERATORS[name].run))
    return {**OPERATORS, name: changed}


def flip(words: Tensor) -> None:
    words[100] ^= 1 << 33


def arrivals(site: WireSite) -> Fault:
    return Fault(site=site, rank=BAD, lasts="sticky", extent="all", pattern="word")


def reports(rank: int, group: dist.ProcessGroup) -> dict[str, Report]:
    """One examination after the other, each with something else wrong on one rank."""
    healthy = Subject(devices=[torch.device("cpu")], threads=1)
    subjects = {
        "healthy": healthy,
        "flaky": dataclasses.replace(healthy, operators=with_work("convolution", Flaky)),
        "wrong": dataclasses.replace(
            healthy, operators=with_work("matmul", lambda run: functools.partial(wrong, run))
        ),
        "other": dataclasses.replace(
            healthy, operators=with_work("attention", lambda run: functools.partial(wrong, run))
        ),
        "memory": dataclasses.replace(healthy, disturb=flip),
    }
    found = {
        name: examine(group, subject if rank == BAD else healthy, QUICK) for name, subject in subjects.items()
    }
    for site in ("contribution", "gathered values", "all-reduced values", "broadcast values"):
        injector = Injector(FaultPlan((arrivals(site),)), rank)
        found[site] = examine(FaultyGroup(group, injector), healthy, QUICK)
    # The second network stands for NCCL's: what differs there is whose tensors it takes.
    injector = Injector(FaultPlan((arrivals("gathered values"),)), rank)
    between = Network(FaultyGroup(group, injector), torch.device("cpu"))
    found["between devices"] = examine(group, dataclasses.replace(healthy, between_devices=between), QUICK)
    return found


@functools.cache
def outcomes() -> list[dict[str, Report]]:
    return run_program(RANKS, reports)


def checks(report: Report) -> set[str]:
    return {finding.check for finding in report.findings if not finding.passed}


def test_a_healthy_machine_passes_and_every_link_is_measured() -> None:
    report = outcomes()[0]["healthy"]
    assert report.passed, [finding for finding in report.findings if not finding.passed]
    assert report.summary.startswith("passed: ")
    rates = {f.link: f.megabits_per_second for f in report.findings if f.check == "link"}
    assert set(rates) == {(a, b) for a in range(RANKS) for b in range(RANKS) if a != b}
    assert all(rate is not None and rate > 0 for rate in rates.values())
    assert {f.check for f in report.findings} >= {
        *OPERATORS,
        "memory",
        "all-reduce",
        "all-to-all",
        "broadcast",
    }


def test_a_round_runs_every_collective_once_and_counts_so() -> None:
    network = Network(SoloGroup(), torch.device("cpu"))
    results = {name: CollectiveResult() for name in COLLECTIVES}
    for index in range(3):
        network.check_collectives(index, results)
    assert {(one.rounds, one.damaged) for one in results.values()} == {(3, 0)}


def test_links_between_devices_are_measured_beside_those_of_hosts() -> None:
    found = outcomes()[0]["between devices"].findings
    for check in ("link", "link over NCCL"):
        links = {finding.link for finding in found if finding.check == check and finding.passed}
        assert links == {(a, b) for a in range(RANKS) for b in range(RANKS) if a != b}


@pytest.mark.parametrize("name", LARGE_OPERATORS)
def test_work_for_devices_is_exact_on_a_host_that_is_healthy(name: str) -> None:
    (found,) = repeat({name: LARGE_OPERATORS[name]}, torch.device("cpu"), 0.0, 1).values()
    assert found.differing == 0
    assert found.is_exact is (None if name == "attention" else True)


@pytest.mark.parametrize(
    ("case", "failed"),
    [
        ("flaky", {"convolution"}),
        ("wrong", {"matmul", "matmul compared"}),
        ("other", {"attention compared"}),
        ("memory", {"memory"}),
        ("contribution", {"reduce-scatter", "all-to-all", "link"}),
        ("gathered values", {"all-gather"}),
        ("all-reduced values", {"all-reduce"}),
        ("between devices", {"all-gather over NCCL"}),
    ],
)
def test_the_bad_rank_is_named_by_every_rank(case: str, failed: set[str]) -> None:
    for found in outcomes():
        assert checks(found[case]) == failed
        assert (found[case].suspects, found[case].links) == ((BAD,), ())
        assert found[case].summary.startswith("not to be trusted: rank 1 (host ")


def test_a_wrong_broadcast_names_the_rank_that_all_roots_fail_to_reach() -> None:
    report = outcomes()[0]["broadcast values"]
    assert checks(report) == {"broadcast"}
    assert BAD in report.suspects or {receiver for _, receiver in report.links} == {BAD}


def test_every_rank_has_the_same_report() -> None:
    first, *others = outcomes()
    assert all(found == first for found in others)


def test_a_damaged_word_is_told_with_its_bits() -> None:
    readback = write_and_read(torch.device("cpu"), 1, 0.0, flip)
    assert (readback.passes, readback.damaged_words) == (5, 5)
    assert readback.first == (
        "word 100: expected 0000000000000000, found 0000000200000000, bits 0000000200000000"
    )
    assert write_and_read(torch.device("cpu"), 1, 0.0).damaged_words == 0


def test_the_command_ends_with_0_on_a_healthy_machine_and_writes_its_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--seconds", "0.5", "--memory-megabytes", "2", "--out", "found"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed: ")
    found = json.loads(Path("found", "doctor.json").read_text())
    assert (found["passed"], len(found["hosts"])) == (True, 2)
    assert {row["check"] for row in found["findings"]} >= {"matmul", "memory", "link"}


def test_the_command_ends_with_1_where_something_disagrees(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--seconds", "0.5", "--memory-megabytes", "2"]
    # Not flipped bits, which are drawn one by one, in Python: that takes seconds for a payload.
    assert main([*words, "--faults", "contribution:rank=1:lasts=sticky:extent=all:pattern=word"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("not to be trusted: rank 1 (host ")
    assert any(line.startswith("BAD  all-to-all") for line in shown)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seconds": 0}, "seconds must be positive"),
        ({"faults": (Fault(site="masters", rank=0),)}, "no job to strike"),
    ],
)
def test_an_examination_that_cannot_be_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Examination(**settings)
