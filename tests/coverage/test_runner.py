"""The runner's own logic: a type that is wrong, hangs or crashes is told as that, and the page says so."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
from torch import nn

from pipelining_dualpipev.models.stage import StageModule
from tests.coverage import __main__ as runner
from tests.coverage.compare import Result, _perceives, check
from tests.coverage.page import exact_on_page, write_page
from tests.coverage.tasks import TASKS
from tests.coverage.workers import check_all


def pretend(task: str, model_type: str) -> Result:
    if model_type == "hangs":
        time.sleep(600)
    if model_type == "crashes":
        os._exit(3)
    return Result(task, model_type, "exact", boundaries=(1, 2, 1))


def test_a_type_that_matches_is_exact():
    result = check("causal-lm", "llama")
    assert (result.verdict, result.reason, result.boundaries) == ("exact", "", (1, 1, 1))
    assert result.error < 1e-9
    assert 0.8 < result.deferred < 1


def test_a_type_that_is_made_wrong_on_purpose_fails(monkeypatch, capsys):
    outgoing = StageModule._outgoing

    def detached(self: StageModule, root, run):
        value = outgoing(self, root, run)
        return value.detach() if self._stage == 1 else value

    monkeypatch.setattr(StageModule, "_outgoing", detached)
    monkeypatch.setattr(runner, "check_all", lambda pairs, check, **_: (check(*pair) for pair in pairs))
    assert runner.main(["--tasks", "causal-lm", "--types", "llama"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_type_that_cannot_be_built_is_told_with_the_reason(monkeypatch):
    monkeypatch.setattr("tests.coverage.compare._LARGEST", 10)
    result = check("causal-lm", "llama")
    assert result.verdict == "not built"
    assert "are not tiny; the largest is model" in result.reason


def test_a_type_that_is_told_what_it_would_decide_by_is_marked(tmp_path):
    result = check("causal-lm", "blt")
    assert (result.verdict, result.told) == ("exact", ("patch_lengths",)), result.reason
    write_page(tmp_path / "coverage.md", [result])
    assert "| told `patch_lengths` |" in (tmp_path / "coverage.md").read_text()


def test_a_batch_whose_image_the_model_leaves_out_is_not_taken():
    """MiniCPM-V 4.7 goes on with the words alone if its config has no token for an image."""

    class Looking(nn.Module):
        input_modalities = ("image", "text")

        def __init__(self, sees: bool) -> None:
            super().__init__()
            self.sees = sees

        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": input_ids + pixel_values.sum() if self.sees else input_ids * 1.0}

    batch = {"input_ids": torch.arange(4), "pixel_values": torch.zeros(1, 3, 4, 4)}
    for sees in (True, False):
        model = Looking(sees)
        assert _perceives(TASKS["image-text-to-text"], model, batch, model(**batch)) == sees


@pytest.mark.slow
def test_a_type_that_hangs_or_crashes_costs_no_other_type_its_answer():
    types = [("ctc", name) for name in ("fine", "hangs", "crashes", "fine too")]
    found = {r.model_type: r for r in check_all(types, check=pretend, jobs=1, timeout=1.0)}
    assert found["fine"].verdict == found["fine too"].verdict == "exact"
    assert found["hangs"].reason == "took longer than 1 seconds"
    assert found["crashes"].reason == "the process ended with 3"


def test_the_page_counts_and_lists_every_type_and_keeps_what_was_not_run(tmp_path):
    page = tmp_path / "coverage.md"
    off = Result("ctc", "c", "WRONG", "off", (1, 1, 1), 0.25, "float64", own_loss=False)
    write_page(page, [off, Result("causal-lm", "old", "exact")], datetime.date(2026, 1, 1))
    refused = Result("causal-lm", "b", "refused", "a_reason | of `sorts`")
    exact = Result("causal-lm", "a", "exact", boundaries=(1, 2, 1), deferred=0.5, dtype="float32")
    write_page(page, [refused, exact], datetime.date(2026, 1, 2))
    told = page.read_text()
    assert "Made on 2026-01-02 with torch" in told
    assert "| Causal language models | 2 | 1 | 0 | 1 | 0 | 0 |" in told
    assert "| Speech with CTC | 1 | 0 | 1 | 0 | 0 | 0 |" in told
    assert told.index("| a | exact | 1, 2, 1 | 50% | fp32 |") < told.index("| b | **refused**")
    assert "a\\_reason \\| of \\`sorts\\`" in told
    assert "| c | **WRONG** | 1, 1, 1 | 25% | outputs; off |" in told
    assert exact_on_page(page) == {("causal-lm", "a")}
