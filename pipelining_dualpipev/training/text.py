"""Which text to train on, and which part of it the model must never see while it trains.

A held-out loss says something only about text that was really held out, and it can be compared between runs, between
ranks and between machines only if all of them hold out the same. Drawing lines or windows at random does neither:
neighbouring windows share sentences, and the draw depends on a generator. So whole files are held out, and which ones
depends on nothing but their names and sizes::

    files, sorted by name              a.py  b.py  c.py  d.py  e.py            [1] find_text
    held out, in order of a hash             b.py        d.py                  [2] hold_out, until there is enough
    training                           a.py        c.py        e.py

A file with more than a fifth of all bytes is not taken as a whole. Where the others do not give enough, as when there
is only one file, the *tail* of the largest is held out too, and then of the next.

Files are opened here only to see whether they are text, and torch is not needed: so the launcher can refuse text that
is missing or too short before it starts a process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Piece", "Text", "find_text", "hold_out"]

HELD_OUT_SHARE = 0.05
LARGEST_SHARE = 0.2

# Of the standard library, what is not its own source: tests (some are not even text), and what others installed.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it from byte ``start`` to ``stop``."""

    path: Path
    name: str  # relative to the folder, with forward slashes: the same on every machine
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self) -> bytes:
        """Return the bytes of this piece."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(len(self))


@dataclass(frozen=True)
class Text:
    """Pieces of text, sorted by name."""

    source: str  # in words, for messages
    pieces: tuple[Piece, ...]

    @property
    def total(self) -> int:
        """Bytes in all pieces together."""
        return sum(map(len, self.pieces))


def find_text(data: str | None) -> Text:
    """List the text in ``data``: a file, a folder (every text file below it), or None for Python's standard library.

    Of a folder, hidden files and folders are left out, and files with a zero byte near their start: they are not text.

    Raises:
        ValueError: if there is none.
    """
    if data is None:
        return _standard_library()
    path = Path(data)
    if path.is_file():
        text = Text(data, (Piece(path, path.name, 0, path.stat().st_size),))
    elif path.is_dir():
        text = Text(data, _pieces(path, (file for file in _walk(path) if _is_text(file))))
    else:
        raise ValueError(
            f"--data {data}: there is no such file or folder in {Path.cwd()}: give a text file or a folder"
        )
    if not text.total:
        raise ValueError(f"--data {data}: no text in {len(text.pieces)} files: give a text file, or a folder with some")
    return text


def hold_out(text: Text, least: int = 1) -> tuple[Text, Text]:
    """Part ``text`` into a training part and a held-out part of a twentieth of it, but of at least ``least`` bytes.

    Returns:
        The training part and the held-out part. Where there is too little text, either can be shorter than asked.
    """
    goal = max(least, round(text.total * HELD_OUT_SHARE))
    held: dict[str, Piece] = {}
    size = 0
    for piece in sorted(text.pieces, key=lambda piece: hashlib.sha256(piece.name.encode()).digest()):
        if size >= goal:
            break
        if len(piece) <= text.total * LARGEST_SHARE:
            held[piece.name] = piece
            size += len(piece)
    training = {piece.name: piece for piece in text.pieces if piece.name not in held}
    for piece in sorted(training.values(), key=len, reverse=True):  # of equals the first by name
        if size >= goal:
            break
        cut = max(piece.start, piece.stop - (goal - size))
        held[piece.name], training[piece.name] = replace(piece, start=cut), replace(piece, stop=cut)
        size += piece.stop - cut
    return (
        replace(text, pieces=tuple(training.values())),
        replace(text, pieces=tuple(held[name] for name in sorted(held))),
    )


def _standard_library() -> Text:
    folder = Path(sysconfig.get_path("stdlib"))
    pieces = _pieces(folder, (file for file in _walk(folder, _NOT_LIBRARY) if file.suffix == ".py"))
    if not pieces:
        raise ValueError(f"this Python keeps no source of its standard library in {folder}: give a text with --data")
    return Text(f"the standard library of Python {platform.python_version()}", pieces)


def _walk(folder: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
    skip = {"__pycache__", *skip}
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (Path(here, name) for name in files if not name.startswith("."))


def _pieces(folder: Path, files: Iterable[Path]) -> tuple[Piece, ...]:
    named = {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}
    return tuple(Piece(named[name], name, 0, named[name].stat().st_size) for name in sorted(named))


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return b"\0" not in opened.read(4096)
    except OSError:  # a socket, or not ours to read
        return False
