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
Everything else that holds parameters and contains no stack is a *unit* too; what is above units is *glue*. So is a
dropout, though it holds none: as glue, every stage would draw numbers of its own for it.

Vision models often have a short outer list, of a few resolutions, and longer lists within its members. If there are
fewer layers than stages, the lists within are the stacks instead, and the members of the outer one become glue::

    SwinModel                          glue
      encoder.layers                   2 of them cannot fill 4 stages
        0                              glue
          blocks                       a stack
            0, 1, ...                  layers
          downsample                   unit
        1                              glue
          ...
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Units", "find_units"]

# A list of these is no stack of layers, but several embeddings or heads.
_TOO_SMALL = (nn.Embedding, nn.Linear, nn.LayerNorm, nn.Dropout)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


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


def find_units(model: nn.Module, num_layers: int = 1) -> Units:
    """The units of ``model``; a module with two names is one unit, under the first.

    Args:
        model: whose units to find.
        num_layers: how many layers are wanted, at the cost of looking for them further down; there may be fewer.
    """
    layers = _layers_within(model, "", nn.ModuleList)
    while len(set(layers.values())) < num_layers:
        deeper = {
            name: inner
            for fqn, layer in layers.items()
            for name, inner in (_layers_within(layer, f"{fqn}.", nn.ModuleList, nn.Sequential) or {fqn: layer}).items()
        }
        if len(set(deeper.values())) <= len(set(layers.values())):
            break
        layers = deeper
    return _collect(model, layers)


def _layers_within(module: nn.Module, prefix: str, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    """The members of the outermost stacks below ``module``, which is ``prefix``, by name."""
    layers: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if isinstance(child, kinds) and _is_stack(child):
            layers |= {f"{fqn}.{index}": layer for index, layer in enumerate(child.children())}
        else:
            layers |= _layers_within(child, f"{fqn}.", *kinds)
    return layers


def _collect(model: nn.Module, layers: dict[str, nn.Module]) -> Units:
    units: dict[str, nn.Module] = {}
    above = {fqn[:end] for fqn in layers for end, character in enumerate(fqn) if character == "."}
    seen: set[nn.Module] = set()

    def collect(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if fqn not in layers and (fqn in above or isinstance(child, nn.ModuleList | nn.ModuleDict)):
                collect(f"{fqn}.", child)
            elif (_has_parameters(child) or _is_dropout(child)) and child not in seen:
                seen.add(child)
                units[fqn] = child

    collect("", model)
    return Units(units, frozenset(layers.keys() & units.keys()))


def _is_stack(modules: nn.Module) -> bool:
    members = list(modules.children())
    return (
        bool(members)
        and all(_has_parameters(member) for member in members)
        and not any(isinstance(member, (nn.ModuleList, nn.ModuleDict, *_TOO_SMALL)) for member in members)
    )


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS) and module.p > 0


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
