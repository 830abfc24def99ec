"""The mappings of transformers that are covered, and what inputs and losses their models have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from pipelining_dualpipev._torch import pytree

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """One of transformers' mappings from model types to classes.

    Attributes:
        title: for people.
        mapping: its name.
        inputs: what its models take, of ``"text"``, ``"image"``, ``"audio"`` (frames of features) and ``"wave"``.
        labels: ``"tokens"`` (one a position), ``"row"`` (one a row) or ``"sequence"`` (shorter than the input).
        needs_senses: whether text alone is not enough.
    """

    title: str
    mapping: str
    inputs: tuple[str, ...]
    labels: str
    needs_senses: bool = False

    @property
    def classes(self) -> Mapping[str, Any]:
        """The class, or a tuple of classes, by model type."""
        return getattr(modeling_auto, f"MODEL_FOR_{self.mapping}_MAPPING_NAMES")

    def class_of(self, model_type: str) -> str:
        """The class's name."""
        found = self.classes[model_type]
        return found if isinstance(found, str) else found[0]

    def loss_of(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The model's own loss, or what is made of its outputs if it has none."""
        loss = output.get("loss") if isinstance(output, dict) else None
        return loss if loss is not None and "labels" in batch else self.loss_of_outputs(output, None)

    @staticmethod
    def loss_of_outputs(output: Any, target: None) -> torch.Tensor:
        """A number that depends on every element of what a model has computed, each with a weight of its own."""
        parts = []
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
                finite = torch.where(torch.isfinite(leaf), leaf, torch.zeros_like(leaf))
                parts.append((finite * weights).mean() + 0.1 * (finite**2).mean())
        return torch.stack([part.double() for part in parts]).sum()


TASKS = {
    "causal-lm": Task("Causal language models", "CAUSAL_LM", ("text",), "tokens"),
    "masked-lm": Task("Masked language models", "MASKED_LM", ("text",), "tokens"),
    "seq2seq": Task("Sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM", ("text", "audio", "wave"), "tokens"),
    "sequence-classification": Task("Sequence classification", "SEQUENCE_CLASSIFICATION", ("text",), "row"),
    "token-classification": Task("Token classification", "TOKEN_CLASSIFICATION", ("text",), "tokens"),
    "image-classification": Task("Image classification", "IMAGE_CLASSIFICATION", ("image",), "row"),
    "image-text-to-text": Task("Images and text to text", "IMAGE_TEXT_TO_TEXT", ("image", "text"), "tokens", True),
    "speech-seq2seq": Task("Speech to text", "SPEECH_SEQ_2_SEQ", ("audio", "wave", "text"), "sequence", True),
    "ctc": Task("Speech with CTC", "CTC", ("wave", "audio"), "sequence", True),
}
