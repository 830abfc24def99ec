"""Which modules of a model run whole on one stage.

::

    LlamaForCausalLM          glue: its forward runs on every stage
      model                   glue
        embed_tokens          unit
        layers                a stack
          0, 1, 2, ...        units, and layers: what is dealt out to the stages
        norm                  unit
        rotary_emb            no parameters: glue
      lm_head                 unit

A *stack* is a list of modules that hold parameters, the outermost such list on each path. Its members are the *layers*.
Everything else that holds parameters and contains no stack is a *unit* too; what is above units is *glue*.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Units", "find_units"]

# A list of these is no stack of layers, but several embeddings or heads.
_TOO_SMALL = (nn.Embedding, nn.Linear, nn.LayerNorm, nn.Dropout)


@dataclass(frozen=True)
class Units:
    """The units of a model by fully qualified name (FQN), in the order of its modules."""

    units: dict[str, nn.Module]
    layers: frozenset[str]

    def unit_of(self, fqn: str) -> str | None:
        """The unit that a parameter or buffer belongs to; None if it is glue's own."""
        while fqn:
            fqn, _, _ = fqn.rpartition(".")
            if fqn in self.units:
                return fqn
        return None

    def is_glue(self, fqn: str) -> bool:
        """Whether the module of that name is neither a unit nor inside one."""
        return fqn not in self.units and self.unit_of(fqn) is None


def find_units(model: nn.Module) -> Units:
    """The units of ``model``; a module with two names is one unit, under the first."""
    stacks: dict[str, nn.ModuleList] = {}

    def find_stacks(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and _is_stack(child):
                stacks[fqn] = child
            else:
                find_stacks(f"{fqn}.", child)

    find_stacks("", model)
    units: dict[str, nn.Module] = {}
    layers: set[str] = set()
    seen: set[nn.Module] = set()

    def collect(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if fqn in stacks:
                for index, layer in enumerate(child.children()):
                    layers.add(f"{fqn}.{index}")
                    add(f"{fqn}.{index}", layer)
            elif any(stack.startswith(f"{fqn}.") for stack in stacks) or isinstance(
                child, nn.ModuleList | nn.ModuleDict
            ):
                collect(f"{fqn}.", child)
            elif _has_parameters(child):
                add(fqn, child)

    def add(fqn: str, module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            units[fqn] = module

    collect("", model)
    return Units(units, frozenset(layers & units.keys()))


def _is_stack(modules: nn.ModuleList) -> bool:
    members = list(modules)
    return (
        bool(members)
        and all(_has_parameters(member) for member in members)
        and not any(isinstance(member, (nn.ModuleList, nn.ModuleDict, *_TOO_SMALL)) for member in members)
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
