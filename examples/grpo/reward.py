r"""The reward of GSM8K for models that reason: 1.0 where the final answer is the right number, else 0.0.

GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems") ends each solution with a line `#### 72`. The
reward asks a response for the same line, takes `\boxed{72}` or the last number where there is none, and compares exactly.
Nothing inside a `<think>` trace counts.
"""

import re
from fractions import Fraction
from typing import NamedTuple

# Python may be set to refuse integers of more than 640 digits, and powers of ten cost memory: no answer is that long.
MAX_DIGITS = 600
MAX_EXPONENT_DIGITS = 3

_SPACE = "\u202f"  # stands for every space that is too narrow, or not allowed to break, between two numbers
_SEPARATORS = f",'_{_SPACE}"
_VULGAR = ("14", "12", "34", "13", "23", "18", "38", "58", "78")
_ASCII: dict[int, str] = {
    **{ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63"},
    **{ord(space): _SPACE for space in "\u00a0\u2007\u2008\u2009\u200a"},
    **{ord(slash): "/" for slash in "\u2044\u2215"},
    ord("\u2019"): "'",
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
    **{ord(mark): rf"\frac{digits}" for mark, digits in zip("¼½¾⅓⅔⅛⅜⅝⅞", _VULGAR, strict=True)},
}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_OPERATORS = {"times": "×", "cdot": "×", "sqrt": "√"}

_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\d))"
_GROUPED = "|".join(rf"\d{{1,3}}(?:{mark}\d{{3}})+(?!{mark}?\d)" for mark in _SEPARATORS)
_WHOLE = rf"(?:(?<!\d[{_SEPARATORS}])(?!0)(?:{_GROUPED})|\d+)"
_POWER = r" ?\^[ {]{0,2}[-+]?\d+"
_TERM = rf"(?:{_WHOLE}(?:\.\d+)?|(?<![A-Za-z\d.)])\.\d+)(?:[eE][-+]?\d+| ?[×x*·] ?10{_POWER})?"
# A dash after a letter, a digit or what closes a number is a hyphen, a range or a subtraction.
_SIGN = r"(?<![A-Za-z\d)%-])(?<!\d[$*_`])(?<!\d\*\*)-(?=[$€£*_`\\{]{0,4}\.?\d)[$€£*_`\\{]*"
# Linear: no digits are looked at more than a bounded number of times. What is no number is taken here and refused later.
_NUMBER = re.compile(
    r"(?:[A-Za-z](?:_\{?)?|√[{(]?|\^[ {]?[-+]?)\d+(?:[.,]\d+)*"  # of a name, a root, an exponent
    rf"|(?P<sign>{_SIGN})?(?:"
    r"\d+(?P<joint>[./-])\d+(?:(?P=joint)\d+)+"  # a version, a date, a telephone number
    rf"|(?P<mixed>{_WHOLE})[ {_SPACE}]{{1,2}}(?P<part>\d+)/(?P<parts>\d+)(?!\d|[./]\d)"
    rf"|(?P<over>{_TERM})(?: ?/ ?(?P<under>-?{_TERM}))?(?P<power>{_POWER})?)"
)


class Number(NamedTuple):
    """A number of a text, and the index at which it begins there."""

    value: Fraction
    start: int


def gsm8k_reward(response: str, answer: str) -> float:
    r"""Return 1.0 where the final answer of `response` is the number of `answer`, else 0.0.

    Of what stands outside the traces, the last `####` decides, else the last `\boxed{}`, else the last number. After `####`
    a number must come first, and neither its line nor a box may hold two different ones. What is malformed is wrong:
    nothing else in the text takes its place. `answer` is a number or a solution; where it has none, ValueError says so.
    """
    truth = final_number(answer)
    if truth is None:
        raise ValueError(
            f"no single number in the answer {answer[-80:]!r}: a row of GSM8K is a number or a solution that ends "
            "with a line '#### <number>'; correct or drop this row"
        )
    text = without_traces(response)
    return 1.0 if text is not None and final_number(text) == truth else 0.0


def without_traces(response: str) -> str | None:
    """Return what stands outside the `<think>` traces, or None where the response was cut off inside one.

    Traces nest, so as many must be closed as were opened. What comes before a `</think>` that closes nothing is a trace
    too: the prompt had opened it.
    """
    kept: list[str] = []
    depth = end = 0
    for tag in re.finditer("</?think>", response):
        if tag[0] == "<think>":
            if depth == 0:
                kept.append(response[end : tag.start()])
            depth += 1
        elif depth:
            depth -= 1
        else:
            kept.clear()
        end = tag.end()
    return None if depth else "\n".join([*kept, response[end:]])


def final_number(text: str) -> Fraction | None:
    r"""Return the number after the last `####` of `text`, else in its last `\boxed{}`, else the last one, if there is one."""
    text = text.translate(_ASCII)
    if marks := list(re.finditer("(?<!#)####(?!#)", text)):
        line = plain(text[marks[-1].end() :].partition("\n")[0])
        found = numbers(line)
        if not found or any(character.isalnum() for character in line[: found[0].start]):
            return None
        return _only(found)
    if boxes := list(re.finditer(r"\\boxed\s*\{", text)):
        return _only(numbers(plain(_until_closed(text[boxes[-1].end() :]))))
    found = numbers(plain(text))
    return found[-1].value if found else None


def numbers(text: str) -> list[Number]:
    """Return the numbers of `text`, which `plain` has gone over, in their order.

    Not among them: what is divided by zero or raised to a power, digits in names and exponents, versions and dates, and what is
    too long to be an answer.
    """
    found: list[Number] = []
    for match in _NUMBER.finditer(text):
        sign = -1 if match["sign"] else 1
        if match["mixed"]:
            whole, part, parts = (_term(match[name]) for name in ("mixed", "part", "parts"))
            if whole is None or part is None or not parts:
                continue
            if part < parts:
                found.append(Number(sign * (whole + part / parts), match.start()))
            else:  # "2 5/4" is no mixed number
                found += [Number(sign * whole, match.start()), Number(part / parts, match.start("part"))]
        elif match["over"] and not match["power"]:
            over, under = _term(match["over"]), _term(match["under"] or "1")
            if over is not None and under:
                found.append(Number(sign * over / under, match.start()))
    return found


def plain(text: str) -> str:
    r"""Return `text` with its LaTeX reduced to what `numbers` reads: `1{,}072` is 1,072 and `1\frac{1}{2}` is 1 1/2."""
    text = re.sub("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda digits: "^" + digits[0].translate(_SUPERSCRIPT), text)
    text = re.sub(r"\\([$%#&_])|\{([-,.])\}|\\!", r"\1\2", text)
    text = re.sub(r"\\[,:; ]|~", _SPACE, text)
    text = re.sub(r"(?<=\d)(?=\\[cdt]?frac)", " ", text)
    text = re.sub(rf"\\[cdt]?frac{_ARGUMENT}{_ARGUMENT}", r"\1\2/\3\4", text)
    # Other commands leave their backslash, so that nothing before them and after them becomes one number.
    return re.sub(r"\\([A-Za-z]+)", lambda command: _OPERATORS.get(command[1], "\\"), text)


def _until_closed(text: str) -> str:
    """Return `text` up to the brace that closes it; nothing where it was cut off before, for so may its number."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return ""


def _only(found: list[Number]) -> Fraction | None:
    values = {number.value for number in found}
    return values.pop() if len(values) == 1 else None


def _term(text: str) -> Fraction | None:
    mantissa, *powers = re.split(r"[eE]| ?[×x*·] ?10 ?\^[ {]{0,2}", text)
    exponent = powers[0] if powers else "0"
    if len(mantissa) > MAX_DIGITS or len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        return None
    return Fraction(re.sub(f"[{_SEPARATORS}]", "", mantissa)) * Fraction(10) ** int(exponent)
