"""``by_fields``: turns a function of a request into a function of the request's fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")


def by_fields(request: Callable[P, Request]) -> Callable[[Callable[[Request], Answer]], Callable[P, Answer]]:
    """Return a decorator. The decorated function takes the arguments of its request's class instead of a request."""
    def decorated(answer: Callable[[Request], Answer]) -> Callable[P, Answer]:
        @wraps(answer)
        def asked(*args: P.args, **kwargs: P.kwargs) -> Answer:
            return answer(request(*args, **kwargs))

        asked.__signature__ = signature(request)  # type: ignore[attr-defined]
        return asked

    return decorated
