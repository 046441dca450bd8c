"""The texts that small models are trained and judged on: word problems, Python sources and documentation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import pydoc_data.topics
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracer.problems import TEMPLATES, problems
from tracer.schema import TraceError

WORKLOADS = ("arithmetic", "code", "prose")
# Shares of 32: 1/16 of all problems, files and topics for evaluation, 1/16 for calibration, 1/32 for demonstrations.
SPLITS = {"train": range(5, 32), "heldout": range(2), "calibration": range(2, 4), "demo": range(4, 5)}

_SKIPPED_PARTS = {"test", "tests", "site-packages", "dist-packages", "idle_test", "pydoc_data", "encodings"}
_CODE_LINES = range(4, 61)
_PROSE_CHARACTERS = range(120, 1500)
_PROSE_PROMPT_WORDS = 12


@dataclass(frozen=True)
class Document:
    """One text, cut into what is given and what is to be written; `key` names what the split goes by."""

    workload: str
    key: str
    prompt: str
    completion: str
    answer: int | None = None  # arithmetic only
    num_operations: int = 0  # arithmetic only

    @property
    def text(self) -> str:
        """The whole document."""
        return self.prompt + self.completion


def split_of(key: str) -> str:
    """Name the split that a problem, file or topic belongs to: a hash of its key decides, nothing else."""
    share = hashlib.sha256(key.encode()).digest()[0] % 32
    return next(name for name, shares in SPLITS.items() if share in shares)


def documents(workload: str, split: str = "train", seed: int = 0) -> Iterator[Document]:
    """Yield the documents of one workload and split: arithmetic without end, the others once, in a fixed order.

    Raises:
        TraceError: unknown workload or split, or a Python without its standard library's sources.
    """
    if split not in SPLITS:
        raise TraceError(f"split {split!r}: allowed are {', '.join(SPLITS)}")
    match workload:
        case "arithmetic":
            every = _arithmetic(seed)
        case "code":
            every = _code(split)
        case "prose":
            every = _prose(split)
        case _:
            raise TraceError(f"workload {workload!r}: allowed are {', '.join(WORKLOADS)}")
    return (document for document in every if split_of(document.key) == split)


def prompts(workload: str, n: int, split: str = "heldout") -> list[Document]:
    """Return n documents with distinct prompts that no training sees; always the same ones.

    Raises:
        TraceError: `split` is the training split, or holds fewer than n documents.
    """
    if split == "train":
        raise TraceError(f"split 'train' is trained on; allowed are {', '.join(list(SPLITS)[1:])}")
    found = documents(workload, split, seed=1)
    if workload != "arithmetic":  # files come in order of their names, so that the first n would be a few files
        found = iter(sorted(found, key=lambda document: hashlib.sha256(document.text.encode()).digest()))
    by_prompt: dict[str, Document] = {}
    for document in found:
        if len(by_prompt) == n:
            break
        by_prompt.setdefault(document.key if workload == "arithmetic" else document.prompt, document)
    if len(by_prompt) < n:
        raise TraceError(f"workload {workload!r}, split {split!r}: {n} prompts wanted, {len(by_prompt)} there")
    return list(by_prompt.values())


def _arithmetic(seed: int) -> Iterator[Document]:
    for problem in problems(seed):
        prompt, completion = f"Question: {problem.question} Answer:", f" {problem.solution}"
        num_operations = len(TEMPLATES[problem.template][0])
        yield Document("arithmetic", problem.key, prompt, completion, problem.answer, num_operations)


def _library(split: str) -> Iterator[tuple[str, str, ast.Module]]:
    """Yield key, text and syntax tree of each module of the standard library that belongs to a split, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    num_modules = 0
    for path in sorted(root.rglob("*.py")):
        key = f"file:{path.relative_to(root).as_posix()}"
        if _SKIPPED_PARTS & set(path.relative_to(root).parts):
            continue
        num_modules += 1
        if split_of(key) != split:
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):  # lib2to3 and others keep broken files on purpose
            continue
        yield key, text, tree
    if not num_modules:
        raise TraceError(f"{root}: holds no Python sources to train on; install the standard library's .py files")


def _code(split: str) -> Iterator[Document]:
    """Yield each function, method and small class: its head and docstring are the prompt, its body the completion."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for key, text, tree in _library(split):
        lines = text.splitlines()
        queue = [node for node in tree.body if isinstance(node, definitions)]
        while queue:
            node = queue.pop(0)
            last = node.end_lineno or node.lineno
            if isinstance(node, ast.ClassDef) and last - node.lineno >= _CODE_LINES.stop:
                queue.extend(child for child in node.body if isinstance(child, definitions))
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            head = (node.body[0].end_lineno or 0) if ast.get_docstring(node) else node.body[0].lineno - 1
            if last - first + 1 not in _CODE_LINES or not first <= head < last:
                continue
            source = textwrap.dedent("\n".join(lines[first - 1 : last]))
            if not _parses(source):  # a text of several lines inside it may keep the rest from moving left
                continue
            cut = len("\n".join(source.splitlines()[: head - first + 1]).rstrip())
            yield Document("code", key, source[:cut], source[cut:])


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _prose(split: str) -> Iterator[Document]:
    """Yield docstrings of the standard library and the language's help topics, paragraphs joined up to a length."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for key, _, tree in _library(split):
        for node in ast.walk(tree):
            if isinstance(node, documented) and (found := ast.get_docstring(node)):
                yield from _passages(key, found)
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield from _passages(f"topic:{name}", inspect.cleandoc(text))


def _passages(key: str, text: str) -> Iterator[Document]:
    passage = ""
    for paragraph in [*text.split("\n\n"), None]:
        if paragraph is not None and len(passage) + len(paragraph) < _PROSE_CHARACTERS.stop:
            passage = f"{passage}\n\n{paragraph}" if passage else paragraph
            continue
        cut = len(" ".join(passage.split(" ")[:_PROSE_PROMPT_WORDS]).rstrip())
        if len(passage) in _PROSE_CHARACTERS and cut < len(passage):
            yield Document("prose", key, passage[:cut], passage[cut:])
        passage = paragraph or ""
