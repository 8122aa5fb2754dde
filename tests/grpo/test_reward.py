"""The reward of GSM8K: a table a rule, and properties over numbers, spellings and arbitrary text."""

import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples.grpo.reward import MAX_DIGITS, gsm8k_reward, numbers, plain

PROJECT = Path(__file__).parents[2]
#: What 100,000 characters may take. They take well under a second; what is quadratic takes minutes.
BOUND_S = 10.0
SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is 72.", "72", 1.0),
        ("#### 72", "72", 1.0),
        ("#### 71", "72", 0.0),
        ("<think>#### 71</think>\n#### 72", "72", 1.0),
        ("72 apples, 3 left over", "72", 0.0),
        ("", "72", 0.0),
        ("#### 1,072", "1072", 1.0),
        ("#### seventy-two", "72", 0.0),
        ("I do not know.", "72", 0.0),
        ("The answer is 72.", SOLUTION, 1.0),
        ("The answer is 24.", SOLUTION, 0.0),
        (SOLUTION, "72", 1.0),
        ("#### -5", "Solution\n#### -5", 1.0),
        ("#### 1072", "Solution\n#### $1,072", 1.0),
    ],
)
def test_final_answer(response: str, answer: str, reward: float) -> None:
    assert gsm8k_reward(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>72</think>", 0.0),
        ("<think>72", 0.0),
        ("<think>#### 72", 0.0),
        ("#### 72\n<think>let me check", 0.0),
        ("<think>a</think>#### 72<think>", 0.0),
        ("#### 71\n</think>\n#### 72", 1.0),
        ("#### 72\n</think>\n", 0.0),
        ("71</think>71</think>72", 1.0),
        ("71</think>72</think>", 0.0),
        ("#### 71<think>a</think>b</think>72", 1.0),
        ("71</think>72<think>71</think>", 1.0),
        ("<think>71</think>\n#### 72\n<think>#### 71</think>", 1.0),
        ("<think>1</think><think>2</think>72<think>3</think>", 1.0),
        ("<think>a<think>b</think>#### 71</think>#### 72", 1.0),
        ("<think>a<think>b</think>#### 72", 0.0),
        ("7<think>a</think>2", 0.0),
        ("<think></think>72", 1.0),
        ("<thinking>71</thinking> 72", 1.0),
    ],
)
def test_traces_do_not_count(response: str, reward: float) -> None:
    assert gsm8k_reward(response, "72") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("####72", 1.0),
        ("####  72", 1.0),
        ("so #### 72", 1.0),
        ("#### 72\r\nThat took 3 steps.", 1.0),
        ("#### 72\nCheck: 70 + 2", 1.0),
        ("#### 71\n#### 72", 1.0),
        ("#### 72\n#### 71", 0.0),
        ("#### 71 #### 72", 1.0),
        ("#### 72\n#### seventy-two", 0.0),
        ("#### 72\n####", 0.0),
        ("72\n####", 0.0),
        ("####\n72", 0.0),
        ("The answer is 72.\n#### Done", 0.0),
        ("#### Answer: 72", 0.0),
        ("#### 72 apples", 1.0),
        ("#### 72apples", 1.0),
        ("#### 72 m^2", 1.0),
        ("#### 72 m²", 1.0),
        ("#### 72 km/h", 1.0),
        ("#### 72<|im_end|>", 1.0),
        ("#### 72 or 73", 0.0),
        ("#### 72 (73 at most)", 0.0),
        ("#### 70-72", 0.0),
        ("#### 70 + 2", 0.0),
        ("#### 72, that is 72.00", 1.0),
        ("#### 72/0", 0.0),
        ("##### 72", 1.0),  # no answer line, so the last number counts
        ("##### 72\n3 left over", 0.0),
        ("##### 71\n#### 72", 1.0),
        ("#### 72\n##### 71", 1.0),
        ("### 72", 1.0),
        (r"#### \boxed{72}", 1.0),
        ("#### 72\n\\boxed{71}", 1.0),
    ],
)
def test_answer_line(response: str, reward: float) -> None:
    assert gsm8k_reward(response, "72") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"\boxed{72}", 1.0),
        (r"\boxed {72}", 1.0),
        (r"So \(\boxed{72}\), from 3 steps.", 1.0),
        (r"\boxed{71}, then \boxed{72}", 1.0),
        (r"\boxed{72}, then \boxed{71}", 0.0),
        (r"\boxed{71} 72", 0.0),
        (r"\boxed{\text{Answer: }72\text{ apples}}", 1.0),
        (r"\boxed{x = 72}", 1.0),
        (r"\boxed{\boxed{72}}", 1.0),
        (r"\boxed{\{72\}}", 1.0),
        (r"\boxed{\} 72}", 1.0),
        (r"\boxed{\$72}", 1.0),
        (r"\boxed{72\%}", 1.0),
        (r"\boxed{72^\circ}", 1.0),
        (r"\boxed{70, 72}", 0.0),
        (r"72 \boxed{}", 0.0),
        (r"72 \boxed{\text{none}}", 0.0),
        (r"\boxed{72", 0.0),
        (r"\boxed{\text{72}", 0.0),
    ],
)
def test_box(response: str, reward: float) -> None:
    assert gsm8k_reward(response, "72") == reward


@pytest.mark.parametrize(
    ("spelling", "number"),
    [
        # thousands
        ("1,072", "1072"),
        ("1,234,567.50", "1234567.5"),
        ("1{,}072", "1072"),
        (r"1\,072", "1072"),
        (r"1\ 072", "1072"),
        (r"1\;234\;567", "1234567"),
        (r"1,\!072", "1072"),
        ("1~072", "1072"),
        ("1\u00a0072", "1072"),
        ("1\u2009072", "1072"),
        ("1\u202f072", "1072"),
        ("1'072", "1072"),
        ("1\u2019072", "1072"),
        ("1_072", "1072"),
        # currency, percentages, units
        ("$72", "72"),
        ("$ 72", "72"),
        ("€72", "72"),
        ("72€", "72"),
        ("£72.00", "72"),
        ("-$72", "-72"),
        ("$-72", "-72"),
        ("72%", "72"),
        ("0.5%", "1/2"),
        # LaTeX
        ("$72$", "72"),
        ("$$-72$$", "-72"),
        (r"\(72\)", "72"),
        (r"\[-72\]", "-72"),
        (r"\$72", "72"),
        (r"-\$1{,}072", "-1072"),
        (r"72\%", "72"),
        (r"\text{72}", "72"),
        (r"\textbf{-72}", "-72"),
        (r"\mathrm{72}", "72"),
        # markdown
        ("**72**", "72"),
        ("**-72**", "-72"),
        ("_72_", "72"),
        ("*72*", "72"),
        ("`72`", "72"),
        ("`-72`", "-72"),
        # signs
        ("+72", "72"),
        ("-72", "-72"),
        ("\u221272", "-72"),
        ("\u201372", "-72"),
        ("\u201472", "-72"),
        ("\u201072", "-72"),
        # full width and other digits
        ("\uff17\uff12", "72"),
        ("\uff0d\uff11\uff0c\uff10\uff17\uff12\uff0e\uff15", "-1072.5"),
        ("\uff04\uff17\uff12", "72"),
        ("\u0667\u0662", "72"),
        # decimals and punctuation
        ("72.0", "72"),
        ("072", "72"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("$.50", "1/2"),
        ("72.", "72"),
        ("72!", "72"),
        ("72;", "72"),
        ("(72)", "72"),
        ("'72'", "72"),
        ('"72"', "72"),
        ("...72...", "72"),
        ("1,072,", "1072"),
        # fractions
        ("3/4", "0.75"),
        ("3 / 4", "0.75"),
        ("-3/4", "-0.75"),
        ("3/-4", "-0.75"),
        ("144/2", "72"),
        ("1.5/2", "0.75"),
        ("3,000/4", "750"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac{-3}{4}", "-0.75"),
        (r"\dfrac34", "0.75"),
        (r"\tfrac3{4}", "0.75"),
        (r"\frac{3{,}000}{4}", "750"),
        ("1 1/2", "3/2"),
        ("1  1/2", "3/2"),
        ("-1 1/2", "-3/2"),
        (r"1\frac{1}{2}", "3/2"),
        (r"1 \frac12", "3/2"),
        ("½", "1/2"),
        ("-1½", "-3/2"),
        ("3\u20444", "0.75"),
        # scientific notation
        ("1.2e3", "1200"),
        ("1.2E+3", "1200"),
        ("-5e-1", "-1/2"),
        (r"1.2 \times 10^{3}", "1200"),
        (r"1.2\cdot10^3", "1200"),
        ("1.2 × 10³", "1200"),
        ("1.2 x 10^3", "1200"),
        ("1.2*10^3", "1200"),
        ("5 × 10⁻¹", "1/2"),
        ("5 × 10^{-1}", "1/2"),
    ],
)
def test_spellings(spelling: str, number: str) -> None:
    for frame in ("{}", "#### {}", "The answer is {}", "= {} in all.\n", r"\boxed{{{}}}", "# {}\n", "答案是{}。"):
        response = frame.format(spelling)
        assert gsm8k_reward(response, number) == 1.0, response
        assert gsm8k_reward(response, str(Fraction(number) + 1)) == 0.0, response
    assert gsm8k_reward(f"#### {number}", spelling) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("70-72", ["70", "72"]),
        ("70–72", ["70", "72"]),
        ("$70$-$72$", ["70", "72"]),
        ("**70**–**72**", ["70", "72"]),
        ("50%-72%", ["50", "72"]),
        (r"\(70\)-\(72\)", ["70", "72"]),
        ("70 - 72", ["70", "72"]),
        ("- 72", ["72"]),
        ("page-72", ["72"]),
        ("--72", ["72"]),
        ("1,2,3", ["1", "2", "3"]),
        ("12,34,567", ["12", "34", "567"]),
        ("1,072,5", ["1", "72", "5"]),
        ("1000,000", ["1000", "0"]),
        ("0,072", ["0", "72"]),
        ("1, 072", ["1", "72"]),
        ("1 072", ["1", "72"]),
        ("1,072\u00a0500", ["1072", "500"]),
        ("1.2.3", []),
        ("-1.2.3", []),
        ("-$1.2.3", []),
        ("v1.2", []),
        ("12.05.2024", []),
        ("2024-05-12", []),
        ("5/12/2024", []),
        ("555-123-4567", []),
        ("3/0 0/3", ["0"]),
        (r"\frac{3}{0}", []),
        ("1 1/0", []),
        ("2 5/4", ["2", "5/4"]),
        ("-2 5/4", ["-2", "5/4"]),
        (r"72^\circ 30", ["72", "30"]),
        ("1 1/2/2024", ["1"]),
        ("2^3 2^{3} 2³", []),
        ("72 m^2, 72 m², 72 cm^{3}", ["72", "72", "72"]),
        ("72[^1]", ["72"]),
        (r"\sqrt{72} √72", []),
        ("x_1 x_{12} H2O Q4 1e5", ["100000"]),
        ("24*3 = 72", ["24", "3", "72"]),
        ("<<48/2=24>>24", ["24", "24", "24"]),
        ("12:30", ["12", "30"]),
        ("seventy-two", []),
        ("1e1000 1e-1000", []),
    ],
)
def test_numbers(text: str, expected: list[str]) -> None:
    text = text.replace("–", "-").replace("\u00a0", "\u202f")  # what comes before `plain`
    assert [number.value for number in numbers(plain(text))] == [Fraction(one) for one in expected]


def test_numbers_begin_where_they_stand() -> None:
    text = "from -$3 to 1 1/2, 2 5/4"
    assert [text[number.start :][:3] for number in numbers(text)] == ["-$3", "1 1", "2 5", "5/4"]


@pytest.mark.parametrize("answer", ["", "none", "#### ", "72\n#### seventy-two", "#### 72 or 73", "3/0", "9" * 5000])
def test_answer_without_number_is_named(answer: str) -> None:
    for response in ("72", "<think>cut off"):
        with pytest.raises(ValueError, match="no single number in the answer") as raised:
            gsm8k_reward(response, answer)
        message = str(raised.value)
        assert repr(answer[-80:]) in message
        assert "\n" not in message
        assert len(message) < 400


def test_answers_too_long_to_read_are_wrong() -> None:
    longest = "7" * MAX_DIGITS
    assert gsm8k_reward(longest, longest) == 1.0
    assert gsm8k_reward(longest + "7", longest) == 0.0
    assert gsm8k_reward("#### " + "9" * 5000, "72") == 0.0
    assert gsm8k_reward("#### 1e999999999", "72") == 0.0
    assert gsm8k_reward("#### 1e-999999999", "0") == 0.0
    assert gsm8k_reward("#### 7.2 × 10^{" + "9" * 5000 + "}", "72") == 0.0
    assert gsm8k_reward("#### 72e" + "0" * 5000, "72") == 0.0
    assert gsm8k_reward("#### 1e999", "1e999") == 1.0


def test_python_that_refuses_long_integers() -> None:
    code = (
        "from examples.grpo.reward import gsm8k_reward as reward\n"
        "for length in 600, 601, 640, 641, 5000:\n"
        "    for text in '9' * length, '1/' + '9' * length, '0.' + '9' * length + 'e999':\n"
        "        assert reward(text, '72') == 0.0\n"
    )
    subprocess.run([sys.executable, "-X", "int_max_str_digits=640", "-c", code], cwd=PROJECT, check=True, timeout=60)


ADVERSARIAL = {
    "list": "1,2," * 25_000,
    "ones": "1," * 50_000,
    "opened": "<think>" * 20_000,
    "closed": "</think>" * 12_500,
    "traces": "<think></think>" * 7_000,
    "digits": "9" * 100_000,
    "dollars": "$" * 100_000,
    "braces": "{" * 50_000,
    "hashes": "#" * 100_000,
    "marks": "#### " * 20_000,
    "boxes": "\\boxed{" * 14_000,
    "box and spaces": "\\boxed" + " " * 100_000,
    "thousands": "1" + ",000" * 25_000,
    "broken thousands": "1" + ",000" * 25_000 + ",5",
    "dashes": "-" * 100_000,
    "signs": "-$" * 50_000,
    "sign and wrappers": "-" + "$" * 100_000,
    "wrapped": "-$$$$1" * 16_000,
    "powers": "9" * 50_000 + "^" + "9" * 50_000,
    "carets": "1^" * 50_000,
    "decimals": "9" * 50_000 + "." + "9" * 50_000,
    "versions": "1." * 50_000,
    "dates": "1/" * 50_000,
    "numbers": "1 " * 50_000,
    "mixed": "1 1/2 " * 16_000,
    "nearly mixed": ("9" * 500 + " ") * 200,
    "exponents": "1e999 " * 16_000,
    "small exponents": "3e-999/7e999 " * 7_500,
    "long fractions": ("9" * 600 + "/" + "7" * 600 + " ") * 80,
    "fractions": "\\frac" * 20_000,
    "open fractions": "\\frac{" * 16_000,
    "half fractions": "\\frac{1}" * 12_500,
    "fraction and spaces": "\\frac{" + " " * 100_000,
    "backslashes": "\\" * 100_000,
    "narrow spaces": "1\u202f" * 50_000,
    "superscripts": "\u00b9" * 100_000,
    "vulgar": "½" * 100_000,
    "combining": "\u0301\u0316" * 50_000,
    "names": "a_{1" * 25_000,
    "stars": "*" * 100_000,
}


@pytest.mark.parametrize("before", ["", "#### ", "\\boxed{"])
@pytest.mark.parametrize("text", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_long_text_takes_linear_time(text: str, before: str) -> None:
    # Time of this process alone, so that others on the machine do not count.
    began = time.process_time()
    assert gsm8k_reward(before + text, "72.5") == 0.0
    assert time.process_time() - began < BOUND_S


FRAMES = (
    "{}",
    "The answer is {}.",
    "#### {}",
    "**Answer:** {}",
    r"So \boxed{{{}}}",
    "3 steps.\n#### {} apples",
    "= {}\n",
)
Spelling = Callable[[Fraction], str | None]


def decimal(number: Fraction) -> str | None:
    """Write `number` with the digits it needs, None where it has no end."""
    for places in range(13):
        if (scaled := number * 10**places).denominator == 1:
            digits = f"{abs(scaled.numerator):0{places + 1}}"
            whole, part = digits[: len(digits) - places], digits[len(digits) - places :]
            return ("-" if number < 0 else "") + f"{int(whole):,}" + (f".{part}" if part else "")
    return None


def replaced(old: str, new: str) -> Spelling:
    return lambda number: None if (text := decimal(number)) is None else text.replace(old, new)


def wrapped(frame: str) -> Spelling:
    return lambda number: None if (text := decimal(number)) is None else frame.format(text)


def scientific(frame: str) -> Spelling:
    return lambda number: None if (text := decimal(number * 1000)) is None else frame.format(text)


def mixed(frame: str) -> Spelling:
    def spell(number: Fraction) -> str | None:
        whole, part = divmod(abs(number), 1)
        if not whole or not part:
            return None
        return ("-" if number < 0 else "") + frame.format(whole, part.numerator, part.denominator)

    return spell


def full_width(number: Fraction) -> str | None:
    text = decimal(number)
    return text and "".join(chr(ord(character) + 0xFEE0) for character in text)


SPELLINGS: tuple[Spelling, ...] = (
    decimal,
    full_width,
    replaced(",", ""),
    replaced(",", "{,}"),
    replaced(",", r"\,"),
    replaced(",", r"\ "),
    replaced(",", "\u202f"),
    replaced(",", "\u00a0"),
    replaced("-", "\u2212"),
    replaced("-", "-$"),
    *(wrapped(frame) for frame in ("${}$", "**{}**", "_{}_", "`{}`", r"\({}\)", r"\text{{{}}}", r"{}\%", "{}%", "£{}")),
    *(scientific(frame) for frame in ("{}e-3", "{}E-03", r"{} \times 10^{{-3}}", "{} × 10⁻³", r"{}\cdot 10^{{-3}}")),
    lambda number: f"{number.numerator}/{number.denominator}",
    lambda number: rf"\frac{{{number.numerator}}}{{{number.denominator}}}",
    lambda number: rf"\dfrac{{{number.numerator * 3}}}{{{number.denominator * 3}}}",
    mixed("{} {}/{}"),
    mixed(r"{}\frac{{{}}}{{{}}}"),
    mixed(r"{} \tfrac{{{}}}{{{}}}"),
)
FRACTIONS = st.one_of(
    st.integers(-2000, 2000).map(Fraction),
    st.integers(-(10**12), 10**12).map(Fraction),
    st.fractions(-2000, 2000, max_denominator=16),
    st.builds(Fraction, st.integers(-(10**9), 10**9), st.sampled_from([10, 100, 1000])),
    st.fractions(),
)
PIECES = st.sampled_from(
    [
        "72",
        "1,072",
        "-3",
        "3/4",
        "####",
        "#### 72",
        "#### x",
        "\\boxed{",
        "}",
        "{",
        "\\frac{3}{4}",
        "$",
        "**",
        "\n",
        " ",
        ".",
        "²",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES).map("".join))
ANY_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.text("0123456789,.-/^{}\\$#eE×% \n_*"),
    st.lists(st.one_of(PIECES, st.sampled_from(["<think>", "</think>", "\\frac", "\\sqrt", "10^", "e", "\ud800"]))).map(
        "".join
    ),
)


@settings(max_examples=1000, deadline=None)
@given(FRACTIONS, st.sampled_from(SPELLINGS), st.sampled_from(FRAMES), st.data())
def test_a_number_in_any_spelling_is_right_and_any_other_wrong(
    number: Fraction, spelling: Spelling, frame: str, data: st.DataObject
) -> None:
    spelled = spelling(number)
    assume(spelled is not None)
    response = frame.format(spelled)
    assert gsm8k_reward(response, str(number)) == 1.0
    near = [
        -number,
        number + 1,
        number * 10,
        number / 10,
        number * 1000,
        number % 1,
        number / 100,
        Fraction(number.numerator),
    ]
    other = data.draw(st.one_of(st.sampled_from(near), FRACTIONS))
    assert gsm8k_reward(response, str(other)) == float(other == number)


@settings(deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.integers(-100, 100))
def test_a_trace_never_changes_the_reward(thought: str, second: str, response: str, number: int) -> None:
    response = f"{response} {number}"
    for answer in (str(number), "72", "3/4"):
        reward = gsm8k_reward(response, answer)
        assert gsm8k_reward(f"<think>{thought}</think>{response}", answer) == reward
        assert gsm8k_reward(f"{thought}</think>{response}", answer) == reward
        assert gsm8k_reward(f"<think>{thought}<think>{second}</think>{thought}</think>{response}", answer) == reward
        assert gsm8k_reward(f"<think>{thought}</think><think>{second}</think>{response}", answer) == reward
        assert gsm8k_reward(f"{response}\n<think>{thought}</think>", answer) == reward
        assert gsm8k_reward(f"{response}<think>{thought}", answer) == 0.0


@settings(deadline=None)
@given(ANY_TEXTS, st.sampled_from(["72", "3/4", SOLUTION]))
def test_any_text_has_a_reward(response: str, answer: str) -> None:
    assert gsm8k_reward(response, answer) in {0.0, 1.0}


@settings(deadline=None)
@given(ANY_TEXTS, ANY_TEXTS)
def test_any_answer_is_read_or_refused(response: str, answer: str) -> None:
    try:
        reward = gsm8k_reward(response, answer)
    except ValueError as error:
        assert "no single number" in str(error)  # noqa: PT017 - most texts are no answer
    else:
        assert reward in {0.0, 1.0}
        assert "think>" in answer or gsm8k_reward(answer, answer) == 1.0
