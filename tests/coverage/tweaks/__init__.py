"""What shrinking cannot guess of a model type: sizes that have to go together, patterns of layers, names of its own.

``...`` leaves a field at its default. What is said of a config within another is laid over the tiny one of its class.
"""

from __future__ import annotations

from typing import Any

from tests.coverage.tweaks.images import IMAGES
from tests.coverage.tweaks.images_and_words import IMAGES_AND_WORDS
from tests.coverage.tweaks.sounds import SOUNDS
from tests.coverage.tweaks.words import WORDS

__all__ = ["TWEAKS"]

TWEAKS: dict[str, dict[str, Any]] = {**WORDS, **IMAGES, **SOUNDS, **IMAGES_AND_WORDS}
