"""Random inputs for a tiny model: what its forward takes, with padding where it can do with some.

What a model takes cannot be told from its type, so there are several batches to try, and the first that the model runs
is taken. Those that ask more of the splitter, with padding and images, come first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.coverage.configs import VOCABULARY
from tests.coverage.senses import ROWS, codebooks, image_forms, places_taken, sound_forms, wave_forms
from tests.coverage.tasks import Task

__all__ = ["TOLD", "batches_for"]

TOLD = ("patch_lengths",)
"""What a model finds out by layers of its own, and decides by, unless it is told."""

LENGTH = 12
IGNORED = -100
_FIRST_WORD = 3  # after pad, begin and end
_END = 2
_LAST_WORD = VOCABULARY - 20  # before images and the like
# what stands before the places of an image, and after
_BEGINS = ("vision_start_token_id", "image_start_token_id", "image_start_id")
_ENDS = ("vision_end_token_id", "image_end_token_id", "image_end_id")
_FORMS = {"image": image_forms, "audio": sound_forms, "wave": wave_forms}
Batch = dict[str, Any]


def batches_for(task: Task, model: nn.Module, dtype: torch.dtype) -> Iterator[Batch]:
    """Batches to try, the most demanding one first."""
    generator = torch.Generator().manual_seed(1)
    takes, passed_on = set(inspect.signature(model.forward).parameters), ("input_ids", *TOLD)
    for whole in _inputs(task, model, takes, dtype, generator):
        batch = {name: value for name, value in whole.items() if name in takes or name in passed_on}
        yield batch
        without_mask = {name: value for name, value in batch.items() if name != "attention_mask"}
        if len(without_mask) < len(batch):
            yield {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
            yield without_mask


def _inputs(
    task: Task, model: nn.Module, takes: set[str], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Batch]:
    takes_senses = False
    for sense in (sense for sense in task.inputs if sense != "text"):
        for form in _FORMS[sense](model, dtype, generator):
            if next(iter(form)) not in takes:
                continue
            takes_senses = True
            if "text" in task.inputs and "input_ids" in takes:
                yield from _among_words(task, model, sense, form, generator)
            elif task.labels == "row":
                yield {**form, "labels": torch.arange(ROWS) % 2}
            else:
                labels = torch.randint(_FIRST_WORD, 30, (ROWS, 5), generator=generator)
                yield {**form, "labels": labels}
                yield {**form, "decoder_input_ids": labels, "labels": labels}
    if "shared_kv_states" in takes:
        yield _draft(model, dtype, generator)
    if ("text" in task.inputs and not task.needs_senses) or not takes_senses:
        yield from _text(task, model, generator)
        if "image" not in task.inputs and "pixel_values" in takes:  # what reads no words without one
            for form in image_forms(model, dtype, generator):
                yield from _among_words(task, model, "image", form, generator)
    if books := codebooks(model.config):
        yield from _codes(books, generator)


def _text(task: Task, model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
    ids = torch.randint(_FIRST_WORD, _LAST_WORD, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    ids = ids * mask
    if task.labels == "row":
        ids[0, -1] = ids[1, -4] = _END  # some classify by it
        labels = torch.arange(ROWS) % 2
    else:
        of_two = task.mapping == "TOKEN_CLASSIFICATION"
        labels = torch.randint(0, 2, ids.shape, generator=generator) if of_two else ids.clone()
        labels[0, :5] = IGNORED
        labels[mask == 0] = IGNORED
    told = {"patch_lengths": _patches(ids, generator)} if hasattr(model.config, "patch_in_forward") else {}
    yield {"input_ids": ids, "attention_mask": mask, "labels": labels, **_boxes(ids), **told}


def _draft(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    """What a model that drafts for a larger one takes of that: a state of the last word, and keys and values of all."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    config = model.config.get_text_config()
    layers = {kind: config.per_layer_config[index] for index, kind in enumerate(config.layer_types)}
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return {
        "inputs_embeds": noise(ROWS, 1, 2 * model.config.backbone_hidden_size),
        "attention_mask": mask,
        "shared_kv_states": {
            kind: tuple(noise(ROWS, layer.num_key_value_heads, LENGTH, layer.head_dim) for _ in range(2))
            for kind, layer in layers.items()
        },
    }


def _codes(books: int, generator: torch.Generator) -> Iterator[Batch]:
    """Sound as a codec has it: several codes at a time, beside the word there, as all there is, or as the answer."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(_FIRST_WORD, 30, shape, generator=generator)

    words, mask = codes(ROWS, LENGTH), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    answer = codes(ROWS * books, LENGTH)
    of_words = {"attention_mask": mask, "labels": words.masked_fill(mask == 0, IGNORED)}
    yield {"input_ids": torch.cat([words[..., None], codes(ROWS, LENGTH, books)], dim=-1), **of_words}
    turned = answer.reshape(ROWS, books, LENGTH).transpose(1, 2).contiguous()
    yield {"input_ids": answer, "attention_mask": mask, "labels": turned.masked_fill(mask[..., None] == 0, IGNORED)}
    yield {"input_ids": words, "attention_mask": mask, "decoder_input_ids": turned, "labels": answer}


def _patches(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Lengths of the patches that each row's bytes, and the next one, are taken together in; 0 behind the last."""
    begins = torch.rand(ids.shape[0], ids.shape[1] + 1, generator=generator) < 0.5
    begins[:, 0] = True
    patches = begins.cumsum(1)
    return torch.stack([patches.eq(number + 1).sum(1) for number in range(int(patches.max()))], dim=1)


def _boxes(ids: torch.Tensor) -> Batch:
    """Where on a page each word is, for models of documents."""
    corner = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
    return {"bbox": torch.stack([corner, corner, corner + 2, corner + 3], dim=-1)}


def _among_words(task: Task, model: nn.Module, sense: str, form: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """Rows of words with one image or sound each, where the model wants its places."""
    try:
        places = places_taken(model, form, "audio" if sense == "wave" else sense)
    except Exception:  # it takes another form
        return
    token = _token_of(model.config, sense)
    alongside = sense != "image" and token is None  # the sound of each word is added to it
    length = places if places and alongside else LENGTH + (places or 0)
    ids = torch.randint(_FIRST_WORD, _LAST_WORD, (ROWS, length), generator=generator)
    where = torch.zeros_like(ids, dtype=torch.bool)
    if token is not None:
        ids[ids == token] += 1  # no place but those
    if places:
        where[:, 2 : 2 + places] = True
        ids[where] = ids[where] if token is None else token
        for name, at in [(name, 1) for name in _BEGINS] + [(name, 2 + places) for name in _ENDS]:
            if isinstance(found := getattr(model.config, name, None), int):
                ids[:, at] = found
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    ids = ids * mask
    labels = torch.where((mask == 0) | (ids >= _LAST_WORD), IGNORED, ids)
    labels[0, :2] = IGNORED
    kinds = where.long()
    batch = {**form, "input_ids": ids, "attention_mask": mask, "labels": labels, **_boxes(ids)}
    yield {
        **batch,
        "mm_token_type_ids": kinds,
        "token_type_ids": kinds,
        "images_seq_mask": where,
        "moe_mm_token_type_ids": kinds,
        "image_embeds_position_mask": where,
        "image_attention_mask": mask[..., None],
        "cross_attention_mask": mask[..., None, None].repeat(1, 1, 1, 4),
    }
    if places and "input_features_mask" in batch:  # to some it is a mask of the places
        yield {**batch, "input_features_mask": torch.ones(ROWS, places, dtype=torch.bool)}
    if task.labels == "sequence":
        yield {**form, "labels": torch.randint(_FIRST_WORD, _LAST_WORD, (ROWS, 7), generator=generator)}
        yield {**form, "decoder_input_ids": ids[:, :7], "labels": ids[:, :7]}


def _token_of(config: Any, sense: str) -> int | None:
    kinds = ("image", "video") if sense == "image" else ("audio",)
    names = [f"{kind}_token_{ending}" for kind in kinds for ending in ("id", "index")]
    return next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)
