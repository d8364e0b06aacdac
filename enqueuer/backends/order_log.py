"""The order in which the loop was given items, as a state has it: one or two characters an item.

    an item is taken --> text += code_of(number - last) --> without(ready) --> state_dict()
    replay_order=state --> numbers_in(text) --> the same order again

An item is the number of a task, or the index of a shard. Each is written as its difference from the
one before, in Base64 VLQ, as in source maps: in a quiet run each task is a `C`, for 1.
"""

from __future__ import annotations

from collections.abc import Callable

_DIGITS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_VALUES = {character: value for value, character in enumerate(_DIGITS.decode())}
# A digit has five bits of a number, the lowest ones first, and this bit if another digit follows.
_FOLLOWED = 32
_DIGITS_FOLLOWED = _DIGITS[_FOLLOWED:]
# Codes that are remembered; a longer difference is rare.
_MOST_CODES = 4096


class _Codes(dict[int, bytes]):
    """The codes of differences, each made when it is asked for first.

    Example:
        >>> [_Codes()[difference] for difference in (1, -1, 15, 16)]
        [b'C', b'D', b'e', b'gB']
    """

    def __missing__(self, difference: int) -> bytes:
        # The lowest bit is the sign.
        rest, code = abs(difference) << 1 | (difference < 0), bytearray()
        while rest >= _FOLLOWED:
            code.append(_DIGITS[rest & (_FOLLOWED - 1) | _FOLLOWED])
            rest >>= 5
        code.append(_DIGITS[rest])
        if len(self) < _MOST_CODES:
            self[difference] = bytes(code)
        return bytes(code)


_code_of: Callable[[int], bytes] = _Codes().__getitem__
# Of a log that is not kept: nothing, however many times. No Python code runs for it.
_no_code: Callable[[int], bytes] = b"".__mul__


def numbers_in(text: str) -> list[int]:
    """Return the numbers in the order of a log.

    Raises:
        ValueError: It is none.
        KeyError: It has a character of no digit.

    Example:
        >>> numbers_in("CEDC")
        [0, 2, 1, 2]
    """
    numbers: list[int] = []
    last, value, shift = -1, 0, 0
    for character in text:
        digit = _VALUES[character]
        value |= (digit & (_FOLLOWED - 1)) << shift
        shift += 5
        if digit < _FOLLOWED:
            last += -(value >> 1) if value & 1 else value >> 1
            numbers.append(last)
            value = shift = 0
    if shift or min(numbers, default=0) < 0:
        raise ValueError("the order is no list of numbers")
    return numbers


class OrderLog:
    """The items that were taken, in their order.

    Code that takes an item asks for its code, and then writes `text` and `last` itself. These two
    stores need no call, see `Taken`.

    Args:
        given: Text of the items that were given before; None: the log is not kept.
        first: Number that counts as 0.

    Attributes:
        text: Codes of all items.
        last: Number of the last item.
        code_of: Function that returns the code of a difference; b"" if the log is not kept.

    Example:
        >>> log = OrderLog("CC", first=100)
        >>> log.last
        101
        >>> for number in (120, 102):
        ...     log.text += log.code_of(number - log.last); log.last = number
        >>> log.without(0), log.without(1), log.without(2), numbers_in(log.without(0))
        ('CCmBlB', 'CCmB', 'CC', [0, 1, 20, 2])
    """

    def __init__(self, given: str | None, first: int = 0) -> None:
        numbers = numbers_in(given or "")
        self.text = bytearray(given or "", "ascii")
        self.last = first + (numbers[-1] if numbers else -1)
        self._is_kept = given is not None
        self.code_of = _code_of if self._is_kept else _no_code

    def without(self, ready: int) -> str | None:
        """Return the text of all items but the last ones; None if the log is not kept."""
        if not self._is_kept:
            return None
        text, end = self.text, len(self.text)
        for _ in range(ready):
            end -= 1
            while end and text[end - 1] in _DIGITS_FOLLOWED:
                end -= 1
        return text[:end].decode()
