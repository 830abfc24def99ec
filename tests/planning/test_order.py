"""The order itself: as a picture one can read, and against torch's own list."""

from __future__ import annotations

import re

import pytest

from pipelining_dualpipev.planning import Action, Kind, Placement, dualpipev_order
from tests.planning.torch_oracle import torch_order


def picture(num_ranks: int, n: int) -> str:
    """Each rank's list with stage r written 0 and stage 2P-1-r written 1, pairs as F&B."""

    def short(single: Action, rank: int) -> str:
        return f"{single.kind.value}{int(single.stage != rank)}.{single.microbatch}"

    order = dualpipev_order(num_ranks, n)
    return "\n".join(" ".join("&".join(short(s, r) for s in a.singles) for a in order[r]) for r in range(num_ranks))


def test_the_order_of_two_ranks_and_four_microbatches_reads_like_the_reference_steps():
    steps = """
      F0.0 F0.1 | F0.2 F1.0 | I1.0 W1.0 F1.1 | F0.3&B1.1 F1.2&B0.0 | B1.2 F1.3&B0.1 | B1.3 I0.2 | W0.2 I0.3 | W0.3
      | F0.0 F1.0 F0.1 F1.1 | | F0.2 B1.0 F1.2&B0.0 F0.3&B1.1 F1.3&B0.1 | | B1.2 B0.2 I1.3 I0.3 | | W1.3 W0.3
    """
    assert picture(2, 4).splitlines() == [
        " ".join(line.replace("|", " ").split()) for line in steps.strip().splitlines()
    ]


def test_the_reference_order_of_four_ranks_and_ten_microbatches():
    """The eight steps of each rank, a bar between them; a pair is written F&B."""
    steps = """
      rank 0: F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 | F0.6 F1.0 | I1.0 W1.0 F1.1 I1.1 W1.1 F1.2 I1.2 W1.2 F1.3
              | F0.7&B1.3 F1.4&B0.0 F0.8&B1.4 F1.5&B0.1 F0.9&B1.5 F1.6&B0.2
              | B1.6 F1.7&B0.3 B1.7 F1.8&B0.4 B1.8 F1.9&B0.5 | B1.9 I0.6
              | W0.6 I0.7 W0.7 I0.8 W0.8 I0.9 | W0.9
      rank 1: F0.0 F0.1 F0.2 F0.3 | F0.4 F1.0 F0.5 F1.1 | I1.0 W1.0 F1.2 I1.1 W1.1 F1.3
              | F0.6&B1.2 F1.4&B0.0 F0.7&B1.3 F1.5&B0.1 F0.8&B1.4 F1.6&B0.2 F0.9&B1.5 F1.7&B0.3
              | B1.6 F1.8&B0.4 B1.7 F1.9&B0.5 | B1.8 B0.6 I1.9 I0.7
              | W1.9 I0.8 W0.7 I0.9 | W0.8 W0.9
      rank 2: F0.0 F0.1 | F0.2 F1.0 F0.3 F1.1 F0.4 F1.2 | I1.0 W1.0 F1.3
              | F0.5&B1.1 F1.4&B0.0 F0.6&B1.2 F1.5&B0.1 F0.7&B1.3 F1.6&B0.2 F0.8&B1.4 F1.7&B0.3 F0.9&B1.5 F1.8&B0.4
              | B1.6 F1.9&B0.5 | B1.7 B0.6 B1.8 I0.7 I1.9 I0.8
              | W0.7 I0.9 | W1.9 W0.8 W0.9
      rank 3: | F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 F1.3 |
              | F0.4 B1.0 F1.4&B0.0 F0.5&B1.1 F1.5&B0.1 F0.6&B1.2 F1.6&B0.2 F0.7&B1.3 F1.7&B0.3
                F0.8&B1.4 F1.8&B0.4 F0.9&B1.5 F1.9&B0.5
              | | B1.6 B0.6 B1.7 B0.7 I1.8 I0.8 I1.9 I0.9
              | | W1.8 W0.8 W1.9 W0.9
    """
    ranks = [" ".join(text.replace("|", " ").split()) for text in re.split(r"rank \d:", steps)[1:]]
    assert picture(4, 10).splitlines() == ranks


def test_one_microbatch_goes_down_and_up_once():
    assert picture(3, 1).splitlines() == ["F0.0 F1.0 I1.0 W1.0 I0.0 W0.0"] * 2 + ["F0.0 F1.0 I1.0 I0.0 W1.0 W0.0"]


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_for_two_microbatches_a_stage_and_more_the_order_is_torchs(num_ranks: int):
    for n in range(2 * num_ranks, 65):
        ours = {rank: [str(action) for action in actions] for rank, actions in dualpipev_order(num_ranks, n).items()}
        assert ours == torch_order(num_ranks, n), n


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_forward_only_is_the_order_without_its_backwards(num_ranks: int):
    for n in (1, 2, num_ranks, 2 * num_ranks + 1):
        forwards = dualpipev_order(num_ranks, n, forward_only=True)
        for rank, actions in dualpipev_order(num_ranks, n).items():
            expected = [single for action in actions for single in action.singles if single.kind is Kind.FORWARD]
            assert forwards[rank] == expected


@pytest.mark.parametrize(
    "text", ["0F3", "7I0", "12W10", "3B2", "0SEND_F7", "1RECV_B0", "(0F7;0SEND_F7;7B3)OVERLAP_F_B"]
)
def test_actions_are_written_and_read_as_torch_does(text: str):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X1", "0F3;", "(0F7;7B3)"])
def test_what_is_no_action_is_refused(text: str):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(("num_ranks", "n"), [(0, 1), (-1, 4), (2, 0), (2, -3)])
def test_fewer_than_one_rank_or_microbatch_is_refused(num_ranks: int, n: int):
    with pytest.raises(ValueError, match="at least 1"):
        dualpipev_order(num_ranks, n)


def test_a_v_runs_down_the_ranks_and_back_up():
    placement = Placement.v(3)
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [placement.crosses(stage) for stage in range(-1, 6)] == [False, True, True, False, True, True, False]
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        Placement.of([0, 2])
