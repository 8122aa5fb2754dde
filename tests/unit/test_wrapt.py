"""Why patches are plain functions: what a wrapt wrapper shows of itself to whoever compares code."""

import functools

import wrapt


def upstream(value: int) -> int:
    return value


def wrapper(wrapped: object, instance: object, args: tuple[int], kwargs: dict[str, int]) -> int:
    return args[0] + 1


def test_a_wrapper_has_the_code_of_the_function_inside() -> None:
    wrapped = wrapt.FunctionWrapper(upstream, wrapper)
    assert wrapped(1) == 2
    assert wrapped.__code__ is upstream.__code__


def test_a_patch_is_told_by_its_code() -> None:
    @functools.wraps(upstream)
    def replacement(value: int) -> int:
        return upstream(value) + 1

    assert replacement(1) == 2
    assert replacement.__code__ is not upstream.__code__
