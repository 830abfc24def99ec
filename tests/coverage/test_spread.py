"""A spread of model types over all tasks stays exact; ``python -m tests.coverage`` tries all there are."""

from __future__ import annotations

import pytest

from tests.coverage.compare import check
from tests.coverage.workers import check_all

SPREAD = {
    "causal-lm": "llama gemma2 gpt2 bloom mixtral deepseek_v3 gpt_oss mamba2 gemma3n_text zamba2 qwen3_next jetmoe",
    "masked-lm": "bert albert modernbert deberta-v2 roc_bert mobilebert",
    "seq2seq": "bart pegasus mt5 m2m_100",
    "sequence-classification": "bert gpt2 qwen3",
    "token-classification": "roberta llama",
    "image-classification": "vit dinov2 swin swinv2 convnext resnet",
    "image-text-to-text": "qwen3_vl lfm3_vl exaone4_5",
    "speech-seq2seq": "whisper speech_to_text",
    "ctc": "wav2vec2 hubert",
}


@pytest.mark.slow
def test_forty_types_are_the_models_that_are_not_split():
    types = [(task, model_type) for task, names in SPREAD.items() for model_type in names.split()]
    assert len(types) == 40
    results = list(check_all(types, check=check, jobs=2, timeout=100))
    assert len(results) == 40
    assert not [result for result in results if result.verdict != "exact"]


@pytest.mark.slow
def test_a_reversible_stack_is_refused_and_not_wrong():
    result = check("causal-lm", "reformer")
    assert result.verdict == "refused"
    assert "_ReversibleFunction" in result.reason
