"""Models of images and words, and the parts that only they have."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES_AND_WORDS"]

IMAGES_AND_WORDS: dict[str, dict[str, Any]] = {}
