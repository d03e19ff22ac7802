"""What an update is said to cost is what the time model says, and the choice is the fastest that costs no loss."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import numpy
import pytest

from stretto.errors import ConfigError
from stretto.groups import Link
from stretto.strategies import STRATEGIES
from stretto_lab.cli import main
from stretto_lab.cli.screens import print_plan
from stretto_lab.evidence import EVIDENCE, OF_WIRES
from stretto_lab.plan import Machine, PlanConfig, Price, Ranking, rank_by_time
from stretto_lab.plan.measure import measure
from stretto_lab.plan.ranking import RARE
from stretto_lab.recipes import DigitsResNet
from stretto_lab.recipes.own import own_recipe
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.launch import Ranks
from tests.draws import draws, part, seeds
from tests.plan.machine import BUCKET_BYTES, MACHINE, priced, seconds
from tests.terminal import print_on_a_terminal

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
N_T = 4 * MACHINE.micro_batch_seconds
TRANSFER = 8e6 / 2 * 8 / 2e8
"""R, and G: half of all parameters, in 32 bits, at the link's rate."""
LANE = 0.01 + 0.02 / 2
EXCHANGE = 2 * TRANSFER + LANE


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("zero1", N_T + max(TRANSFER - 0.1 * 7 / 8, TRANSFER / 8) + LANE + TRANSFER),  # eight buckets
        ("dpu", max(N_T, EXCHANGE)),
        ("wp", max(N_T, EXCHANGE + LANE)),
        ("acco", 2 * max(N_T / 2, EXCHANGE)),
    ],
)
def test_a_price_is_that_of_the_time_model(arm: str, expected: float) -> None:
    """A twin's records are as long as the job's, on a link that is slower: some thousandths of the time."""
    assert seconds(arm) == pytest.approx(expected, rel=0.01)


def test_jitter_costs_what_the_slowest_of_all_ranks_lags_behind() -> None:
    """Of 4 uniform draws of width j the mean is normal, nearly, with the deviation j / sqrt(3 * 4)."""

    def lag(ranks: int, arm: str = "zero1") -> float:
        even = dataclasses.replace(MACHINE, ranks=ranks, link=Link())
        return (seconds(arm, dataclasses.replace(even, jitter=0.2)) - seconds(arm, even)) / N_T

    deviation = 0.2 / math.sqrt(12)
    # The larger of two draws has the mean 1 / sqrt(pi) and the deviation sqrt(1 - 1 / pi); there are 24 updates.
    error = deviation * math.sqrt((1 - 1 / math.pi) / 24)
    of_two = lag(2)
    assert of_two == pytest.approx(deviation / math.sqrt(math.pi), abs=2 * error)
    for ranks in part((128, 16)):
        slowest = float(numpy.random.default_rng(0).normal(size=(4000, ranks)).max(axis=1).mean())
        # The draws are those of two ranks, so their error cancels; that of the normal draws is below 1 %.
        assert lag(ranks) / of_two == pytest.approx(slowest * math.sqrt(math.pi), rel=0.1)
        assert lag(ranks, "acco") < lag(ranks) / 2  # what overlaps hides most of it


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(8))
def test_a_free_link_and_more_ranks_that_jitter_never_make_an_update_cheaper(seed: int) -> None:
    """Every rank of `ddp` steps all parameters, so only what it waits for the others grows."""
    draw = random.Random(seed)
    machine = dataclasses.replace(
        MACHINE, link=Link(), jitter=draw.uniform(0.0, 1.0), backward_seconds=draw.uniform(0.01, 0.2)
    )
    micro_batches = draw.choice([1, 2, 4, 16])
    taken = [
        priced("ddp", dataclasses.replace(machine, ranks=ranks), micro_batches).seconds
        for ranks in [1, 2, draw.randrange(3, 5000)]
    ]
    assert taken == sorted(taken)


def test_on_a_core_of_its_own_computing_pays_for_what_overlaps() -> None:
    narrow = dataclasses.replace(MACHINE, cores=1)
    assert seconds("dpu", narrow) == pytest.approx(max(N_T + LANE, EXCHANGE), rel=0.01)
    assert seconds("acco", narrow) == pytest.approx(2 * max(N_T / 2 + LANE, EXCHANGE), rel=0.01)
    assert seconds("zero1", narrow) == seconds("zero1")


def test_packing_costs_a_rank_that_averages_now_and_then_only_then() -> None:
    """It works on the compute lane, and all of it is between two micro-batches."""
    for arm, per_update in (("local:rate=0.1", 0.1), ("diloco:interval=4:fragments=2", 0.25)):
        free = dataclasses.replace(MACHINE, link=Link())
        slow = dataclasses.replace(free, exchange_seconds={**free.exchange_seconds, "int4": 0.5})
        dearer, cheaper = (priced(f"{arm}:wire=int4", one, 1).seconds for one in (slow, free))
        assert dearer - cheaper == pytest.approx(per_update * (0.5 - 0.03), rel=0.01)


def test_packing_is_priced_for_the_ranks_of_a_plan() -> None:
    packing = {2: {"rotated2": 0.05}, 64: {"rotated2": 0.25}}
    machine = dataclasses.replace(MACHINE, packing_seconds=packing, link=Link())
    many = machine.with_ranks(64, {})
    assert many.exchange_seconds == pytest.approx({**machine.exchange_seconds, "rotated2": 0.26})
    dearer = seconds("zero1:wire=rotated2", many) - seconds("zero1:wire=rotated2", machine)
    assert dearer == pytest.approx(0.2 + machine.step_seconds * (1 / 64 - 1 / 2))


@pytest.mark.long
def test_a_plan_says_where_a_core_is_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    for rate, is_core in ((1e6, False), (1e9, True)):
        machine = dataclasses.replace(MACHINE, link=Link(bits_per_second=rate), cores=1.0)
        print_plan([rank_by_time(machine, micro_batches=4, wire="rotated2")])
        assert ("a core limits exchanges on rotated2" in capsys.readouterr().out) == is_core, rate


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_bytes_are_the_ledgers_at_every_number_of_ranks(ranks: int) -> None:
    found = priced("zero1", dataclasses.replace(MACHINE, ranks=ranks))
    expected = 8 * MACHINE.parameters * (ranks - 1) / ranks
    assert found.sent_bytes == pytest.approx(expected, rel=0.02)
    assert found.memory_bytes == pytest.approx((8 + 16 / ranks) * MACHINE.parameters)


def test_a_setting_of_an_arm_is_priced_or_refused() -> None:
    whole = 4 * MACHINE.parameters
    of_arm, of_job = (
        priced(arm, bucket_bytes=given).seconds
        for arm, given in ((f"zero1:bucket_bytes={whole // 2}", whole // 8), ("zero1", whole // 2))
    )
    assert of_arm == of_job > seconds("zero1")
    with pytest.raises(ConfigError, match="nodes have ranks_per_node=1: expected that, or"):
        seconds("acco:ranks_per_node=2")
    with pytest.raises(ConfigError, match="a worker that is a node: expected ranks_per_node=1"):
        seconds("diloco:worker=node")
    assert seconds("diloco:worker=node:ranks_per_node=1") == pytest.approx(seconds("diloco"), rel=1e-3)


@pytest.mark.parametrize(
    ("arm", "bytes_per_parameter"),
    [
        ("zero1:wire=int4", 34 / 64 + 34 / 64),
        ("zero1:wire=int4:changes=bf16", 34 / 64 + 2),
        ("acco:wire=int4:changes=bf16", 2 * 34 / 64 + 2 * 2),
    ],
)
def test_every_format_of_an_arm_is_priced(arm: str, bytes_per_parameter: float) -> None:
    expected = bytes_per_parameter * MACHINE.parameters / 2  # of two ranks, each keeps a half
    # A twin's records are as long as the job's.
    assert priced(arm).sent_bytes == pytest.approx(expected, rel=0.04)


def test_the_number_of_parameters_of_the_twin_does_not_matter() -> None:
    small = dataclasses.replace(MACHINE, parameters=100_000, link=Link(bits_per_second=1e7))
    large = dataclasses.replace(MACHINE, parameters=100_000_000, link=Link(bits_per_second=1e10))
    prices = [priced("zero1", one, bucket_bytes=4 * one.parameters // 8) for one in (small, large)]
    assert prices[0].seconds == pytest.approx(prices[1].seconds, rel=0.01)


def test_every_strategy_that_costs_known_nats_is_priced() -> None:
    assert {*EVIDENCE, "paft-sync", "paft-dyn"} == {*STRATEGIES}


@pytest.mark.long
def test_a_slow_link_sends_fewer_bytes_and_averages_win_where_their_loss_is_allowed() -> None:
    machine = dataclasses.replace(MACHINE, link=Link(bits_per_second=1e7), cores=1)
    ranking = rank_by_time(machine, micro_batches=4, bucket_bytes=BUCKET_BYTES)
    assert ranking.choice.arm == "zero1:wire=rotated2"
    assert ranking.choice.seconds < ranking.base.seconds / 4
    times = [one.seconds_per_micro_batch for one in ranking.prices]
    assert times == sorted(times)
    for allowed in (0.0, 0.02, 0.04, 0.05, 0.09, 0.3, 1.0):
        chosen = dataclasses.replace(ranking, allow_loss=allowed).choice
        assert (parse_arm(chosen.arm).name == "average") == (allowed >= 0.04), allowed


def test_the_choice_costs_no_more_than_is_allowed_nothing_allowed_is_faster_and_all_others_have_reasons() -> (
    None
):
    arms = [f"{arm}:wire={wire}" for arm in (*EVIDENCE, *RARE) for wire in OF_WIRES]
    for seed in draws(60):
        draw = random.Random(seed)
        prices = [
            Price(
                arm=arm,
                seconds=draw.choice([1.0, draw.uniform(1, 1.1)]),
                exposed_seconds=draw.choice([0.0, 0.5]),
                sent_bytes=0,
                memory_bytes=0,
                micro_batches=draw.choice([4, 5]),
            )
            for arm in ["zero1", *draw.sample(arms, 9)]
        ]
        prices.sort(key=lambda one: one.seconds_per_micro_batch)
        allowed = draw.choice([0.0, 0.02, 0.04, 0.3, 1.0])
        ranking = Ranking(MACHINE, tuple(prices), None, 4, allowed)
        known = {one: ranking.evidence_of(one.arm) for one in prices}
        may = [one for one in prices if known[one].nats is not None and known[one].nats <= allowed]
        choice = ranking.choice
        assert choice in may, (seed, ranking)
        limit = 1.02 * choice.seconds_per_micro_batch
        assert choice.seconds_per_micro_batch <= 1.02 * may[0].seconds_per_micro_batch, (seed, ranking)
        for one in {*prices} - {choice}:
            slow = "waits" if one.exposed_seconds else "computes more"
            expected = "too close" if one.seconds_per_micro_batch <= limit else slow
            if one not in may:
                nats = known[one].nats
                expected = known[one].source if nats is None else f"{nats:+.2f} nats"
            assert ranking.why_not(one) == expected, (seed, one)
        assert ranking.why_not(choice) == "the choice", seed


def test_the_command_says_what_to_use_first_and_why_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    words = f"plan {TINY} --batches 2 --ranks 16 --link 100mbit --network free --micro-batches 1 --wire bf16"
    assert main(words.split()) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("16 ranks: use --strategy ") for line in lines)
    assert max(map(len, lines)) <= 80
    assert sum(line.endswith("  the choice") for line in lines) == 1
    assert "link free" in " ".join(lines)


@pytest.mark.long
def test_ranks_on_nodes_measure_both_links() -> None:
    """Every rank has 40 Mbit/s of its own here, so the two ranks of a node have twice as much."""
    job = PlanConfig(task=own_recipe(TINY), ranks_per_node=2, link="40mbit")
    found = Ranks.local(4).call(measure, job, 2)[0]
    assert found.ranks_per_node == 2
    assert found.link.bits_per_second == pytest.approx(8e7, rel=0.15)
    assert found.inside.bits_per_second == pytest.approx(4e7, rel=0.15)


@pytest.mark.long
def test_a_job_with_a_wire_keeps_it_and_is_compared_with_the_default_on_that_wire() -> None:
    found = rank_by_time(MACHINE, micro_batches=4, bucket_bytes=BUCKET_BYTES, wire="bf16")
    assert {parse_arm(one.arm).wire for one in found.prices} == {"bf16"}
    assert found.base.arm == "zero1:wire=bf16"


def test_formats_that_a_plan_has_no_price_for_are_refused() -> None:
    for given, words in (
        ({"wire": "int2"}, "wire='int2': stretto plan has prices only for"),
        ({"changes": "int2"}, "changes='int2': a plan prices one format"),
    ):
        with pytest.raises(ConfigError, match=words):
            PlanConfig(task=DigitsResNet(), **given)


@pytest.mark.long
def test_a_run_takes_the_choice_and_its_resume_keeps_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--updates", "2", "--no-tensorboard", "--wire", "bf16", "--run-dir", "run"]
    assert main(["train", TINY, "--strategy", "auto", *words]) == 0
    shown = capfd.readouterr().out
    chosen = json.loads(Path("run", "config.json").read_text())["command"]["options"][-1]
    arm = parse_arm(chosen)
    assert arm.wire == "bf16"
    assert (
        f"ranks: use --strategy {arm.own_text} --wire bf16" in shown
    )  # which one depends on how busy the machine is
    assert f"{chosen} on 2 workers (cpu), run" in shown
    assert main(["resume", "run", "--updates", "3"]) == 0
    assert f"{chosen} on 2 workers (cpu), run" in capfd.readouterr().out
    assert main(["resume", "run", "--updates", "4", "--strategy", "ddp"]) == 0
    assert main(["resume", "run", "--updates", "5"]) == 0
    shown = capfd.readouterr().out
    assert len(re.findall(r"^ddp on 2 workers \(cpu\), .*run$", shown, re.MULTILINE)) >= 2
    assert "pricing" not in shown
    assert main(["resume", "run", "--updates", "6", "--strategy", "auto"]) == 0
    assert "pricing" in capfd.readouterr().out


@pytest.mark.long
def test_a_run_over_files_begins_in_an_empty_folder_and_the_same_command_goes_on_with_its_choice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("story.txt").write_text("The cat saw a bird.\n" * 200)
    words = "train language --task.data story.txt --task.documents.unit line --task.model llama-tiny --task.length 32"
    command = f"{words} --task.readers 0 --strategy auto --no-tensorboard --checkpoint-every 1 --run-dir run"
    assert main([*command.split(), "--updates", "2"]) == 0
    assert "pricing" in capfd.readouterr().out
    chosen = json.loads(Path("run", "config.json").read_text())["command"]["options"][-1]
    assert main([*command.split(), "--updates", "3", "--resume"]) == 0
    shown = capfd.readouterr().out
    assert "pricing" not in shown
    assert f"{chosen} on 2 workers (cpu), run" in shown
    assert main([*command.split(), "--updates", "3"]) == 2
    told = capfd.readouterr()
    assert "run holds a run already" in told.err
    assert "measuring" not in told.out


@pytest.mark.long
def test_over_random_machines_a_faster_link_makes_no_update_slower_and_none_is_faster_than_its_computing() -> (
    None
):
    draw = random.Random(0)
    for _ in range(12):
        machine = Machine(
            ranks=draw.choice([2, 3, 8, 100]),
            parameters=draw.randint(1_000, 10_000_000),
            forward_seconds=10 ** draw.uniform(-4, -1),
            backward_seconds=10 ** draw.uniform(-4, -1),
            load_seconds=10 ** draw.uniform(-6, -1),
            step_seconds=10 ** draw.uniform(-5, -2),
            exchange_seconds=dict.fromkeys(MACHINE.exchange_seconds, 10 ** draw.uniform(-5, -2)),
            link=Link(bits_per_second=10 ** draw.uniform(6, 11), latency_seconds=10 ** draw.uniform(-6, -3)),
            cores=draw.choice([1, 8]),
        )
        faster = dataclasses.replace(machine.link, bits_per_second=3 * machine.link.bits_per_second)
        arm = f"{draw.choice(['ddp', 'zero1', 'acco', 'wp', 'dpu'])}:wire={draw.choice(['fp32', 'int4'])}"
        slow, fast = seconds(arm, machine), seconds(arm, dataclasses.replace(machine, link=faster))
        assert fast <= slow * 1.01, (arm, machine)  # ranks may take turns in another order
        assert fast >= 4 * max(machine.micro_batch_seconds, machine.load_seconds) * 0.999, (arm, machine)
