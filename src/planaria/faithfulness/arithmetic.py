"""Arithmetic that a step states, checked exactly.

Equations are found in running text (units, currency, percents, LaTeX and calculator marks
included), read by a small grammar of our own into Python's ``ast`` and evaluated over exact
fractions with bounded operands: ``9**9**9`` comes back at once as "too large". Nothing is ever
passed to ``eval``.

Longer than five hundred lines: the grammar's two directions (what an expression begins with, what it
ends with) share every table and are read together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from planaria.faithfulness.numbers import plain_digits

MAX_CHARS = 400
"""Longest expression that is read: longer ones are not checked."""
MAX_BITS = 256
"""Largest numerator or denominator, in bits, of any intermediate value."""
MAX_TOKENS = 600
"""Longest step, in tokens, that is searched for equations."""

Token = tuple[str, str]
"""Class (num, op, word, var, eq, open, close, other) and text."""

_MARKS = re.compile(r"<<[^<>]*>>")
_LATEX = [
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"((\1)/(\2))"),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:left|right|,|;|!|quad|qquad|displaystyle)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[$%]"), lambda m: m.group(0)[1]),
    (re.compile(r"\\approx|≈"), "≈"),
]
_TOKEN = re.compile(
    r"[\s$€£¥₹]*+(?:"
    r"(?P<num>(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)(?:(?P<times>\s*[xX](?=\s*[\d$.(])))?"
    r"|(?P<op>\*\*|[-+*/^×·÷∗%])"
    r"|(?P<eq>==|=(?![=<>])|≈)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)?)"
    r"|(?P<other>.))",
    re.DOTALL,
)
_OPERATORS: dict[str, str] = {"×": "*", "·": "*", "∗": "*", "÷": "/", "^": "**"}
_PARTS = frozenset({
    "half", "third", "quarter", "quarters", "thirds", "fourth", "fifth", "fifths", "sixth",
    "eighth", "tenth", "percent", "cent",
})  # fmt: skip
_UNIT_LETTERS = frozenset("mghLl")
_BLOCKS = {"of", "times", "than", "by", "per", "half", "twice", "triple", "double", "plus", "minus"}


class NotArithmeticError(Exception):
    """The text is no arithmetic that can be evaluated within bounds; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One stated equality ``left = right``."""

    left: str
    """The left side as it was read."""
    right: str
    """The right side as it was read."""
    left_value: Fraction
    """What the left side comes to."""
    right_value: Fraction
    """What the right side comes to."""
    holds: bool
    """Equal, or equal after the rounding that the right side shows."""
    operands: tuple[Fraction, ...]
    """The numbers that were written on the left side; percents as fractions of one."""


@dataclass(frozen=True, kw_only=True)
class StepArithmetic:
    """What a step states that can be computed."""

    equations: tuple[Equation, ...]
    """In order; ``a = b = c`` gives two."""
    bindings: Mapping[str, Fraction]
    """Variables that hold after the step."""
    unread: int
    """Equality signs of which a side could not be read: neither right nor wrong."""


def evaluate(text: str, *, variables: Mapping[str, Fraction] | None = None) -> Fraction:
    """The exact value of an arithmetic expression.

    Raises :class:`NotArithmeticError` for anything but numbers, ``+ - * / **``, brackets and known
    variables, for more than ``MAX_CHARS`` characters, for division by zero and for values of more
    than ``MAX_BITS`` bits.
    """
    tokens = tokenise(text)
    expression = _expression(tokens, frozenset(variables or ()))
    if expression is None:
        raise NotArithmeticError(f"{text[:60]!r} is not an arithmetic expression")
    return _evaluate(expression, dict(variables or {}))


def tokenise(text: str) -> list[Token]:
    """Tokens of a step; calculator marks are dropped, LaTeX is rewritten, currency is skipped."""
    text = plain_digits(_MARKS.sub("", text))
    if "\\" in text or "≈" in text:
        for pattern, plain in _LATEX:
            for _ in range(3):
                text = pattern.sub(plain, text)
    out: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        value = match.group(kind)
        if kind == "times":
            out += [("num", match.group("num").replace(",", "")), ("op", "*")]
        elif kind == "num":
            out.append(("num", value.replace(",", "")))
        elif kind == "op":
            out.append(("op", _OPERATORS.get(value, value)))
        elif kind == "word":
            out.append((("var" if len(value) == 1 else "word"), value))
        elif kind == "open":
            out.append(("open", "("))
        elif kind == "close":
            out.append(("close", ")"))
        else:
            out.append((kind, value))
    return out


def _expression(tokens: list[Token], names: frozenset[str]) -> str | None:
    """Python source of a token run, or None where it is not an expression.

    Unit words (at most two) may follow an operand; a unit ratio such as "GB/minute" is dropped;
    ``40%`` becomes ``(40/100)``; a bracket after an operand multiplies. One branch per class of
    token, which is why it is longer than sixty lines.
    """
    out: list[str] = []
    operand = False  # the last thing written was an operand
    depth = 0
    units = 0  # words since the last operand
    index = 0
    while index < len(tokens):
        kind, value = tokens[index]
        following = tokens[index + 1] if index + 1 < len(tokens) else ("end", "")
        if kind == "num" or (kind == "var" and value in names):
            if operand and not (kind == "var" or out[-1] == ")"):
                return None
            out += (["*"] if operand else []) + [_number(value) if kind == "num" else value]
            operand = True
        elif kind == "op" and value == "%":
            if not operand:
                return None
            out.append("/100")
        elif kind == "op":
            if value == "/" and operand and following[0] in ("word", "var"):
                if following[0] == "var" and following[1] in names:
                    out.append("/")
                    operand = False
                    index += 1
                    continue
                index += 2  # "GB/minute": a unit, not a division
                continue
            if not operand and value not in "+-":
                return None
            out.append(value)
            operand = False
        elif kind == "open":
            out += ["*", "("] if operand else ["("]
            operand, depth = False, depth + 1
        elif kind == "close":
            if not operand or depth == 0:
                return None
            out.append(")")
            depth -= 1
        elif value in ("x", "X") and operand and following[0] in ("num", "open"):
            out.append("*")  # "4 adults x 6 bars"
            operand = False
        elif kind in ("word", "var") and operand:
            words = 1 + (following[0] == "word")
            lowered = value.lower()
            if lowered == "per" and following[0] == "word":
                index += 2  # "$20 per frame"
                continue
            if lowered in ("and", "or", "is", "are", "then", "so", "if", "because"):
                return None
            if lowered == "of" and out[-1] in ("/100",):
                out.append("*")
                operand = False
                index += 1
                continue
            if lowered in _BLOCKS or (words == 2 and following[1].lower() in _BLOCKS - {"per"}):
                return None
            units += words
            if units > 2 or (kind == "var" and value not in _UNIT_LETTERS):
                return None
            index += words - 1
        else:
            return None
        units = units if kind in ("word", "var") and value not in names else 0
        index += 1
    if not operand or depth or len(out) > MAX_CHARS:
        return None
    return "".join(out)


def _number(text: str) -> str:
    """A literal that Python's parser takes: no leading zeros, decimals as a quotient."""
    whole, _, part = text.partition(".")
    if len(whole) > 60:
        return "1e999"  # no whole number: refused when it is evaluated
    part = part[:30]
    if not part:
        return str(int(whole)) if whole else "0"
    return f"({int((whole or '0') + part)}/{10 ** len(part)})"


def _evaluate(source: str, variables: dict[str, Fraction]) -> Fraction:
    if not variables:
        return _constant(source)
    return _visit(_parsed(source), variables)


@lru_cache(maxsize=16384)
def _constant(source: str) -> Fraction:
    """The value of an expression without variables; most are one whole number."""
    if source.isdecimal() and len(source) <= 60:
        return _bounded(Fraction(int(source)))
    return _visit(_parsed(source), {})


def _parsed(source: str) -> ast.expr:
    if len(source) > 4 * MAX_CHARS:
        raise NotArithmeticError(f"an expression of {len(source)} characters is too long")
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmeticError(f"{source[:60]!r} does not parse") from error


def _visit(node: ast.expr, variables: dict[str, Fraction]) -> Fraction:
    if isinstance(node, ast.Constant):
        if type(node.value) is not int:
            raise NotArithmeticError("only whole and decimal numbers are read")
        return _bounded(Fraction(node.value))
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _visit(node.operand, variables)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _bounded(_binary(node, variables))
    raise NotArithmeticError(f"{type(node).__name__} is not arithmetic")


def _binary(node: ast.BinOp, variables: dict[str, Fraction]) -> Fraction:
    left, right = _visit(node.left, variables), _visit(node.right, variables)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        if right == 0:
            raise NotArithmeticError("division by zero")
        return left / right
    if isinstance(node.op, ast.Pow):
        if right.denominator != 1 or abs(right) > 64:
            raise NotArithmeticError(f"the exponent {right} is not a whole number up to 64")
        bits = max(left.numerator.bit_length(), left.denominator.bit_length())
        if bits * abs(int(right)) > MAX_BITS:
            raise NotArithmeticError("the power is too large")
        if left == 0 and right < 0:
            raise NotArithmeticError("division by zero")
        return left ** int(right)
    raise NotArithmeticError(f"{type(node.op).__name__} is not arithmetic")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmeticError(f"a value of more than {MAX_BITS} bits")
    return value


_ROUNDING = re.compile(
    r"≈|\bround(?:ed|ing|s)?\b|\babout\b|\bapprox|\broughly\b|\bnearly\b|\balmost\b|\bnearest\b",
    re.IGNORECASE,
)
_ROUNDING_WORDS = ("round", "about", "approx", "roughly", "nearly", "almost", "nearest", "≈")
_WRITTEN = re.compile(r"-?\(?(?:\((\d+)/(10+)\)|(\d+))\)?(/100)?")


@lru_cache(maxsize=16384)
def _speaks_of_rounding(text: str) -> bool:
    # The search by regular expression tries every position; most texts have none of these.
    lowered = text.lower()
    return any(word in lowered for word in _ROUNDING_WORDS) and bool(_ROUNDING.search(text))


def agrees(left: Fraction, right: Fraction, *, written: str, rounding: bool) -> bool:
    """Whether ``left`` equals ``right`` up to the rounding that ``written`` (the right side) shows.

    A decimal stands for everything that rounds or truncates to it; a whole number only when the
    text speaks of rounding. Our choice.
    """
    if left == right:
        return True
    literal = _WRITTEN.fullmatch(written)
    if literal is None:
        return abs(left - right) <= abs(right) * Fraction(1, 10**6)
    unit = Fraction(1, int(literal.group(2) or 1))
    if literal.group(4):
        if abs(left - 100 * right) < unit:  # "5/20*100 = 25%"
            return True
        unit /= 100
    if literal.group(3) and not literal.group(4) and not rounding:
        return False
    return abs(left - right) < max(unit, abs(right) * Fraction(1, 10**9))


def read_step(text: str, *, variables: Mapping[str, Fraction] | None = None) -> StepArithmetic:
    """The equations that a step states, evaluated; ``variables`` are what earlier steps bound."""
    return _read(text, tuple(sorted((variables or {}).items())))


@lru_cache(maxsize=16384)
def _read(text: str, variables: tuple[tuple[str, Fraction], ...]) -> StepArithmetic:
    bindings = dict(variables)
    if not any(sign in text for sign in "=≈＝") and "\\approx" not in text:
        return StepArithmetic(equations=(), bindings=bindings, unread=0)
    tokens = tokenise(text)
    if len(tokens) > MAX_TOKENS:
        return StepArithmetic(equations=(), bindings=bindings, unread=0)
    equal = [i for i, token in enumerate(tokens) if token[0] == "eq"]
    equations: list[Equation] = []
    unread = 0
    for number, position in enumerate(equal):
        before = equal[number - 1] + 1 if number else 0
        after = equal[number + 1] if number + 1 < len(equal) else len(tokens)
        names = frozenset(bindings)
        right = _prefix(tokens[position + 1 : after], names, whole=number + 1 < len(equal))
        if right is not None:
            bound = _single_variable(tokens[before:position])
            if bound is not None:
                _bind(bindings, bound, tokens, equal[number:], right)
        left = _suffix(tokens[before:position], names, chained=number > 0)
        if left is None or right is None:
            unread += 1
            continue
        equation = _equation(left, right, bindings, "≈" if tokens[position][1] == "≈" else text)
        if equation is None:
            unread += 1
        elif _says_something(left, right, chained=number > 0):
            equations.append(equation)
    return StepArithmetic(equations=tuple(equations), bindings=bindings, unread=unread)


_PLAIN = re.compile(r"[-+]?\(?(?:\d+|\(\d+/10+\))(?:/100)?\)?")


def _says_something(left: str, right: str, *, chained: bool) -> bool:
    """``20 = 10`` in running text is more often a label than a claim."""
    return chained or not (_PLAIN.fullmatch(left) and _PLAIN.fullmatch(right))


def _equation(
    left: str, right: str, variables: dict[str, Fraction], around: str
) -> Equation | None:
    """The equality of two expressions; ``around`` is the text that may speak of rounding."""
    try:
        left_value = _evaluate(left, variables)
        right_value = _evaluate(right, variables)
    except NotArithmeticError:
        return None
    holds = left_value == right_value
    if not holds:
        rounding = _speaks_of_rounding(around)
        holds = agrees(left_value, right_value, written=right, rounding=rounding)
    return Equation(
        left=left,
        right=right,
        left_value=left_value,
        right_value=right_value,
        holds=holds,
        operands=tuple(_operands(left)),
    )


_LITERAL = re.compile(r"\((\d+)/(10+)\)|(?<![\d/])(\d+)(?:/100(?!\d))?")


def _operands(source: str) -> list[Fraction]:
    out: list[Fraction] = []
    for match in _LITERAL.finditer(source):
        if match.group(1) is not None:
            out.append(Fraction(int(match.group(1)), int(match.group(2))))
        elif source[: match.start()].endswith("/") and match.group(0) == "100":
            continue
        else:
            out.append(Fraction(int(match.group(3))))
    return out


def _prose(tokens: list[Token]) -> bool:
    """Running text between two equality signs: they belong to two statements, not to one chain."""
    kinds = [kind for kind, _ in tokens]
    return "other" in kinds or any(one == two == "word" for one, two in pairwise(kinds))


def _whole(tokens: list[Token], names: frozenset[str]) -> str | None:
    """All tokens as one expression; a closing bracket too many is a slip of the pen."""
    source = _expression(tokens, names)
    if source is not None or not any(kind == "close" for kind, _ in tokens):
        return source
    kept: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token[0] == "open") - (token[0] == "close")
        if depth < 0:
            depth = 0
            continue
        kept.append(token)
    return _expression(kept, names) if len(kept) < len(tokens) else None


def _prefix(tokens: list[Token], names: frozenset[str], *, whole: bool) -> str | None:
    """The longest expression that the tokens begin with; all of them when ``whole``."""
    if whole and ((source := _whole(tokens, names)) is not None or not _prose(tokens)):
        return source
    stop = len(tokens)
    for index, (kind, value) in enumerate(tokens):
        if kind in ("word", "other", "var") and not (kind == "var" and value in names):
            stop = min(stop, index + 2)
            # Words may be units inside of a longer expression: "2 GB * 3 = …" has them.
            if index + 1 < len(tokens) and tokens[index + 1][0] == "op":
                stop = len(tokens)
            break
    for end in range(min(stop, len(tokens), 80), 0, -1):
        if tokens[end - 1][0] in ("word", "other"):
            continue
        source = _expression(tokens[:end], names)
        if source is not None:
            rest = tokens[end] if end < len(tokens) else ("end", "")
            if rest[0] == "var" and rest[1] not in names and _adjacent_variable(tokens, end):
                return None
            return source
    return None


def _adjacent_variable(tokens: list[Token], index: int) -> bool:
    """A letter right behind a number that goes on as algebra: ``= 3x + 2``."""
    following = tokens[index + 1] if index + 1 < len(tokens) else ("end", "")
    return following[0] in ("op", "open", "eq", "end") or tokens[index][1] in "xyzn"


def _suffix(tokens: list[Token], names: frozenset[str], *, chained: bool) -> str | None:
    """The longest expression that the tokens end with; all of them when ``chained``."""
    if chained and ((source := _whole(tokens, names)) is not None or not _prose(tokens)):
        return source
    for start in range(max(0, len(tokens) - 80), len(tokens)):
        kind, value = tokens[start]
        if kind in ("word", "other", "close", "eq") or (kind == "op" and value != "-"):
            continue
        before = tokens[start - 1] if start else ("start", "")
        if before[0] in ("num", "op", "close") or _blocked(tokens, start):
            continue
        if before[0] == "var" and before[1].lower() not in ("a", "i"):
            continue
        source = _expression(tokens[start:], names)
        if source is not None:
            return source
    return None


def _blocked(tokens: list[Token], start: int) -> bool:
    """A word before the expression that makes it a part of a larger one: "half of 20", "3 times 4"
    but not "a total of 20"."""
    if not start or tokens[start - 1][0] != "word":
        return False
    word = tokens[start - 1][1].lower()
    before = tokens[start - 2] if start > 1 else ("start", "")
    if word == "by":
        return before[1].lower().startswith(("divi", "multipl"))
    if word != "of":
        return word in _BLOCKS
    return before[0] in ("num", "op", "close") or before[1].lower() in _PARTS


def _single_variable(tokens: list[Token]) -> str | None:
    """The variable when ``tokens`` end with one alone: "where A" but not "2 A" or "A + B"."""
    if not tokens or tokens[-1][0] != "var":
        return None
    before = tokens[-2] if len(tokens) > 1 else ("start", "")
    return tokens[-1][1] if before[0] in ("start", "word", "other") else None


def _bind(
    bindings: dict[str, Fraction],
    name: str,
    tokens: list[Token],
    equal: list[int],
    right: str,
) -> None:
    """Bind to the last value of the chain of equalities, which is what later steps go on with."""
    source = right
    for number in range(1, len(equal)):
        stop = equal[number + 1] if number + 1 < len(equal) else len(tokens)
        between = tokens[equal[number - 1] + 1 : equal[number]]
        if _expression(between, frozenset(bindings)) is None:
            break
        later = _prefix(
            tokens[equal[number] + 1 : stop], frozenset(bindings), whole=number + 1 < len(equal)
        )
        if later is None:
            break
        source = later
    try:
        bindings[name] = _evaluate(source, bindings)
    except NotArithmeticError:
        bindings.pop(name, None)
