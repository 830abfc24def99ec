"""Costs as files."""

from __future__ import annotations

import pytest
from hypothesis import given

from pipelining_dualpipev.planning import CostModel
from pipelining_dualpipev.testing import cost_models


@given(cost_models(num_stages=4))
def test_costs_survive_the_file(costs):
    assert CostModel.from_json(costs.to_json()) == costs


def test_a_file_may_name_only_some(tmp_path):
    (tmp_path / "costs.json").write_text('{"backward_input": 2.0, "hop": 0.5}')
    assert CostModel.load(tmp_path / "costs.json") == CostModel(backward_input=2.0, hop=0.5)
    CostModel(forward=[1.0, 2.0]).save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == CostModel(forward=[1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "not JSON"),
        ("[1, 2]", "give an object"),
        ('{"forwards": 1}', "have forwards: known are forward, backward_input"),
        ('{"forward": -1}', "forward is -1"),
        ('{"forward": [1, "2"]}', "a list of them"),
        ('{"hop": [1, 2]}', r"hop is \[1, 2\]: give a number of 0 or more$"),
        ('{"forward": NaN}', "forward is nan"),
        ('{"overlap": true}', "overlap is True"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        CostModel.from_json(text)


def test_costs_for_another_number_of_stages_are_refused():
    CostModel(forward=[1.0] * 4, backward_input=2.0).check_stages(4)
    with pytest.raises(ValueError, match="forward has 4 costs, the pipeline 6 stages"):
        CostModel(forward=[1.0] * 4).check_stages(6)
