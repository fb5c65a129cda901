"""The parts of a reply: its thinking, and what it says behind that."""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def answer_of(text: str, *, thinking_opened: bool = False) -> str:
    """What a reply says behind its thinking; empty while the thinking has no end.

    Parameters
    ----------
    thinking_opened
        Whether the generation prompt has opened the thinking: such a reply has only its end.

    Examples
    --------
    >>> answer_of("<think>\\nIs it 4? Yes.\\n</think>\\n\\n4")
    '4'
    """
    return parts_of(text, thinking_opened=thinking_opened)[1]


def parts_of(text: str, *, thinking_opened: bool = False) -> tuple[str, str]:
    """The thinking of a reply, and what it says behind that, as `answer_of`.

    Examples
    --------
    >>> parts_of("Is it 4? Yes.\n</think>\n\n4", thinking_opened=True)
    ('Is it 4? Yes.', '4')
    """
    thoughts, thinks = [], thinking_opened
    while True:
        before, opened, behind = text.partition(OPEN)
        if opened and not before.strip():
            thinks, text = True, behind
        thinking, closed, behind = text.partition(CLOSE)
        if closed and (thinks or OPEN not in thinking):
            thoughts.append(thinking.strip())
            thinks, text = False, behind.lstrip()
            continue
        if thinks:
            thoughts.append(text.strip())
        return "\n".join(filter(None, thoughts)), "" if thinks else text
