"""A rank's part of a split model: its two stages, under the names that everything has in the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev.models.loss import LossFunction

if TYPE_CHECKING:
    from pipelining_dualpipev.models.plan import SplitPlan
    from pipelining_dualpipev.models.stack import StackPlan

__all__ = ["SplitModel"]


class SplitModel:
    """This rank's two stages of a model, under the model's own names.

    Attributes:
        stages: two torch `PipelineStage`, for a schedule.
        modules: for each stage by index what runs it, before any wrapper.
        models: for each stage by index the module that has the model's own names.
        loss_fn: the model's own loss, for the schedule (None if the example had no labels, and for plain layers).
        plan: what runs where.
        config: the model's, if it has one.
    """

    def __init__(
        self,
        modules: Mapping[int, Any],
        plan: SplitPlan | StackPlan,
        skeleton: nn.Module | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
        loss_fn: LossFunction | None,
    ) -> None:
        self._group, self._skeleton = group, skeleton
        self.modules: dict[int, Any] = dict(modules)
        self.models: dict[int, nn.Module] = {stage: module.model for stage, module in modules.items()}
        self.plan, self.loss_fn, self.config = plan, loss_fn, getattr(skeleton, "config", None)
        self.stages = [
            PipelineStage(module, stage, plan.num_stages, device, group=group) for stage, module in modules.items()
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the model's own names; one that both stages share comes once, by its first name.

        What was put into a layer after the split has the name that it would have in the model.
        """
        seen: set[nn.Parameter] = set()
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield self.plan.names.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> SplitModel:
        """Put all modules in training mode, or in evaluation mode if ``mode`` is False."""
        for module in self.modules.values():
            module.train(mode)
        return self

    def eval(self) -> SplitModel:
        """Put all modules in evaluation mode."""
        return self.train(False)

    def explain(self) -> str:
        """The plan in words."""
        return self.plan.explain()

    def save_pretrained(
        self, directory: str | PathLike[str], tokenizer: Any = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write a checkpoint that ``from_pretrained`` of plain transformers opens. Collective.

        Every rank writes its own weights as safetensors shards; rank 0 adds the index, the config, the generation
        config and the tokenizer if one is given. All of it is written beside ``directory`` and then moved there, so
        that what is found there is always whole. The file system must be one that all ranks share.

        Args:
            directory: created; what was there before is replaced.
            tokenizer: anything with a ``save_pretrained``.
            max_shard_size: bytes, or text like ``"5GB"``.

        Raises:
            OSError: on every rank, if one could not write.
            ValueError: if the model is none of transformers, which has no other format.
        """
        if not hasattr(self._skeleton, "save_pretrained"):
            raise ValueError(
                "save_pretrained writes what transformers opens, and this model is none of transformers: keep it by "
                "models.save_checkpoint(directory, model), which load_checkpoint also reads into the unsplit model"
            )
        from pipelining_dualpipev.models.save import save_pretrained  # with transformers, which others do without

        save_pretrained(
            self, self._skeleton, directory, group=self._group, tokenizer=tokenizer, max_shard_size=max_shard_size
        )

    def own_tensors(self, stage: int) -> dict[str, torch.Tensor]:
        """The parameters and persistent buffers that one of the stages has to save, by the model's own names.

        What several stages have is saved by one of them, and a tied parameter by its first name.
        """
        state = self.models[stage].state_dict()
        return {name: tensor for name, tensor in state.items() if self.plan.saves(name, stage)}
