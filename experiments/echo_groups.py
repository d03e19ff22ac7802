"""Does an update of several micro-batches learn from echoes as one of a single micro-batch does?

    nice python experiments/echo_groups.py run --out benchmarks/results/DATE-echo-groups
    python experiments/echo_groups.py summarise --out benchmarks/results/DATE-echo-groups

Two ranks of a virtual cluster. All arms take the same fresh batches in the same order, and sum gradients (`ddp`):

    one         updates of one micro-batch, each batch used in four of them
    four        updates of four micro-batches, which are used in four updates
    one fresh   updates of one micro-batch, each batch used once
    four fresh  updates of four micro-batches, each batch used once

`one fresh` is also what `four` would be if the four uses of a batch fell into one update: the same gradient four times,
and their mean. tuned_arms.py tunes the arms, paired_comparison.py compares them, and echoed_run.py has the model of
time.
"""

from echoed_run import Arm
from paired_comparison import arguments, perform
from tuned_arms import Experiment, Setting

from stretto import DDP, Even
from stretto_lab.recipes import DigitsResNet

USES = 4
MICRO_BATCHES = 4
ARMS = ("one", "four", "one fresh", "four fresh")

SETTINGS = {
    "digits": Setting(
        config=lambda lr: DigitsResNet(width=8, batch=16, lr=lr),
        batch=16, loads=96, uses=USES, step_seconds=0.005, rates=(0.02, 0.04, 0.08), arms=ARMS,
        tuning_seeds=(100, 101),
    ),
}  # fmt: skip


def arm(setting: Setting, name: str, seed: int) -> Arm:
    """Return what an arm does; no seed is needed for it."""
    return Arm(
        plan=Even(1.0 if name.endswith("fresh") else USES),
        loads=setting.loads,
        strategy=DDP(),
        micro_batches=MICRO_BATCHES if name.startswith("four") else 1,
    )


def references(name: str) -> dict[str, str]:
    """Return what an arm is compared with: the echo of single micro-batches, and what echoes within an update were."""
    return {"`one`": "one", "`one fresh`": "one fresh"}


EXPERIMENT = Experiment(
    settings=SETTINGS, arm=arm, reference="one fresh", references=references, results="groups.json"
)

if __name__ == "__main__":
    perform(EXPERIMENT, arguments(EXPERIMENT, __doc__).parse_args())
