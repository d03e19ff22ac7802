"""What is another use of a batch worth? Held-out loss of echoed training, the learning rate tuned for every arm.

    nice python experiments/echoing.py run --out benchmarks/results/DATE-echo-learning
    python experiments/echoing.py summarise --out benchmarks/results/DATE-echo-learning

Two ranks of a virtual cluster. All arms but `spaced` take the same fresh batches:

    fresh      every batch is used once
    spaced     as many steps as the echoed arms, every batch fresh: what reading more would give
    even       1 / 0.55 = 1.82 uses of every batch
    bernoulli  every step takes a fresh batch with p = 0.55
    falling    p falls from 1 to 0.1 on a cosine; 0.55 on average
    rising     p rises from 0.1 to 1 on a cosine

Each arm sums gradients at every step (`ddp`). As `ARM+local` its replicas step alone and are averaged at the rate at
which it loads (Algorithm 2): by the same coin under `bernoulli`, `falling` and `rising`, evenly under `even`. `fresh`
and `spaced`, which load at every step, are averaged evenly at 0.55 too. tuned_arms.py tunes the arms,
paired_comparison.py compares them, and echoed_run.py has the model of time.
"""

from echoed_run import Arm
from paired_comparison import arguments, perform
from tuned_arms import Experiment, Setting

from stretto import DDP, Bernoulli, Even, LocalSGD
from stretto.echo import Cosine, Plan
from stretto_lab.recipes import DigitsResNet, StdlibGPT

MEAN_P = 0.55
LOWEST_P = 0.1
PLANS = ("fresh", "spaced", "even", "bernoulli", "falling", "rising")
LOCAL = "+local"
_GRID = (*PLANS, *(plan + LOCAL for plan in PLANS))

SETTINGS = {
    "digits-large": Setting(
        config=lambda lr: DigitsResNet(width=8, batch=128, lr=lr),
        batch=128, loads=56, uses=1 / MEAN_P, step_seconds=0.010, rates=(0.1, 0.2, 0.4), arms=_GRID,
        tuning_seeds=(100, 101, 102, 103),
    ),
    "digits-small": Setting(
        config=lambda lr: DigitsResNet(width=8, batch=16, lr=lr),
        batch=16, loads=200, uses=1 / MEAN_P, step_seconds=0.005, rates=(0.04, 0.08, 0.16), arms=_GRID,
        tuning_seeds=(100, 101, 102, 103),
    ),
    "language": Setting(
        config=lambda lr: StdlibGPT(size="2x64x4", context=64, batch=8, lr=lr),
        batch=8, loads=200, uses=1 / MEAN_P, step_seconds=0.010, rates=(0.002, 0.004, 0.008),
        arms=("fresh", "even", "falling"), tuning_seeds=(100, 101),
    ),
}  # fmt: skip


def arm(setting: Setting, name: str, seed: int) -> Arm:
    """Return what an arm does."""
    plan, loads = _plan(name.removesuffix(LOCAL), setting.loads)
    return Arm(plan=plan, loads=loads, strategy=_strategy(name, plan, seed))


def _plan(name: str, loads: int) -> tuple[Plan, int]:
    """Return a plan and its number of fresh batches on each rank."""
    steps = round(loads / MEAN_P)
    plans: dict[str, tuple[Plan, int]] = {
        "fresh": (Even(1), loads),
        "spaced": (Even(1), steps),
        "even": (Even(1 / MEAN_P), loads),
        "bernoulli": (Bernoulli(MEAN_P), loads),
        "falling": (Bernoulli(Cosine(1.0, LOWEST_P, steps)), loads),
        "rising": (Bernoulli(Cosine(LOWEST_P, 1.0, steps)), loads),
    }
    return plans[name]


def _strategy(name: str, plan: Plan, seed: int) -> DDP | LocalSGD:
    """Return an arm's strategy; averages come at the rate at which the plan loads, or at 0.55 where it always loads."""
    if not name.endswith(LOCAL):
        return DDP()
    if isinstance(plan, Bernoulli):
        return LocalSGD(rate=plan.p, plan="bernoulli", seed=seed)
    return LocalSGD(rate=MEAN_P, plan="even")


def references(name: str) -> dict[str, str]:
    """Return what an arm is compared with: the bare loader, ordinary epochs, and itself averaged at every step."""
    twin = {"itself without `local`": name.removesuffix(LOCAL)} if name.endswith(LOCAL) else {}
    return {"`fresh`": "fresh", "`spaced`": "spaced"} | twin


EXPERIMENT = Experiment(
    settings=SETTINGS, arm=arm, reference="fresh", references=references, results="echoing.json"
)

if __name__ == "__main__":
    perform(EXPERIMENT, arguments(EXPERIMENT, __doc__).parse_args())
