"""Every exception that this package raises on purpose.

::

    ValueError
      ScheduleError        an order of actions breaks a law (planning.laws names which, where)
      SplitError           a model cannot be cut as asked: too few layers, a value that a stage lacks
      CheckpointError      a file or key of a checkpoint is missing, damaged or does not fit
      RanksDisagreeError   ranks of one pipeline were given arguments that do not fit together
    RuntimeError
      PipelineError        a step failed while it ran, on this rank or on another
        RankLostError      a rank has ended or has not come, so that no further step is possible

An argument that is wrong by itself raises a plain ``ValueError`` (or ``TypeError``), as torch does. Each message
carries the numbers that do not fit and what to do about it.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "PipelineError", "RankLostError", "RanksDisagreeError", "ScheduleError", "SplitError"]


class ScheduleError(ValueError):
    """An order of actions, or a program made from one, breaks a law of pipeline schedules."""


class SplitError(ValueError):
    """A model cannot be split into stages in the way that was asked for."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read: a file or a key of it is missing, damaged, or does not fit the model."""


class RanksDisagreeError(ValueError):
    """The ranks of one pipeline hold arguments that do not fit together; raised on every one of them."""


class PipelineError(RuntimeError):
    """A step failed while it ran; raised on every rank, naming where it began."""


class RankLostError(PipelineError):
    """A rank of the pipeline has ended, or did not come to a step: the others cannot go on without it."""
