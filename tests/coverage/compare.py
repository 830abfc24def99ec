"""One model type: built tiny, split in four stages, and compared with itself."""

from __future__ import annotations

import copy
import gc
import inspect
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.verify import Chain, Verification, compare
from pipelining_dualpipev.runtime.weight_grad import AtOperations
from tests.coverage.batches import TOLD, batches_for
from tests.coverage.configs import tiny_config
from tests.coverage.tasks import TASKS, Task

__all__ = ["FAILING", "NUM_RANKS", "Result", "build", "check"]

NUM_RANKS = 2
FAILING = ("WRONG", "no answer")
_LARGEST = 12_000_000  # parameters; what is larger has a size that was not shrunk


@dataclass(frozen=True)
class Result:
    """What came of one type.

    Attributes:
        task: the mapping of transformers that it is in, by its name in `tests.coverage.tasks`.
        model_type: its name in that mapping.
        verdict: ``"exact"``, ``"WRONG"``, ``"refused"``, ``"not built"`` or ``"no answer"``.
        reason: why it is not exact.
        boundaries: how many tensors cross each boundary.
        deferred: the share of parameters whose weight gradients can be put off.
        dtype: what it was computed in.
        error: the largest of the errors of loss and gradients.
        own_loss: whether the model's own loss was compared, or one made of its outputs.
        told: what was given to it that it would otherwise find out by layers of its own, and decide by.
        seconds: that it took.
    """

    task: str
    model_type: str
    verdict: str
    reason: str = ""
    boundaries: tuple[int, ...] = ()
    deferred: float = 0.0
    dtype: str = ""
    error: float = 0.0
    own_loss: bool = True
    told: tuple[str, ...] = ()
    seconds: float = 0.0


def check(task: str, model_type: str) -> Result:
    """Build, split and compare one type. It raises nothing."""
    began = time.perf_counter()
    result = Result(task, model_type, "not built")
    try:
        model, batch, dtype = _that_runs(task, model_type)
        told = tuple(name for name in TOLD if name in batch)
        result = replace(result, verdict="refused", dtype=str(dtype).removeprefix("torch."), told=told)
        result = _compare(result, model, batch)
    except Exception as error:
        result = replace(result, reason=_told(error))
    gc.collect()
    return replace(result, seconds=time.perf_counter() - began)


def build(task: str, model_type: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The tiny model, the same one each time, in training mode and without dropout."""
    config = tiny_config(model_type)
    model_class = getattr(transformers, TASKS[task].class_of(model_type))
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        config = next((inner for inner in vars(config).values() if isinstance(inner, wanted)), config)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = task == "causal-lm"
    with torch.device("meta"):
        sizes = {
            name: p.numel()
            for name, p in model_class._from_config(
                copy.deepcopy(config), experts_implementation="eager"
            ).named_parameters()
        }
    if sum(sizes.values()) > _LARGEST:
        name = max(sizes, key=sizes.__getitem__)
        raise ValueError(f"{sum(sizes.values()):,} parameters are not tiny; the largest is {name}")
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a gate, say: what is behind it would have no gradient to compare
                parameter.normal_(std=0.02)
    return model.to(dtype).train()


def _that_runs(task: str, model_type: str) -> tuple[nn.Module, dict[str, Any], torch.dtype]:
    """The model and the first batch that it runs itself, in double precision or else in single."""
    first: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        model = build(task, model_type, dtype)
        for batch in batches_for(TASKS[task], model, dtype):
            try:
                output = model(**batch)
                loss = TASKS[task].loss_of(output, batch)
                loss.backward()
                if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                    raise ValueError("the model's own gradients are not finite")
                if not _perceives(TASKS[task], model, batch, output):
                    raise ValueError("no image or sound has a part in the loss")
                if not any(p.grad.any() for p in model.parameters() if p.grad is not None):
                    raise ValueError("the model's own gradients are all zero")
            except Exception as error:
                first = first or error
                continue
            finally:
                model.zero_grad(set_to_none=True)
            # What a model has counted or cached in this run is not to be there in the next.
            return build(task, model_type, dtype), batch, dtype
    raise first or ValueError("no form of images or sounds that is tried here is one that it takes")


def _perceives(task: Task, model: nn.Module, batch: dict[str, Any], output: Any) -> bool:
    """Whether it says something else of other images or sounds: a model may go on without those that are out of place.

    Of a model that takes none, it is true.
    """
    if not task.needs_senses or model.input_modalities == "text":
        return True
    if not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in batch.values()):
        return True  # sound as the codes of a codec is words
    others = {
        name: value + torch.rand_like(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    with torch.no_grad():
        return not torch.equal(_logits(model(**others)), _logits(output))


def _logits(output: Any) -> torch.Tensor:
    return output["logits"] if isinstance(output, dict) else output[1]


def _compare(result: Result, model: nn.Module, batch: dict[str, Any]) -> Result:
    loss_fn = None if "labels" in batch else TASKS[result.task].loss_of_outputs
    try:
        chain = Chain(model, NUM_RANKS, batch)
    except SplitError as error:
        if "a loss_fn of your own" not in str(error):
            raise
        batch = _without_labels(model, batch)
        chain, loss_fn = Chain(model, NUM_RANKS, batch), TASKS[result.task].loss_of_outputs
    found = compare(chain, model, batch, loss_fn)
    return replace(
        result,
        verdict="exact" if found.matches else "WRONG",
        reason="" if found.matches else _difference(found),
        boundaries=tuple(map(len, chain.plan.boundaries)),
        deferred=_deferred_share(chain, batch),
        error=max(found.loss_error, found.worst[1]),
        own_loss=loss_fn is None,
    )


def _without_labels(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, with what a decoder would have made of the labels."""
    batch = dict(batch)
    labels = batch.pop("labels")
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        batch.setdefault("decoder_input_ids", labels.clamp(min=0))
    return batch


def _difference(found: Verification) -> str:
    name, error = found.worst
    wrong = sum(error > found.tolerance for error in found.errors.values())
    return f"loss off by {found.loss_error:.0e}; {wrong} gradients off, {name} by {error:.0e}"


def _deferred_share(chain: Chain, batch: dict[str, Any]) -> float:
    """Of the parameters, those whose weight gradients a schedule would put off to W."""
    weights = {index: AtOperations(stage) for index, stage in chain.stages.items()}
    output, received, sent = chain.forward(batch, around=lambda stage: weights[stage].deferring())
    ends = [
        tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    gradients: list[torch.Tensor | None] = [torch.ones_like(tensor) for tensor in ends]
    for stage in reversed(range(len(weights))):
        roots = [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if gradient is not None]
        with weights[stage].collecting():
            torch.autograd.backward([end for end, _ in roots], [gradient for _, gradient in roots])
        weights[stage].take()
        if stage:
            ends, gradients = sent[stage - 1], [tensor.grad for tensor in received[stage]]
    counts = [of_stage.counts() for of_stage in weights.values()]
    return sum(deferred for deferred, _ in counts) / max(sum(of for _, of in counts), 1)


def _told(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SplitError):
        words = words.removeprefix("SplitError: ")
    elif isinstance(error, (AssertionError, KeyError)):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words += f" ({frame.name})"
    return words if len(words) <= 240 else words[:237] + "..."
