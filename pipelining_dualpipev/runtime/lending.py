"""Tensors lent to gloo's threads, which have to give them back before the interpreter ends.

A collective over gloo is done by a thread of gloo's, which first says that it is done and then lets go of the tensors.
Those are Python's too, so it takes the interpreter's lock for that, and a thread that asks for the lock of an
interpreter that is ending is unwound in the middle of C++, which aborts the process::

    rank           wait() .... goes on, last line, exit  │ end of the interpreter
    gloo's thread  works ── done! (loses the processor)  │ lets go ──> terminate called without an active exception

All was well, yet the process has failed, and torchrun ends the other ranks for it. To destroy the process group does
not help: what ends its threads is the end of the last object that knows the group, and a schedule does.

So a collective gets aliases of its tensors that nobody else holds. As long as one is alive it is on loan, and at exit
we wait for those that still are.
"""

from __future__ import annotations

import atexit
import time
import weakref

import torch

__all__ = ["lend", "wait_until_returned"]

_on_loan: set[weakref.ref[torch.Tensor]] = set()


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """An alias to hand to a collective and to keep no hold of; nor of the collective's ``Work`` once that is done."""
    alias = tensor.detach()
    _on_loan.add(weakref.ref(alias, _on_loan.discard))
    return alias


@atexit.register
def wait_until_returned(patience: float = 2.0) -> bool:
    """Wait until all that was lent has been returned.

    Args:
        patience: seconds after which to give up: what gloo waits for from a rank that has ended never comes.

    Returns:
        Whether all has been returned.
    """
    deadline = time.monotonic() + patience
    while _on_loan and time.monotonic() < deadline:
        time.sleep(0.001)
    return not _on_loan
