"""Which text is found and which part of it is held out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelining_dualpipev.training.text import Piece, Text, find_text, hold_out


def write(folder: Path, **sizes: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        (folder / f"{name}.txt").write_bytes(name[0].encode() * size)
    return folder


def names(text: Text) -> list[str]:
    return [piece.name for piece in text.pieces]


def test_a_folder_is_its_text_files_sorted_by_name(tmp_path: Path):
    write(tmp_path, b=3, a=2)
    write(tmp_path / "deeper", c=4)
    write(tmp_path / ".git", hidden=9)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "picture.bin").write_bytes(b"\x89\0\0\0")
    text = find_text(str(tmp_path))
    assert names(text) == ["a.txt", "b.txt", "deeper/c.txt"]
    assert text.total == 9
    assert [piece.read() for piece in text.pieces] == [b"aa", b"bbb", b"cccc"]


def test_the_standard_library_is_there_without_its_tests():
    text = find_text(None)
    assert "argparse.py" in names(text)
    assert "json/decoder.py" in names(text)
    assert not any(part in ("test", "tests", "site-packages") for name in names(text) for part in name.split("/"))
    assert text.total > 2_000_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "missing", "no such file or folder .*give a text file or a folder"),
        (lambda path: write(path / "empty"), "no text in 0 files"),
        (lambda path: write(path / "hollow", a=0, b=0), "no text in 2 files"),
    ],
)
def test_where_there_is_no_text_it_says_so(tmp_path: Path, make, words: str):
    with pytest.raises(ValueError, match=words):
        find_text(str(make(tmp_path)))


def test_whole_files_are_held_out_and_always_the_same(tmp_path: Path):
    write(tmp_path / "here", **{f"file{i}": 100 + i for i in range(40)})
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    training, held = hold_out(find_text(str(tmp_path / "here")))
    assert {piece.name: len(piece) for piece in (*training.pieces, *held.pieces)} == {
        f"file{i}.txt": 100 + i for i in range(40)
    }
    assert not set(names(training)) & set(names(held))
    assert held.total >= 0.05 * (training.total + held.total)
    assert names(hold_out(find_text(str(tmp_path / "elsewhere")))[1]) == names(held)


def test_a_new_file_moves_no_other_across(tmp_path: Path):
    """A file's place depends on its own name, so that a growing corpus does not leak what was held out before."""
    write(tmp_path, **{f"file{i}": 1000 for i in range(40)})
    before = names(hold_out(find_text(str(tmp_path)))[1])
    write(tmp_path, another=10)
    after = names(hold_out(find_text(str(tmp_path)))[1])
    assert set(before) <= set(after)


def test_of_one_file_the_tail_is_held_out(tmp_path: Path):
    (tmp_path / "book.txt").write_bytes(bytes(range(100)))
    training, held = hold_out(find_text(str(tmp_path / "book.txt")), least=10)
    assert training.pieces[0].read() == bytes(range(90))
    assert held.pieces[0].read() == bytes(range(90, 100))


def test_a_file_that_is_most_of_the_text_is_not_lost_to_training(tmp_path: Path):
    write(tmp_path, big=9_000, small=10, tiny=5)
    training, held = hold_out(find_text(str(tmp_path)))
    assert training.total > 8_000
    assert held.total == round(0.05 * 9_015)


@given(sizes=st.lists(st.integers(0, 300), max_size=12), least=st.integers(1, 500))
def test_the_two_parts_are_disjoint_and_complete(sizes: list[int], least: int):
    pieces = tuple(Piece(Path("/"), f"{i:02}", 0, size) for i, size in enumerate(sizes))
    text = Text("drawn", pieces)
    training, held = hold_out(text, least)
    covered = sorted((piece.name, at) for part in (training, held) for piece in part.pieces for at in span(piece))
    assert covered == sorted((piece.name, at) for piece in pieces for at in span(piece))
    if text.total >= least:
        assert held.total >= least


def span(piece: Piece) -> range:
    return range(piece.start, piece.stop)
