"""Whole numbers written in text: plain digits, and bounded before they are read."""


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that `text` writes in plain digits; None if it is none, or out of range.

    `int` alone also takes other scripts' digits, and raises beyond some thousand of them.
    """
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if least <= number <= most else None
