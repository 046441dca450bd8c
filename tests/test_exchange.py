"""A directory takes the place of another, whatever happens meanwhile."""

from pathlib import Path

import pytest

from tracer.exchange import partial_beside, put_back, take_place


@pytest.fixture
def place(tmp_path):
    """A directory `x [1]`, old, and a new one that is to take its place."""
    path = tmp_path / "x [1]"
    return made(path, "old"), made(partial_beside(path), "new")


def made(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


def content(path):
    return (path / "file").read_text()


def anything():
    pass


def test_the_new_one_takes_the_name(place, tmp_path):
    path, partial = place
    take_place(partial, path, anything)
    assert content(path) == "new"
    assert list(tmp_path.iterdir()) == [path]
    take_place(made(partial_beside(tmp_path / "y"), "other"), tmp_path / "y", anything)
    assert content(tmp_path / "y") == "other"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("number", "left"), [(1, "old"), (2, None), (3, "new")])
def test_an_interrupt_at_any_rename_leaves_one_of_the_two(place, tmp_path, monkeypatch, number, when, left):
    path, partial = place
    rename, calls = Path.rename, []

    def interrupted(source, target):
        calls.append(source)
        if len(calls) == number and when == "before":
            raise KeyboardInterrupt
        moved = rename(source, target)
        if len(calls) == number:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_place(partial, path, anything)
    assert content(path) == (left or {"before": "old", "after": "new"}[when])
    lost = [found for found in tmp_path.iterdir() if found not in (path, partial) and ".partial-" not in found.name]
    assert len(lost) == (number == 3 and when == "before")  # what was replaced, when its removal is interrupted


def test_a_name_taken_at_the_same_moment_is_checked_again(place, tmp_path, monkeypatch):
    path, partial = place
    rename, checks = Path.rename, []

    def renamed(source, target):
        moved = rename(source, target)
        if source == path and len(checks) == 1:
            made(path, "of another")
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    take_place(partial, path, lambda: checks.append(content(path)))
    assert checks == ["old", "of another"]
    assert content(path) == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_check_that_refuses_leaves_the_old_one(place):
    path, partial = place

    def refuse():
        raise ValueError("stays")

    with pytest.raises(ValueError, match="stays"):
        take_place(partial, path, refuse)
    assert (content(path), content(partial)) == ("old", "new")


@pytest.mark.parametrize("empty", [False, True])
def test_what_a_killed_process_left_is_put_back(place, tmp_path, empty):
    path, partial = place
    path.rename(tmp_path / ".x [1].replaced-0123abcd")
    made(tmp_path / ".x 1.replaced-0123abcd", "of another name")
    if empty:
        path.mkdir()
    put_back(path)
    assert content(path) == "old"
    put_back(path)
    assert sorted(found.name for found in tmp_path.iterdir()) == sorted(
        [path.name, partial.name, ".x 1.replaced-0123abcd"]
    )


def test_what_is_there_stays(place, tmp_path):
    path, _ = place
    made(tmp_path / ".x [1].replaced-0123abcd", "older")
    put_back(path)
    assert content(path) == "old"
    put_back(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
