"""torch's own DualPipeV list, without a process group: the one place in these tests that reaches into torch."""

from __future__ import annotations

from torch.distributed.pipelining import ScheduleDualPipeV


def torch_order(num_ranks: int, n_microbatches: int) -> dict[int, list[str]]:
    """Every rank's actions as torch writes them; torch needs ``n_microbatches >= 2 * num_ranks``."""
    generator = object.__new__(ScheduleDualPipeV)
    generator._n_microbatches = n_microbatches
    generator.pp_group_size = num_ranks
    return {
        rank: [str(action) for action in generator._calculate_single_rank_operations(rank)] for rank in range(num_ranks)
    }
