"""Arithmetic word problems of one and two operations, each with its worked solution."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SMALLEST_OPERAND, LARGEST_OPERAND, LARGEST_MULTIPLIER = 2, 99, 9

# Operations, then the question. {a} is the first operand; each operation applies to the result so far and the next.
TEMPLATES: tuple[tuple[str, str], ...] = (
    ("+", "{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?"),
    ("+", "There are {a} red and {b} blue {item} in a box. How many {item} are in the box?"),
    ("+", "{name} reads {a} pages on Monday and {b} pages on Tuesday. How many pages is that in all?"),
    ("+", "A bus carries {a} people. At the next stop {b} people get on. How many people are on the bus?"),
    ("+", "{name} walks {a} miles and then runs {b} miles. How far does {name} go?"),
    ("-", "{name} had {a} {item} and gave {b} to {friend}. How many {item} are left?"),
    ("-", "A shop had {a} {item} and sold {b} of them. How many {item} remain?"),
    ("-", "A rope is {a} meters long. {name} cuts off {b} meters. How long is the rest?"),
    ("-", "{name} is {a} years old and {friend} is {b} years old. How much older is {name}?"),
    ("-", "{name} needs {a} dollars and has saved {b} dollars. How many dollars are missing?"),
    ("*", "There are {a} {item} in each of {b} boxes. How many {item} are there in all?"),
    ("*", "One ticket costs {a} dollars. How much do {b} tickets cost?"),
    ("*", "A train travels {a} miles each hour. How far does it go in {b} hours?"),
    ("++", "{name} has {a} {item}, {friend} has {b} and the teacher has {c}. How many {item} do they have together?"),
    ("++", "A baker makes {a} cakes, then {b} cakes, then {c} cakes. How many cakes is that?"),
    ("++", "{name} pays {a} dollars for food, {b} for books and {c} for shoes. How much does {name} pay?"),
    ("+-", "{name} has {a} {item}, finds {b} more and loses {c}. How many {item} does {name} have now?"),
    ("+-", "A bus carries {a} people. Then {b} get on and {c} get off. How many people are on the bus?"),
    ("+-", "A farm has {a} cows and {b} sheep. It sells {c} of these animals. How many animals are left?"),
    ("+-", "{name} earns {a} dollars and then {b} dollars, and spends {c}. How many dollars are left?"),
    ("-+", "{name} had {a} {item}, gave {b} to {friend} and bought {c} more. How many {item} are there now?"),
    ("-+", "A tank holds {a} liters. {name} takes out {b} liters and pours in {c}. How many liters are in it?"),
    ("-+", "A library has {a} books. It lends {b} books and gets {c} back. How many books are there?"),
    ("--", "{name} had {a} {item}, gave {b} to {friend} and lost {c}. How many {item} are left?"),
    ("--", "A shop had {a} {item}. It sold {b} before noon and {c} after noon. How many {item} remain?"),
    ("--", "{name} has {a} dollars and pays {b} for a bag and {c} for a hat. How many dollars are left?"),
    ("*+", "{name} buys {b} bags of {a} {item} and finds {c} more. How many {item} is that?"),
    ("*+", "One chair costs {a} dollars and a table costs {c}. How much do {b} chairs and one table cost?"),
    ("*-", "There are {a} {item} in each of {b} boxes. {name} takes {c} away. How many {item} are left?"),
    ("*-", "{name} earns {a} dollars a day for {b} days and spends {c}. How many dollars are left?"),
)
NAMES = ("Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gita", "Hugo", "Ida", "Jack", "Kim", "Leo")
ITEMS = ("apples", "books", "cards", "coins", "eggs", "flowers", "pens", "shells", "stamps", "toys")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@dataclass(frozen=True)
class Problem:
    """One word problem; `template` and `operands` are what tells it from the others, names and items are not."""

    template: int
    operands: tuple[int, ...]
    question: str
    solution: str
    answer: int

    @property
    def key(self) -> str:
        """Template and operands, as the split between training and held-out problems sees them."""
        return f"{self.template}:{','.join(map(str, self.operands))}"


def worked_solution(operations: str, operands: tuple[int, ...]) -> tuple[str, int] | None:
    """Write the calculation out; None where a result would be negative.

    Returns:
        The text ("12 + 34 = 46. 46 - 5 = 41. The answer is 41.") and the answer.
    """
    result = operands[0]
    sentences = []
    for sign, operand in zip(operations, operands[1:], strict=True):
        value = OPERATIONS[sign](result, operand)
        if value < 0:
            return None
        sentences.append(f"{result} {sign} {operand} = {value}.")
        result = value
    return " ".join([*sentences, f"The answer is {result}."]), result


def problems(seed: int) -> Iterator[Problem]:
    """Yield word problems without end: templates uniform, operands uniform among those with no negative result."""
    rng = random.Random(seed)  # several times as quick as numpy for single draws
    while True:
        template = rng.randrange(len(TEMPLATES))
        operations, text = TEMPLATES[template]
        largest = [LARGEST_OPERAND] + [LARGEST_MULTIPLIER if sign == "*" else LARGEST_OPERAND for sign in operations]
        operands, worked = (), None
        while worked is None:
            operands = tuple(rng.randint(SMALLEST_OPERAND, high) for high in largest)
            worked = worked_solution(operations, operands)
        name, friend = rng.sample(NAMES, 2)
        numbers = dict(zip("abc", operands, strict=False))
        question = text.format(name=name, friend=friend, item=rng.choice(ITEMS), **numbers)
        yield Problem(template, operands, question, *worked)


def final_answer(text: str) -> int | None:
    """Return the number after the first "The answer is", or None where there is none."""
    found = re.search(r"The answer is (\d+)\.", text)
    return int(found.group(1)) if found else None
