"""Python sources as training text: which files of a package count, and the pieces of code and prose in one of them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import multiprocessing
import os
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tracer.schema import TraceError

LIBRARY = "python"  # the standard library, among the packages
MAX_PACKAGE_BYTES = 40_000_000  # of sources, so that no package dominates

_LIBRARY_SKIPPED_PARTS = {"test", "tests", "site-packages", "dist-packages", "idle_test", "pydoc_data", "encodings"}
_SKIPPED_PARTS = {"test", "tests", "testing", "_testing", "generated", "_generated"} | {
    *("vendor", "vendored", "_vendor", "_vendored", "_vendored_packages", "third_party", "thirdparty", "_third_party"),
    *("extern", "externals", "external"),
}
_SKIPPED_NAME = re.compile(r"test_.*|.*_tests?|conftest|.*_pb2(_grpc)?|_version")
_GENERATED = re.compile(rb"(?i)auto-?generated|automatically generated|generated (by|from)|do not (edit|modify)")
_BANNER_BYTES = 1000
_MAX_FILE_BYTES = 1_000_000
_MAX_PROCESSES = 16

_CODE_LINES = range(4, 61)
_DOCSTRING_LINES = 12
_PROSE_CHARACTERS = range(120, 1500)
_MIN_LETTER_RATIO = 0.8  # of what is not white space; tables, formulas and code have less
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

CodePiece = tuple[str, str]  # head with docstring, and body


@dataclass(frozen=True)
class SourceFile:
    """One file of a package; `key` is its name below the folder that holds the package."""

    package: str
    key: str
    path: Path


@dataclass(frozen=True)
class Pieces:
    """What one file has to offer, in the order of the file."""

    file: SourceFile
    code: list[CodePiece]
    prose: list[str]


def library_files() -> list[SourceFile]:
    """The modules of the standard library, by name, without its tests.

    Raises:
        TraceError: a Python without its standard library's sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        SourceFile(LIBRARY, path.relative_to(root).as_posix(), path)
        for path in sorted(root.rglob("*.py"))
        if not _LIBRARY_SKIPPED_PARTS & set(path.relative_to(root).parts)
    ]
    if not found:
        raise TraceError(f"{root}: holds no Python sources to train on; install the standard library's .py files")
    return found


def package_files(package: str, max_bytes: int = MAX_PACKAGE_BYTES) -> list[SourceFile]:
    """The sources of an installed package, by name, found without importing it.

    Tests, vendored and generated files, and files of more than 1 MB are left out. Of what remains, files are taken in
    the order of a hash of their names while they have at most `max_bytes` together; the first that has no room ends it.

    Raises:
        TraceError: there is no such package, or it has no Python sources.
    """
    root = _package_root(package)
    base = root.parent
    candidates = [root] if root.is_file() else sorted(root.rglob("*.py"))
    files = [
        SourceFile(package, path.relative_to(base).as_posix(), path)
        for path in candidates
        if not _SKIPPED_PARTS & set(path.relative_to(base).parts[1:-1]) and not _SKIPPED_NAME.fullmatch(path.stem)
    ]
    chosen, num_bytes = [], 0
    for file in sorted(files, key=lambda file: hashlib.sha256(file.key.encode()).digest()):
        size = file.path.stat().st_size
        if size > _MAX_FILE_BYTES or _is_generated(file.path):
            continue
        num_bytes += size
        if num_bytes > max_bytes:
            break
        chosen.append(file)
    if not chosen:
        raise TraceError(f"package {package!r}: has no Python sources to train on")
    return sorted(chosen, key=lambda file: file.key)


def read_pieces(files: Sequence[SourceFile], processes: int | None = None) -> list[Pieces]:
    """Take files apart, in the order given, in several processes.

    Args:
        files: what to read. A file that this Python cannot parse has no pieces.
        processes: how many; by default one for each core, at most 16.
    """
    processes = processes or min(os.cpu_count() or 1, _MAX_PROCESSES)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads, as torch's, may hang
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        return list(executor.map(_pieces_of, files, chunksize=16))


def parse(path: Path) -> tuple[str, ast.Module] | None:
    """Text and syntax tree of a file, or None where this Python cannot parse it: some are broken on purpose."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        return text, ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # ValueError: not in its encoding, or a null byte
        return None


def code_pieces(lines: Sequence[str], tree: ast.Module, max_docstring_lines: int | None = None) -> Iterator[CodePiece]:
    """Yield each function, method and small class, cut behind its head and docstring.

    Args:
        lines: of the file.
        tree: of the file.
        max_docstring_lines: a docstring of more lines is cut to its first paragraph.
    """
    queue = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
    while queue:
        node = queue.pop(0)
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef) and last - node.lineno >= _CODE_LINES.stop:
            queue.extend(child for child in node.body if isinstance(child, _DEFINITIONS))
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        has_docstring = ast.get_docstring(node) is not None
        head = (node.body[0].end_lineno or 0) if has_docstring else node.body[0].lineno - 1
        given = list(lines[first - 1 : head])
        if has_docstring and max_docstring_lines is not None:
            start = node.body[0].lineno
            if head - start >= max_docstring_lines:
                given = [*lines[first - 1 : start - 1], *_first_paragraph(lines[start - 1 : head])]
        if len(given) + last - head not in _CODE_LINES or not first <= head < last:
            continue
        source = textwrap.dedent("\n".join([*given, *lines[head:last]]))
        if not _parses(source):  # a text of several lines inside it may keep the rest from moving left
            continue
        cut = len("\n".join(source.split("\n")[: len(given)]).rstrip())
        yield source[:cut], source[cut:]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield each docstring of a file."""
    for node in ast.walk(tree):
        if isinstance(node, (*_DEFINITIONS, ast.Module)) and (found := ast.get_docstring(node)):
            yield found


def plain_paragraphs(text: str) -> str:
    """Leave out the paragraphs that are not prose: interactive sessions, tables, formulas, lines under headings."""
    return "\n\n".join(filter(_is_plain, text.split("\n\n")))


def passages(text: str) -> Iterator[str]:
    """Join paragraphs up to a length, and leave out what is too short or too long."""
    passage = ""
    for paragraph in [*text.split("\n\n"), None]:
        if paragraph is not None and len(passage) + len(paragraph) < _PROSE_CHARACTERS.stop:
            passage = f"{passage}\n\n{paragraph}" if passage else paragraph
            continue
        if len(passage) in _PROSE_CHARACTERS:
            yield passage
        passage = paragraph or ""


def _package_root(package: str) -> Path:
    """Folder of a package, or file of a module."""
    try:
        spec = None if "." in package else importlib.util.find_spec(package)  # with a dot it would import the parent
    except ValueError:  # an empty name, or a module without a specification
        spec = None
    if spec is None:
        raise TraceError(f"package {package!r}: is not installed here; name installed top-level packages")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise TraceError(f"package {package!r}: has no Python sources to train on")
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def _is_generated(path: Path) -> bool:
    with path.open("rb") as file:
        return _GENERATED.search(file.read(_BANNER_BYTES)) is not None


def _pieces_of(file: SourceFile) -> Pieces:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes such as "\d" in the sources of others
        parsed = parse(file.path)
        if parsed is None:
            return Pieces(file, [], [])
        text, tree = parsed
        code = list(code_pieces(text.split("\n"), tree, _DOCSTRING_LINES))
        prose = [passage for text in docstrings(tree) for passage in passages(plain_paragraphs(text))]
        return Pieces(file, code, prose)


def _first_paragraph(lines: Sequence[str]) -> Sequence[str]:
    """Cut the lines of a docstring behind its first paragraph; all of them where it has no other."""
    quotes = re.match(r"""\s*[rRuU]?(\"{3}|'{3})""", lines[0])
    if quotes is None:
        return lines
    text_starts = 1 if lines[0][quotes.end() :].strip() else 2  # the text may begin below the quotes
    end = next((number for number, line in enumerate(lines) if number >= text_starts and not line.strip()), None)
    return lines if end is None else [*lines[: end - 1], lines[end - 1].rstrip() + quotes.group(1)]


def _is_plain(paragraph: str) -> bool:
    solid = "".join(paragraph.split())
    num_letters = sum(character.isalpha() for character in solid)
    is_half = any("\ud800" <= character <= "\udfff" for character in solid)  # lone surrogates, which no tokenizer takes
    return ">>>" not in solid and not is_half and num_letters >= max(1, _MIN_LETTER_RATIO * len(solid))


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
