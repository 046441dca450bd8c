"""The texts that small models are trained and judged on: word problems, Python sources and documentation."""

from __future__ import annotations

import hashlib
import inspect
import pydoc_data.topics
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

from tracer.problems import TEMPLATES, problems
from tracer.schema import TraceError
from tracer.sources import (
    LIBRARY,
    Pieces,
    code_pieces,
    docstrings,
    library_files,
    package_files,
    parse,
    passages,
    read_pieces,
)

WORKLOADS = ("arithmetic", "code", "prose")
# Shares of 32: 1/16 of all problems, files and topics for evaluation, 1/16 for calibration, 1/32 for demonstrations.
SPLITS = {"train": range(5, 32), "heldout": range(2), "calibration": range(2, 4), "demo": range(4, 5)}

_PROSE_PROMPT_WORDS = 12
_PROSE_PROMPT_WORDS_DRAWN = (8, 16, 32, 64, 96)
_PROMPT_CHARACTERS = (50, 110, 200, 340, 560)  # bounds of the length classes, about 16 to 190 tokens
_MIN_COMPLETION_CHARACTERS = 300  # of a prompt's own continuation, so that its answer does not end at once


@dataclass(frozen=True)
class Document:
    """One text, cut into what is given and what is to be written; `key` names what the split goes by."""

    workload: str
    key: str
    prompt: str
    completion: str
    answer: int | None = None  # arithmetic only: of the first problem
    num_operations: int = 0  # likewise
    package: str = ""  # code and prose only

    @property
    def text(self) -> str:
        """The whole document."""
        return self.prompt + self.completion


def split_of(key: str) -> str:
    """Name the split that a problem, file or topic belongs to: a hash of its key decides, nothing else."""
    share = hashlib.sha256(key.encode()).digest()[0] % 32
    return next(name for name, shares in SPLITS.items() if share in shares)


def documents(
    workload: str, split: str = "train", seed: int = 0, packages: tuple[str, ...] = (), max_problems: int = 1
) -> Iterator[Document]:
    """Yield the documents of one workload and split: arithmetic without end, the others once, in a fixed order.

    With packages, code and prose are those of the standard library and of these packages (`sources.package_files` says
    which files count), mixed in the order of a hash. A completion, its white space aside, is then in one split only:
    in the first of heldout, calibration, demo and train that has it; and no document comes twice. The first such call
    reads all sources, in several processes.

    Args:
        workload: one of WORKLOADS.
        split: one of SPLITS.
        seed: of arithmetic; the others have none.
        packages: names of installed top-level packages. Nothing is imported from them.
        max_problems: an arithmetic document holds from one to so many problems, all of the split, and then their
            solutions.

    Raises:
        TraceError: unknown workload or split, a package that is not installed or has no sources, or a Python without
            its standard library's sources.
    """
    if split not in SPLITS:
        raise TraceError(f"split {split!r}: allowed are {', '.join(SPLITS)}")
    if workload not in WORKLOADS:
        raise TraceError(f"workload {workload!r}: allowed are {', '.join(WORKLOADS)}")
    if workload == "arithmetic":
        return _arithmetic(split, seed, 1, max_problems)
    if packages:
        return iter(_mixed(packages).documents[workload, split])
    return _library_code(split) if workload == "code" else _library_prose(split)


def prompts(
    workload: str, n: int, split: str = "heldout", packages: tuple[str, ...] = (), num_problems: int = 1
) -> list[Document]:
    """Return n documents with distinct prompts that no training sees; always the same ones.

    With packages, those of code and prose are drawn from four classes of length in turn, from 50 to 560 characters
    (about 16 to 190 tokens), and within a class from the package that has been drawn least; each continues for 300
    characters or more in its source, and code has a docstring. Those of arithmetic hold `num_problems` problems. Fewer
    are the first of more.

    Raises:
        TraceError: `split` is the training split, or holds fewer than n documents; or as `documents` does.
    """
    if split == "train":
        raise TraceError(f"split 'train' is trained on; allowed are {', '.join(list(SPLITS)[1:])}")
    if workload == "arithmetic":
        found = _arithmetic(split, 1, num_problems, num_problems)
    else:
        found = documents(workload, split, packages=packages)
        # Files come in order of their names, so that the first n would be a few files.
        found = _varied(found) if packages else iter(sorted(found, key=lambda document: _digest(document.text)))
    by_prompt: dict[str, Document] = {}
    for document in found:
        if len(by_prompt) == n:
            break
        by_prompt.setdefault(document.key if workload == "arithmetic" else document.prompt, document)
    if len(by_prompt) < n:
        raise TraceError(f"workload {workload!r}, split {split!r}: {n} prompts wanted, {len(by_prompt)} there")
    return list(by_prompt.values())


def summary(packages: tuple[str, ...]) -> dict[str, Any]:
    """Sizes of the code and prose that `documents` yields with these packages, ready for JSON.

    Returns:
        By workload: training documents and their characters, also by package; how many documents were left out because
        they come twice in the training split, and because a split that is not trained on has their completion.
    """
    return {workload: _mixed(packages).summary(workload) for workload in WORKLOADS if workload != "arithmetic"}


class _Mixed:
    """Code and prose of several packages, without what repeats."""

    def __init__(self, found: Sequence[Document]) -> None:
        self.documents: dict[tuple[str, str], list[Document]] = defaultdict(list)
        self._num_repeated: Counter[str] = Counter()
        self._num_of_other_split: Counter[str] = Counter()
        by_split = defaultdict(list)
        for document in sorted(found, key=lambda document: (_digest(document.text), document.key)):
            by_split[split_of(document.key)].append(document)
        owner: dict[tuple[str, bytes], str] = {}
        seen: set[tuple[str, str]] = set()
        for split in sorted(SPLITS, key=lambda split: split == "train"):  # training last
            for document in by_split[split]:
                workload = document.workload
                completion = (workload, _digest(" ".join(document.completion.split())))
                if owner.setdefault(completion, split) != split:
                    self._num_of_other_split[workload] += split == "train"
                elif (workload, document.text) in seen:
                    self._num_repeated[workload] += split == "train"
                else:
                    seen.add((workload, document.text))
                    self.documents[workload, split].append(document)

    def summary(self, workload: str) -> dict[str, Any]:
        """Describe the training split of a workload."""
        train = self.documents[workload, "train"]
        characters: Counter[str] = Counter()
        for document in train:
            characters[document.package] += len(document.text)
        return {
            "num_documents": len(train),
            "num_characters": characters.total(),
            "num_characters_by_package": dict(characters.most_common()),
            "num_dropped_repeated": self._num_repeated[workload],
            "num_dropped_of_other_split": self._num_of_other_split[workload],
        }


@lru_cache(maxsize=1)  # hundreds of megabytes, and reading takes a while
def _mixed(packages: tuple[str, ...]) -> _Mixed:
    files = library_files()
    for package in dict.fromkeys(packages):
        files += package_files(package)
    found = [document for pieces in read_pieces(files) for document in _documents_of(pieces)]
    for name, passage in _topics():
        found += _prose(f"topic:{name}", passage, _drawn_words(passage), LIBRARY)
    return _Mixed(found)


def _documents_of(pieces: Pieces) -> Iterator[Document]:
    key, package = f"file:{pieces.file.key}", pieces.file.package
    for prompt, completion in pieces.code:
        yield Document("code", key, prompt, completion, package=package)
    for passage in pieces.prose:
        yield from _prose(key, passage, _drawn_words(passage), package)


def _varied(found: Iterable[Document]) -> Iterator[Document]:
    """Draw from classes of length in turn, and within a class from the package that has been drawn least."""
    lowest, *bounds = _PROMPT_CHARACTERS
    classes: list[dict[str, list[Document]]] = [defaultdict(list) for _ in bounds]
    for document in found:
        length = len(document.prompt)
        if not lowest <= length < bounds[-1] or len(document.completion) < _MIN_COMPLETION_CHARACTERS:
            continue
        if document.workload == "code" and not document.prompt.endswith(('"""', "'''")):
            continue
        classes[next(i for i, bound in enumerate(bounds) if length < bound)][document.package].append(document)
    num_drawn: Counter[str] = Counter()
    for by_package in cycle(classes):
        if not any(classes):
            return
        if by_package:
            package = min(by_package, key=lambda package: (num_drawn[package], _digest(package)))
            num_drawn[package] += 1
            yield by_package[package].pop()
            if not by_package[package]:
                del by_package[package]


def _arithmetic(split: str, seed: int, fewest: int, most: int) -> Iterator[Document]:
    counts = random.Random(seed)
    of_split = (problem for problem in problems(seed) if split_of(problem.key) == split)
    while drawn := list(islice(of_split, counts.randint(fewest, most))):
        questions = "".join(f"Question: {problem.question} " for problem in drawn)
        solutions = "".join(f" {problem.solution}" for problem in drawn)
        key = "|".join(problem.key for problem in drawn)
        num_operations = len(TEMPLATES[drawn[0].template][0])
        yield Document("arithmetic", key, f"{questions}Answer:", solutions, drawn[0].answer, num_operations)


def _library_code(split: str) -> Iterator[Document]:
    for key, text, tree in _library(split):
        # Lines end at form feeds too here, not so for Python; shipped models were trained on what that gives.
        for prompt, completion in code_pieces(text.splitlines(), tree):
            yield Document("code", key, prompt, completion, package=LIBRARY)


def _library_prose(split: str) -> Iterator[Document]:
    """Yield docstrings of the standard library and the language's help topics."""
    for key, _, tree in _library(split):
        for text in docstrings(tree):
            for passage in passages(text):
                yield from _prose(key, passage, _PROSE_PROMPT_WORDS, LIBRARY)
    for name, passage in _topics():
        if split_of(f"topic:{name}") == split:
            yield from _prose(f"topic:{name}", passage, _PROSE_PROMPT_WORDS, LIBRARY)


def _library(split: str) -> Iterator[tuple[str, str, Any]]:
    """Yield key, text and syntax tree of each module of the standard library that belongs to a split, by name."""
    for file in library_files():
        key = f"file:{file.key}"
        if split_of(key) == split and (parsed := parse(file.path)):
            yield key, *parsed


def _topics() -> Iterator[tuple[str, str]]:
    for name, text in sorted(pydoc_data.topics.topics.items()):
        for passage in passages(inspect.cleandoc(text)):
            yield name, passage


def _prose(key: str, passage: str, num_words: int, package: str) -> Iterator[Document]:
    """Yield a passage cut behind its first words, unless nothing would be left."""
    cut = len(" ".join(passage.split(" ")[:num_words]).rstrip())
    if cut < len(passage):
        yield Document("prose", key, passage[:cut], passage[cut:], package=package)


def _drawn_words(passage: str) -> int:
    """Words of a passage's prompt: a hash draws one of several numbers, at most half of its words."""
    drawn = _PROSE_PROMPT_WORDS_DRAWN[_digest(passage)[0] % len(_PROSE_PROMPT_WORDS_DRAWN)]
    return min(drawn, len(passage.split(" ")) // 2)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
