"""Recipes at a size at which thousands of jobs can be run.

Large enough that every rank's share of a bucket fills more than one row of sums (32 KiB), so that damage beyond
mending can be drawn; a job of three ranks takes about a tenth of a second.
"""

import dataclasses

from stretto.recipes import DigitsResNet, StdlibGPT, TaskConfig


def small(task: TaskConfig) -> TaskConfig:
    """Return `task` at the size that a campaign trains it at; a recipe that is not known here stays as it is."""
    match task:
        case StdlibGPT():
            # A hundred kilobytes of text are read and ordered at once.
            data = dataclasses.replace(task.data, megabytes=0.1)
            task = dataclasses.replace(task, layers=1, width=64, heads=1, context=8, batch=1)
            return dataclasses.replace(task, data=data, evaluation_windows=4)
        case DigitsResNet():
            return dataclasses.replace(task, batch=2)
        case _:
            return task
